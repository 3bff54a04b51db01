"""The charts, drawn once by matplotlib: as a PNG file, and as SVG whose colors follow the page's light or dark theme.

A chart is drawn in the light colors. For the page each of them is replaced by the CSS variable of the same name, so
that one drawing serves both themes.
"""

import io
import re

import matplotlib
import numpy as np
from matplotlib import colors, ticker
from matplotlib.figure import Figure

from k3jax.report.run import Run

LIGHT = {
    "ink": "#1d2329",
    "soft": "#68727d",
    "line": "#dfe3e8",
    "page": "#fcfcfb",
    "card": "#fffffe",
    "c0": "#2563c9",
    "c1": "#d4582a",
    "c2": "#128068",
    "c3": "#8649c0",
    "c4": "#a97c08",
    "c5": "#bf3a76",
    "c6": "#4d8f1e",
    "c7": "#5b6f85",
}
DARK = {
    "ink": "#e8eaed",
    "soft": "#98a2ad",
    "line": "#31373e",
    "page": "#15181b",
    "card": "#1c2024",
    "c0": "#74a7ff",
    "c1": "#ff9166",
    "c2": "#4fd0b0",
    "c3": "#c39af0",
    "c4": "#e2bd4e",
    "c5": "#f58bb8",
    "c6": "#97cf63",
    "c7": "#a3b4c6",
}
SERIES = [LIGHT[f"c{i}"] for i in range(8)]
BALANCE = colors.LinearSegmentedColormap.from_list("balance", ["#2c7d8c", "#8fbf9f", "#f0cf6a", "#e0733e", "#b3203c"])

MAX_POINTS = 400  # of one curve: what a chart of this width can show
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "k3jax",
    "font.size": 10,
    "axes.edgecolor": LIGHT["line"],
    "axes.labelcolor": LIGHT["soft"],
    "axes.titlecolor": LIGHT["ink"],
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.7,
    "xtick.color": LIGHT["line"],
    "ytick.color": LIGHT["line"],
    "xtick.labelcolor": LIGHT["soft"],
    "ytick.labelcolor": LIGHT["soft"],
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.labelcolor": LIGHT["ink"],
    "lines.solid_capstyle": "round",
    "lines.linewidth": 1.7,
}


def loss_png(run: Run) -> bytes:
    """The loss curves as a PNG on white."""
    with matplotlib.rc_context(STYLE):
        figure = _loss_figure(run)
        figure.axes[0].set_title(run.name)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=160, facecolor="white")
    return buffer.getvalue()


def page_charts(run: Run) -> dict[str, str]:
    """SVG text by name; a chart whose numbers the run did not log is left out."""
    makers = {
        "loss": _loss_figure,
        "grad_norm": lambda run: _curve_figure(run, "grad_norm", log=True),
        "update_rms": _update_figure,
        "lr": lambda run: _curve_figure(run, "lr", color=3),
        "tokens_per_second": lambda run: _curve_figure(run, "tokens_per_second", color=2),
        "balance": _balance_figure,
        "dead_share": _dead_figure,
    }
    charts = {}
    with matplotlib.rc_context(STYLE):
        for name, make in makers.items():
            figure = make(run)
            if figure is not None:
                charts[name] = _themed_svg(figure)
    return charts


