"""How long runs take, from what finished ones took: operations over seconds, set-up and evaluation included; without
those that diverged before their end."""

import csv
import pathlib
import statistics
from collections.abc import Iterator
from typing import NamedTuple

from experiments import files, folder, measures
from experiments.study import FOLDER, Study
from k3jax.run_config import TrainConfig


class Speed(NamedTuple):
    """Operations per second of one finished run."""

    study: str
    rung: str
    flops_per_second: float


def speeds(root: pathlib.Path = folder.ROOT) -> list[Speed]:
    """Of the runs on this machine or, where there are none, of those in the committed tables."""
    return list(_of_runs(root)) or list(_of_tables())


def _of_runs(root: pathlib.Path) -> Iterator[Speed]:
    for path in sorted(root.glob(f"*/*/*/*/{folder.RESULT}")):
        found = files.read(path)
        if "diverged" not in found["metrics"]:
            yield Speed(found["study"], found["rung"], found["cost"]["flops"] / found["seconds"])


def _of_tables() -> Iterator[Speed]:
    for path in sorted(FOLDER.glob("*/results.csv")):
        with open(path, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if not row.get("diverged"):
                    yield Speed(row["study"], row["rung"], float(row["flops"]) / float(row["seconds"]))


def seconds(study: Study, rung: str, config: TrainConfig, known: list[Speed]) -> float | None:
    """A guess for one run, from the nearest kin that is known: its rung, its study, any; None without one."""
    kin = [
        [s.flops_per_second for s in known if (s.study, s.rung) == (study.name, rung)],
        [s.flops_per_second for s in known if s.study == study.name],
        [s.flops_per_second for s in known],
    ]
    nearest = next((found for found in kin if found), None)
    flops = measures.sizes(config)["flops_per_token"] * config.tokens
    return flops / statistics.median(nearest) if nearest else None


def table(study: Study, groups: list[tuple[str, str]], *, seeds: int, root: pathlib.Path = folder.ROOT) -> str:
    """The groups (rung, variant) as text: runs, parameters, tokens, operations, minutes."""
    head = ("rung", "variant", "runs", "parameters", "active", "tokens", "FLOPs", "minutes")
    rows, total, known = [head], 0.0, speeds(root)
    for rung, variant in groups:
        config = study.config(rung, variant)
        sizes, planned = measures.sizes(config), study.rungs[rung].planned
        runs = len(study.rates) + seeds - 1
        guess = None if planned else seconds(study, rung, config, known)
        total += runs * (guess or 0)
        cost = f"{sizes['parameters']:,}", f"{sizes['active_parameters']:,}", f"{config.tokens:.3g}"
        minutes = "planned" if planned else "unknown" if guess is None else f"{runs * guess / 60:.1f}"
        rows.append((rung, variant, str(runs), *cost, f"{sizes['flops_per_token'] * config.tokens:.2e}", minutes))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    lines.append(f"{total / 60:.0f} minutes in all" if total else "no run has been timed yet: no estimate")
    return "\n".join([*lines, "Parameters are those without embedding and head."])
