"""The compiler's plans of a search: one process for each, several at a time, within a budget of seconds."""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import psutil

from k3jax.plan.search import Candidate, Found, undominated
from k3jax.progress import Progress

BYTES = 6e9
"""Memory of a process that compiles the largest preset."""


class Call(NamedTuple):
    """What every process is told, beside its layout."""

    config: str
    topology: str
    settings: tuple[str, ...]

    def command(self, layout: str, folder: pathlib.Path) -> list[str]:
        settings = [word for setting in self.settings for word in ("--set", setting)]
        return [sys.executable, "-m", "k3jax.plan", "--config", self.config, "--topology", self.topology,
                "--layout", layout, *settings, "--out", str(folder)]  # fmt: skip


def compiled(
    found: Found,
    call: Call,
    out: pathlib.Path | None,
    *,
    budget: float,
    count: int,
    progress: Progress,
    run: Callable = subprocess.run,
) -> Found:
    """The search with the best ``count`` of its layouts compiled, as far as ``budget`` seconds go. A process that fails
    costs its own layout only.

    Args:
      out: keeps the plans, in a folder each; None keeps none.
      run: starts a process; `subprocess.run` but in tests.
    """
    chosen, deadline = promising(found, count), time.monotonic() + budget
    workers = max(min(os.cpu_count() or 1, int(psutil.virtual_memory().available // BYTES), len(chosen)), 1)
    progress.phase(f"compiling {len(chosen)} layouts, {workers} at a time")
    with tempfile.TemporaryDirectory() as spare, concurrent.futures.ThreadPoolExecutor(workers) as pool:
        folder = pathlib.Path(spare) if out is None else out
        tasks = {
            pool.submit(_one, candidate, call, folder / f"candidate_{number}", deadline, run): candidate
            for number, candidate in enumerate(chosen, 1)
        }
        done: list[Candidate] = []
        for task in concurrent.futures.as_completed(tasks):
            done.append(task.result())
            progress.phase(f"compiling: {len(done)} of {len(chosen)} layouts done, {workers} at a time")
    rest = [one for one in found.fitting if one not in chosen]
    failed = [one for one in done if one.failure or not one.fits]
    fitting = [one for one in (*done, *rest) if one not in failed]
    fitting.sort(key=lambda one: (one.compiled is None, one.step))
    best = undominated([one for one in fitting if one.compiled] or fitting)
    return dataclasses.replace(found, fitting=fitting, best=best, failed=failed)


def promising(found: Found, count: int) -> list[Candidate]:
    """The fastest, and where they leave room those that need less memory than every faster one; of layouts that differ
    in nothing that arithmetic sees, the first."""
    seen, chosen = set(), []
    for one in (*found.fitting[: max(count - len(found.best), 1)], *found.best, *found.fitting):
        key = round(one.step, 4), one.bytes
        if key not in seen:
            seen.add(key)
            chosen.append(one)
    return chosen[:count]


def _one(one: Candidate, call: Call, folder: pathlib.Path, deadline: float, run: Callable) -> Candidate:
    left = deadline - time.monotonic()
    if left <= 0:
        return dataclasses.replace(one, late="no time was left for it")
    environment = {"JAX_OPTIMIZATION_LEVEL": "O1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"} | os.environ
    try:
        ended = run(call.command(one.layout, folder), env=environment, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return dataclasses.replace(one, late=f"not done in the {left:.0f} s that were left")
    if ended.returncode:
        said = [line for line in ended.stderr.splitlines() if line.strip()]
        reason = next((line for line in said if line.startswith("error: ")), said[-1] if said else "no word")
        return dataclasses.replace(one, failure=reason.removeprefix("error: "))
    return dataclasses.replace(one, compiled=json.loads((folder / "plan.json").read_text(encoding="utf-8")))