def _themed_svg(figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    for name, color in LIGHT.items():
        text = text.replace(color, f"var(--{name})")
    return re.sub(r"\n\s*", "\n", text)


def thin(steps: np.ndarray, values: np.ndarray, points: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most `points` points: means of equal runs of neighbors along the last axis. NaN stays only where all are."""
    size = -(-steps.shape[-1] // points)
    if size <= 1:
        return steps, values
    edges = np.arange(0, steps.shape[-1], size)
    known = np.isfinite(values)
    total = np.add.reduceat(np.where(known, values, 0.0), edges, axis=-1)
    count = np.add.reduceat(known, edges, axis=-1, dtype=np.int64)
    means = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    lengths = np.diff(np.append(edges, steps.shape[-1]))
    return np.add.reduceat(steps, edges) / lengths, means


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a centered window of 3 % of the points, narrower at the steep start; NaN does not count."""
    known = np.isfinite(values)
    total = np.append(0.0, np.cumsum(np.where(known, values, 0.0)))
    count = np.append(0, np.cumsum(known))
    places = np.arange(len(values))
    half = np.minimum(places, len(values) * 3 // 200)
    low, high = places - half, np.minimum(places + half + 1, len(values))
    number = count[high] - count[low]
    return np.where(number > 0, (total[high] - total[low]) / np.maximum(number, 1), np.nan)


def _axes(width: float, height: float):
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
    axes.grid(axis="x", visible=False)
    axes.margins(x=0.01)
    return figure, axes


def _loss_figure(run: Run):
    """Bits per byte of training batches and of held-out text, against what gzip and xz need for the latter."""
    figure, axes = _axes(10, 4.2)
    steps, nats = run.series("loss")
    noisy_steps, noisy = thin(steps, nats / np.log(2.0))
    axes.plot(noisy_steps, noisy, color=SERIES[0], alpha=0.25, linewidth=1)
    axes.plot(noisy_steps, _smooth(noisy), color=SERIES[0], label="training batches")
    if run.evals:
        axes.plot(
            [line["step"] for line in run.evals],
            [line["bits_per_byte"] for line in run.evals],
            color=SERIES[1],
            marker="o",
            markersize=4,
            label="held-out files",
        )
    for name, sizes in run.baselines.items():
        axes.axhline(sizes["whole"], color=LIGHT["soft"], linestyle=(0, (4, 3)), linewidth=1.1)
        axes.annotate(
            f"{name} {sizes['whole']:.2f}",
            (1.0, sizes["whole"]),
            xycoords=axes.get_yaxis_transform(),
            xytext=(5, 0),
            textcoords="offset points",
            color=LIGHT["soft"],
            va="center",
            fontsize=9,
        )
    _log_axis(axes, (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0))
    axes.set_ylabel("bits per byte")
    axes.set_xlabel("step")
    axes.legend(loc="upper right")
    return figure


def _log_axis(axes, marks: tuple[float, ...] = (1.0, 2.0, 5.0)) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    marks = marks if high < 300 * low else (1.0,)
    axes.yaxis.set_major_locator(ticker.LogLocator(base=10, subs=marks, numticks=12))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(_short))
    axes.yaxis.set_minor_locator(ticker.NullLocator())


def _curve_figure(run: Run, field: str, *, log: bool = False, color: int = 0):
    steps, values = thin(*run.series(field))
    if not np.isfinite(values).any():
        return None
    figure, axes = _axes(4.8, 2.7)
    axes.plot(steps, values, color=SERIES[color], linewidth=1.4)
    if log and np.nanmin(values) > 0:
        _log_axis(axes)
    else:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(_short))
    return figure


def _update_figure(run: Run):
    steps, roles = run.by_role("update_rms")
    roles = {name: values for name, values in roles.items() if np.nanmax(values, initial=0.0) > 0}
    if not roles:
        return None
    figure, axes = _axes(4.8, 2.7)
    for number, (name, values) in enumerate(roles.items()):
        style = ("-", (0, (4, 2)), (0, (1, 1.5)))[number // len(SERIES) % 3]
        axes.plot(*thin(steps, values), color=SERIES[number % len(SERIES)], linestyle=style, linewidth=1.3, label=name)
    _log_axis(axes)
    figure.legend(loc="outside lower center", ncols=3, columnspacing=1.2, handlelength=1.6)
    return figure


def _balance_figure(run: Run):
    """A heat map: a row per MoE layer, color = load of the busiest expert over the mean."""
    steps, layers = run.by_layer("max_over_mean")
    if not np.isfinite(layers).any():
        return None
    steps, layers = thin(steps, layers, 160)
    figure, axes = _axes(10, 1.1 + 0.2 * len(layers))
    top = max(3.0, float(np.nanpercentile(layers, 99)))
    image = axes.imshow(
        layers,
        aspect="auto",
        interpolation="none",
        cmap=BALANCE,
        norm=colors.LogNorm(1.0, top),
        extent=(steps[0], max(steps[-1], steps[0] + 1), len(layers) + 0.5, 0.5),
    )
    axes.grid(visible=False)
    axes.set_ylabel("MoE layer")
    axes.set_xlabel("step")
    axes.yaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
    ticks = [tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 50, 100) if tick <= top]
    bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=12, ticks=ticks)
    bar.ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:g}x"))
    bar.ax.yaxis.set_minor_locator(ticker.NullLocator())
    bar.outline.set_visible(False)
    return figure


def _dead_figure(run: Run):
    """Share of experts that received no token: the worst layer and the mean over layers."""
    steps, layers = run.by_layer("dead_share")
    known = np.isfinite(layers).all(axis=0)
    if not known.any():
        return None
    steps, layers = steps[known], layers[:, known]
    figure, axes = _axes(10, 2.2)
    axes.plot(*thin(steps, layers.max(axis=0)), color=SERIES[1], linewidth=1.4, label="worst layer")
    axes.plot(*thin(steps, layers.mean(axis=0)), color=SERIES[2], linewidth=1.4, label="mean of the layers")
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
    axes.set_ylim(bottom=0, top=max(0.05, float(layers.max()) * 1.05))
    axes.set_xlabel("step")
    axes.legend(loc="upper right")
    return figure


def _short(value: float, _=None) -> str:
    """Tick text: 14k, 2M, 0.003, 2e-5."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:g}M"
    if size >= 1e3:
        return f"{value / 1e3:g}k"
    return f"{value:g}" if size == 0 or size >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")
