"""The charts as PNG files, by matplotlib: `loss.png`, and one file for each other section."""

import math
import pathlib

import matplotlib
import numpy as np
from matplotlib import colors, ticker
from matplotlib.figure import Figure

from k3jax.report import catalog
from k3jax.report.axis import Axis
from k3jax.report.charts import Card, Curves, Heat, Line
from k3jax.report.marks import marks
from k3jax.report.palette import COLORS, HEAT, LIGHT, SERIES
from k3jax.report.run import Run
from k3jax.report.svg import LABELS, level_text, short, ticks

MAX_PANELS = 24  # of a file
STYLE = {
    "font.size": 8,
    "axes.edgecolor": LIGHT["line"],
    "axes.titlecolor": LIGHT["ink"],
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.7,
    "xtick.color": LIGHT["line"],
    "ytick.color": LIGHT["line"],
    "xtick.labelcolor": LIGHT["soft"],
    "ytick.labelcolor": LIGHT["soft"],
    "legend.frameon": False,
    "legend.fontsize": 7,
    "legend.labelcolor": LIGHT["ink"],
    "lines.linewidth": 1.3,
}


def write(cards: list[Card], runs: list[Run], axis: Axis, folder: pathlib.Path) -> None:
    """Writes `loss.png` and `charts/SECTION.png` of every section that has a chart."""
    with matplotlib.rc_context(STYLE):
        for section in catalog.SECTIONS:
            panels = [(card, chart) for card in cards if card.section == section for chart in card.charts]
            if panels:
                path = folder / "loss.png" if section == "loss" else folder / "charts" / f"{section}.png"
                path.parent.mkdir(exist_ok=True)
                _figure(panels[:MAX_PANELS], runs, axis).savefig(path, dpi=150 if section == "loss" else 110)


def _figure(panels: list[tuple[Card, Curves | Heat]], runs: list[Run], axis: Axis) -> Figure:
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = (10, 4.4) if len(panels) == 1 else (11, 2.6 * rows)
    figure = Figure(figsize=size, facecolor="white")
    every = np.ravel(figure.subplots(rows, columns, squeeze=False))
    for axes, (card, chart) in zip(every, panels):
        title = f"{card.title}: {chart.title}" if chart.title else card.title
        if isinstance(chart, Heat):
            _heat(axes, chart, axis)
        else:
            _curves(axes, chart, runs, axis)
        axes.set_title(" · ".join([title, *(run.name for run in runs)]) if card.section == "loss" else title)
    for axes in every[len(panels) :]:
        axes.remove()
    height = figure.get_size_inches()[1]
    figure.subplots_adjust(0.07, 0.42 / height, 0.98, 1 - 0.3 / height, wspace=0.16, hspace=0.5)
    return figure


def _curves(axes, chart: Curves, runs: list[Run], axis: Axis) -> None:
    if chart.stacked:
        below = np.zeros_like(chart.lines[0].y)
        for line in chart.lines:
            above = below + np.nan_to_num(line.y)
            axes.fill_between(line.x, below, above, color=SERIES[line.color % COLORS], alpha=0.6, label=line.name)
            below = above
    else:
        for line in chart.lines:
            _line(axes, line)
    for value in chart.levels.values():
        axes.axhline(value, color=LIGHT["soft"], linestyle=(0, (4, 3)), linewidth=1)
    for name, value in chart.levels.items():
        look = dict(ha="right", va="bottom", color=LIGHT["soft"])
        axes.annotate(f"{name} {level_text(value, chart)}", (1, value), xycoords=axes.get_yaxis_transform(), **look)
    for number, run in enumerate(runs if chart.x_ticks is None else []):
        color = LIGHT["soft"] if len(runs) == 1 else SERIES[number % COLORS]
        for x in sorted({mark.x for mark in marks(run, axis)})[:200]:
            axes.axvline(x, color=color, linestyle=(0, (1, 2)), linewidth=0.8)
    if chart.log:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    places = ticks(chart.low, chart.high, log=chart.log)
    axes.set_yticks(places, [short(place, chart.unit) for place in places])
    axes.set_ylim(chart.low, chart.high)
    axes.set_xlim(*chart.span)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: short(x)))
    axes.set_xlabel(axis.quantity if chart.x_ticks is None else chart.x_name, color=LIGHT["soft"])
    if chart.x_ticks is not None:
        axes.set_xticks(*zip(*chart.x_ticks))
    axes.grid(axis="y")
    if sum(bool(line.name) for line in chart.lines) > 1:
        axes.legend(ncols=1 if len(chart.lines) < 5 else 3, loc="upper right")


def _line(axes, line: Line) -> None:
    color = SERIES[line.color % COLORS]
    if line.low is not None:
        axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.2, linewidth=0.4)
    look = {"linewidth": 0.8, "alpha": 0.4} if line.faint else {"linewidth": 1.4, "marker": "o" if line.dots else ""}
    style = ("-", "--", ":")[line.color // COLORS % 3]
    axes.plot(line.x, line.y, color=color, linestyle=style, markersize=3, label=line.name or None, **look)


def _heat(axes, chart: Heat, axis: Axis) -> None:
    rows, columns = chart.grid.shape
    span = (0, columns) if chart.columns else chart.span
    norm = (colors.LogNorm if chart.log else colors.Normalize)(chart.low, chart.high, clip=True)
    picture = axes.imshow(
        chart.grid, aspect="auto", interpolation="none", cmap=HEAT[chart.colors], norm=norm, extent=(*span, rows, 0)
    )
    every = max(1, -(-rows // LABELS))
    axes.set_yticks(np.arange(0, rows, every) + 0.5, chart.rows[::every])
    axes.set_ylabel(chart.row_name, color=LIGHT["soft"])
    axes.set_xlabel(chart.column_name if chart.columns else axis.quantity, color=LIGHT["soft"])
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: short(x)))
    if chart.columns:
        every = max(1, -(-columns // 14))
        axes.set_xticks(np.arange(0, columns, every) + 0.5, chart.columns[::every])
    bar = axes.figure.colorbar(picture, ax=axes, pad=0.01)
    places = ticks(chart.low, chart.high, log=chart.log)
    bar.set_ticks(places, labels=[short(place, chart.unit) for place in places])
    bar.ax.yaxis.set_minor_locator(ticker.NullLocator())
    bar.outline.set_visible(False)
