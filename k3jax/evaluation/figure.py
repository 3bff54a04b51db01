"""The figure of an evaluation: one panel per task, accuracy by length, and for needles by depth and length."""

import io
import math
from typing import Any

import matplotlib
from matplotlib import ticker
from matplotlib.figure import Figure

from k3jax.report.palette import LIGHT, SERIES
from k3jax.report.png import STYLE

COLUMNS = 3


def figure_png(tasks: list[dict[str, Any]]) -> bytes:
    """A PNG of the task records that :func:`k3jax.evaluation.measure` returns, at least one."""
    columns = min(COLUMNS, len(tasks))
    rows = math.ceil(len(tasks) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.6 * columns, 3.0 * rows), layout="constrained", facecolor=LIGHT["page"])
        for number, task in enumerate(tasks):
            axes = figure.add_subplot(rows, columns, number + 1)
            axes.set_title(task["task"])
            (_grid if "depth" in task["cells"][0] else _curve)(axes, task)
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=150)
    return png.getvalue()


def _curve(axes, task: dict[str, Any]) -> None:
    """Accuracy of answers and of whole examples by length, and chance."""
    cells = [cell for cell in task["cells"] if cell["accuracy"] is not None]
    lengths = [cell["length"] for cell in cells]
    for number, (field, label) in enumerate((("accuracy", "answers"), ("exact", "whole examples"))):
        axes.plot(lengths, [cell[field] for cell in cells], "o-", color=SERIES[number], label=label, markersize=4)
    axes.axhline(task["chance"], color=LIGHT["soft"], linestyle=":", label="chance")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(ticker.FixedLocator(lengths))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    with_pairs = "pairs" in task["cells"][0]
    axes.set_xticklabels([f"{c['length']}\n{c['pairs']} pairs" if with_pairs else str(c["length"]) for c in cells])
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("tokens")
    axes.legend(frameon=False)


def _grid(axes, task: dict[str, Any]) -> None:
    """Share of needles found whole, by depth and length."""
    lengths = sorted({cell["length"] for cell in task["cells"]})
    depths = sorted({cell["depth"] for cell in task["cells"]})
    found = {(cell["depth"], cell["length"]): cell["exact"] for cell in task["cells"]}
    table = [[found[depth, length] for length in lengths] for depth in depths]
    axes.imshow(table, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(table):
        for x, share in enumerate(row):
            axes.text(x, y, f"{share:.2f}", ha="center", va="center", color=LIGHT["ink"])
    axes.set_xticks(range(len(lengths)), map(str, lengths))
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth")
    axes.grid(False)
