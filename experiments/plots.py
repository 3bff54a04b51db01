"""The figures of a study: the metric of every seed, accuracy by length or distance, and the loss on the way."""

import pathlib
import re
from typing import Any

import matplotlib
import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

from experiments import files
from experiments.folder import Run
from experiments.study import Study
from k3jax.report.palette import COLORS, SERIES
from k3jax.report.png import STYLE

Chosen = dict[tuple[str, str], dict[int, dict[str, Any]]]


def write(study: Study, chosen: Chosen, place: pathlib.Path, root: pathlib.Path) -> list[pathlib.Path]:
    """Writes the figures that the results allow, and returns their paths.

    Raises:
      ConfigError: the metric lines of a run are cut off.
    """
    drawn = {"results.png": _results(study, chosen), "curves.png": _curves(study, chosen, root)}
    for name, pattern in (("by_length.png", r"accuracy@(\d+)"), ("by_distance.png", r"recall@(\d+)-\d+")):
        figure = _by_number(study, chosen, pattern)
        if figure is not None:
            drawn[name] = figure
    for name, figure in drawn.items():
        with matplotlib.rc_context(STYLE):
            figure.savefig(place / name, dpi=110)
    return [place / name for name in drawn]


def _panels(chosen: Chosen, *, height: float = 2.8) -> tuple[Figure, dict[str, Any]]:
    """One panel for each rung."""
    rungs = list(dict.fromkeys(rung for rung, _ in chosen))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.6 * len(rungs) + 1, height), layout="constrained", facecolor="white")
        axes = dict(zip(rungs, np.ravel(figure.subplots(1, len(rungs), squeeze=False))))
    for rung, ax in axes.items():
        ax.set_title(rung)
    return figure, axes


def _color(study: Study, variant: str) -> dict[str, Any]:
    number = list(study.variants).index(variant)
    return {"color": SERIES[number % COLORS], "linestyle": ("-", "--", ":")[number // COLORS % 3]}


def _results(study: Study, chosen: Chosen) -> Figure:
    """A dot for each seed, a bar for the mean; runs that diverged are counted beside the name."""
    figure, axes = _panels(chosen)
    for rung, ax in axes.items():
        variants = [variant for where, variant in chosen if where == rung]
        names = []
        for place, variant in enumerate(variants):
            values = [study.metric.of({"metrics": row}) for row in chosen[rung, variant].values()]
            finite = [value for value in values if np.isfinite(value)]
            lost = len(values) - len(finite)
            names.append(f"{variant}\n{lost} of {len(values)} diverged" if lost else variant)
            color = _color(study, variant)["color"]
            ax.plot(finite, [place] * len(finite), "o", color=color, markersize=4, alpha=0.7)
            if finite:
                ax.plot([np.mean(finite)] * 2, [place - 0.3, place + 0.3], color=color, linewidth=2)
        ax.set_yticks(range(len(variants)), names)
        ax.set_ylim(-0.5, len(variants) - 0.5)
        ax.invert_yaxis()
        ax.set_xlabel(study.metric.name)
        ax.grid(axis="x")
    return figure


def _curves(study: Study, chosen: Chosen, root: pathlib.Path) -> Figure:
    """Training loss, mean over seeds at the best rate: those that came to the end or, without one, all up to where the
    first stops."""
    figure, axes = _panels(chosen)
    for (rung, variant), seeds in chosen.items():
        steps = study.config(rung, variant).steps
        ended = {seed: row for seed, row in seeds.items() if "diverged" not in row}
        curves = []
        for seed, row in (ended or seeds).items():
            place = Run(study, rung, variant, row["rate"], seed).folder(root)
            lines = files.lines(place, steps=steps if ended else None)
            curves.append({line["step"]: line["loss"] for line in lines if line["kind"] == "train"})
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        means = [np.mean([np.nan if c[step] is None else c[step] for c in curves]) for step in steps]
        axes[rung].plot(steps, means, label=variant, **_color(study, variant))
    for ax in axes.values():
        ax.set_xlabel("step")
        ax.set_ylabel("nats per token")
        ax.grid(axis="y")
    next(iter(axes.values())).legend(fontsize=6)
    return figure


def _by_number(study: Study, chosen: Chosen, pattern: str) -> Figure | None:
    """The measured numbers whose name has a number in it, such as accuracy@64, over that number."""
    rungs = {key: seeds for key, seeds in chosen.items() if _named(seeds, pattern)}
    if not rungs:
        return None
    figure, axes = _panels(rungs)
    for (rung, variant), seeds in rungs.items():
        names = _named(seeds, pattern)
        means = [np.mean([row[name] for row in seeds.values() if row.get(name) is not None]) for name in names.values()]
        axes[rung].plot(list(names), means, marker="o", markersize=3, label=variant, **_color(study, variant))
    for ax in axes.values():
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(ticker.FormatStrFormatter("%d"))
        ax.set_ylim(-0.03, 1.03)
        ax.set_xlabel("tokens" if "length" in pattern or "accuracy" in pattern else "tokens to the answer")
        ax.grid(axis="y")
    next(iter(axes.values())).legend(fontsize=6)
    return figure


def _named(seeds: dict[int, dict[str, Any]], pattern: str) -> dict[int, str]:
    """{number: name} of the matching numbers of a variant, in order."""
    names = {name for row in seeds.values() for name in row}
    found = {int(match[1]): name for name in names if (match := re.fullmatch(f"(?:.*\\.)?{pattern}", name))}
    return dict(sorted(found.items()))
