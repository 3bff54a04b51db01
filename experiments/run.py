"""Runs a study: every variant at every rung, each with its own small search of the learning rate.

    python -m experiments.run s01_kda_ancestors
    python -m experiments.run s01_kda_ancestors --rung recall --variants kda,gated_deltanet --seeds 5 --jobs 2
    python -m experiments.run s01_kda_ancestors --dry-run

A run that is finished is not made again, and one that was cut goes on from its last checkpoint. One process makes the
runs of one variant at one rung (`experiments.group`). The exit code is that of the groups that failed, if they agree
(`k3jax.exits`), and 1 otherwise.
"""

import contextlib
import itertools
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil
from absl import app, flags
from rich.live import Live
from rich.table import Table

from experiments import estimate, files, folder
from experiments.folder import Run
from experiments.study import Study, load
from k3jax.config import ConfigError, require
from k3jax.exits import Exit, leave

JOB_BYTES = 3 << 30  # a process with a compiled step of the sizes that are run here
Group = tuple[str, str]


def groups(study: Study, rungs: Sequence[str], variants: Sequence[str], *, planned: bool = False) -> list[Group]:
    """(rung, variant) of everything asked for; empty lists ask for all.

    Raises:
      ConfigError: there is no such rung or variant, or the rung is a published size, which is only planned.
    """
    chosen = rungs or (list(study.rungs) if planned else study.run_here)
    found = [(rung, variant) for rung in chosen for variant in variants or study.variants]
    for rung, variant in found:
        study.config(rung, variant)
        require(
            planned or not study.rungs[rung].planned,
            f"study {study.name}: rung {rung!r} is planned, not run here: see python -m experiments.plan {study.name}",
        )
    return found


def fitting(jobs: int, available: int) -> int:
    """How many of ``jobs`` processes the machine's free memory holds, at least one."""
    return max(1, min(jobs, available // JOB_BYTES))


class Pool:
    """The processes of a study, at most ``jobs`` at a time."""

    def __init__(self, study: Study, todo: list[Group], *, seeds: int, jobs: int, root: pathlib.Path):
        self._study, self._todo, self._jobs, self._root = study, list(todo), jobs, root
        self._seeds, self._all = seeds, list(todo)
        self._running: dict[Group, subprocess.Popen] = {}
        self.failed: dict[Group, tuple[int, str]] = {}

    def run(self) -> None:
        """Returns when all have ended; asks those that run to stop when this process is asked to."""
        with contextlib.ExitStack() as stack:
            before = signal.signal(signal.SIGTERM, lambda *_: leave("asked to stop", Exit.PREEMPTED))
            stack.callback(signal.signal, signal.SIGTERM, before)
            live = stack.enter_context(Live(self.table(), refresh_per_second=1)) if sys.stdout.isatty() else None
            stack.callback(self._stop)
            seen = 0
            while self._todo or self._running:
                self._start()
                time.sleep(0.5)
                self._collect()
                if live:
                    live.update(self.table())
                elif (done := sum(self._done(self._results(group)) for group in self._all)) != seen:
                    seen = done
                    print(f"{done} of {len(self._all) * self._runs} runs", flush=True)

    @property
    def _runs(self) -> int:
        return len(self._study.rates) + self._seeds - 1

    def _start(self) -> None:
        while self._todo and len(self._running) < self._jobs:
            group = self._todo.pop(0)
            log = self._log(group)
            log.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "experiments.group", self._study.name, *group]
            command += [f"--seeds={self._seeds}", f"--root={self._root}"]
            with open(log, "ab") as output:
                self._running[group] = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def _collect(self) -> None:
        for group, process in list(self._running.items()):
            if process.poll() is not None:
                del self._running[group]
                code = process.returncode
                if code:
                    lines = self._log(group).read_text(encoding="utf-8", errors="replace").strip().splitlines()
                    self.failed[group] = code if code > 0 else 128 - code, lines[-1] if lines else "it said nothing"

    def _stop(self) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.wait()

    def _log(self, group: Group) -> pathlib.Path:
        return self._root / self._study.name / group[0] / f"{group[1]}.log"

    def _results(self, group: Group) -> list[dict]:
        place = Run(self._study, *group, self._study.rates[0], 0).folder(self._root).parent
        return [files.read(path) for path in sorted(place.glob(f"*/{folder.RESULT}"))]

    def _done(self, results: list[dict]) -> int:
        return min(self._runs, len(results))

    def table(self) -> Table:
        """Every group with its state, the runs made, and the best of the metric so far."""
        metric = self._study.metric
        table = Table("rung", "variant", "state", "runs", f"best {metric.name}", "minutes")
        for group in self._all:
            results = self._results(group)
            values = [metric.of(found) for found in results]
            best = f"{values[metric.best(values)]:.4g}" if values else ""
            state = "running" if group in self._running else "waiting" if group in self._todo else "done"
            state = "failed" if group in self.failed else state
            minutes = sum(found["seconds"] for found in results) / 60
            table.add_row(*group, state, f"{self._done(results)}/{self._runs}", best, f"{minutes:.1f}")
        return table


def main(argv: list[str]) -> None:
    args = flags.FLAGS
    root = pathlib.Path(args.root)
    try:
        if len(argv) != 2:
            raise ConfigError(f"give one study, got {argv[1:]}")
        require(args.jobs > 0, f"--jobs={args.jobs}, but it takes at least one process")
        require(args.seeds == 0 or args.seeds > 1, f"--seeds={args.seeds}, but an interval needs at least two")
        study, _ = load(argv[1])
        seeds, dry = args.seeds or study.seeds, args["dry-run"].value
        todo = groups(study, args.rung, args.variants, planned=dry)
        if dry:
            print(estimate.table(study, todo, seeds=seeds, root=root))
            return
        for (rung, variant), rate, seed in itertools.product(todo, study.rates, range(seeds)):
            folder.result(Run(study, rung, variant, rate, seed), root)
    except ConfigError as error:
        leave(f"experiments.run: {error}")
    jobs = fitting(args.jobs, psutil.virtual_memory().available)
    if jobs < args.jobs:
        print(f"{jobs} of {args.jobs} jobs fit the free memory")
    pool = Pool(study, todo, seeds=seeds, jobs=jobs, root=root)
    try:
        pool.run()
    except KeyboardInterrupt:
        leave("experiments.run: interrupted; the same command goes on", Exit.INTERRUPTED)
    for group, (code, reason) in pool.failed.items():
        print(f"failed: {' '.join(group)} (exit code {code}): {reason}", file=sys.stderr)
    codes = {code for code, _ in pool.failed.values()}
    raise SystemExit(max(codes, default=0) if len(codes) < 2 else 1)


if __name__ == "__main__":
    flags.DEFINE_multi_string("rung", [], "a rung; repeat for several; default all that are run here")
    flags.DEFINE_list("variants", [], "variants, separated by commas; default all")
    flags.DEFINE_integer("seeds", 0, "runs of each variant at its best rate, at least two; 0 for those of the study")
    flags.DEFINE_integer("jobs", 1, "processes at a time, fewer if the memory is too small")
    flags.DEFINE_bool("dry-run", False, "list the runs and what they cost, and run none")
    flags.DEFINE_string("root", str(folder.ROOT), "where the folders of runs lie")
    app.run(main)
