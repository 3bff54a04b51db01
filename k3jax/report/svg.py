"""Charts as HTML: plain SVG for what is drawn, ordinary text for what is read.

A drawing is stretched to the width that the page has, its lines keep theirs, and labels stand beside it at their own
size: a chart is as readable on a phone as on a wide screen. Colors are CSS variables, which follow the theme.
"""

import base64
import html
import io

import numpy as np
from matplotlib import image, ticker

from k3jax.report import palette
from k3jax.report.charts import Card, Curves, Heat, Line
from k3jax.report.marks import NAMES, Mark

WIDTH, HEIGHT = 1000, 1000  # of a drawing, in its own units
LABELS = 7  # rows of a heat map that are named
MANY_RUNS = 4  # the events of more would cover the curves


def card(card: Card, marks: list[list[Mark]], x_name: str) -> str:
    """A section with its charts. marks: of every run."""
    height = 300 if card.section == "loss" else 190 if len(card.charts) == 1 else 140
    heats = any(isinstance(chart, Heat) for chart in card.charts)
    many = card.wide and len(card.charts) > 1
    if len(marks) > MANY_RUNS and card.section != "loss":
        marks = []
    parts = [
        chart_html(chart, marks, x_name, height=height, legend=not many or heats or i == 0)
        for i, chart in enumerate(card.charts)
    ]
    parts += [_mark_legend(marks)] if card.section == "loss" else []
    note = f"<p>{html.escape(card.note)}</p>" if card.note else ""
    body = f'<div class="{("pairs" if heats else "grid") if many else "charts"}">{"".join(parts)}</div>'
    kind = "wide" if card.wide else "half"
    return f'<section class="card {kind}"><h3>{html.escape(card.title)}</h3>{body}{note}</section>'


def chart_html(
    chart: Curves | Heat, marks: list[list[Mark]], x_name: str, *, height: int = 190, legend: bool = True
) -> str:
    """One chart with its axes and legend."""
    if isinstance(chart, Heat):
        return _heat(chart, x_name)
    own = chart.x_ticks is not None
    ys = ticks(chart.low, chart.high, log=chart.log)
    grid = "".join(f"M0,{_y(y, chart)}H{WIDTH}" for y in ys)
    drawing = f'<path class=rule d="{grid}"/>{_marks([] if own else marks, chart.span)}{_levels(chart)}'
    drawing += _areas(chart) if chart.stacked else "".join(_line(part, chart) for part in chart.lines)
    return (
        f'<figure style="--h:{height}px" {_data(chart, x_name)}>{_title(chart.title)}<div class=plot>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio=none aria-hidden=true>{drawing}</svg>'
        f"{_y_labels([(_y(y, chart), short(y, chart.unit)) for y in ys])}{_x_labels(chart.span, chart.x_ticks)}"
        f"{_level_labels(chart)}</div>{_legend(chart) if legend and chart.legend else ''}</figure>"
    )


def _data(chart: Curves, x_name: str) -> str:
    """What the page's script needs to turn places into values."""
    name = x_name if chart.x_ticks is None else chart.x_name
    text = f'data-x="{chart.span[0]:.6g} {chart.span[1]:.6g}" data-y="{chart.low:.6g} {chart.high:.6g}" '
    text += f'data-log="{int(chart.log)}" data-unit="{chart.unit}" data-name="{html.escape(name)}"'
    if chart.x_ticks is not None:
        places = ";".join(f"{_x(place, chart.span)} {name}" for place, name in chart.x_ticks)
        text += f' data-ticks="{html.escape(places)}"'
    return text + (" data-stacked=1" if chart.stacked else "")


def ticks(low: float, high: float, *, log: bool = False, count: int = 4, whole: bool = False) -> list[float]:
    """Round numbers within a range, or whole ones; on a logarithmic scale powers of ten, with some between where few
    are."""
    if not log:
        found = ticker.MaxNLocator(count, integer=whole).tick_values(low, high)
    else:
        decades = np.log10(high / low)
        choices = ((1, (1, 1.5, 2, 3, 4, 6, 8)), (2.2, (1, 2, 5)), (3.5, (1, 3)))
        subs = next((subs for most, subs in choices if decades < most), (1,))
        powers = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
        powers = powers[:: max(1, len(powers) // 6)]
        found = np.array([power * sub for power in powers for sub in subs])
    inside = [float(t) for t in found if low * (1 - 1e-9) - 1e-300 <= t <= high * (1 + 1e-9) + 1e-300]
    if log and len(inside) < 2:
        return ticks(low, high, log=False, count=count)
    return inside


def short(value: float, unit: str = "") -> str:
    """Tick text: 14k, 2M, 0.003, 2e-5, 30%, 1.5x, 3 GB."""
    if unit == "%":
        return f"{100 * value:.4g}%"
    if unit == "bytes":
        return f"{short(value)}B"
    size = abs(value)
    for power, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= power:
            return f"{value / power:.4g}{letter}{unit}"
    if size == 0 or size >= 1e-3:
        return f"{value:.4g}{unit}"
    return f"{value:.3g}".replace("e-0", "e-") + unit


def _x(x, span: tuple[float, float]) -> np.ndarray:
    return np.round((np.asarray(x) - span[0]) / (span[1] - span[0]) * WIDTH).astype(int)


def _y(y, chart: Curves | Heat) -> np.ndarray:
    """Downward, clipped to a little outside the drawing; NaN gives an arbitrary place."""
    low, high, y = chart.low, chart.high, np.asarray(y, np.float64)
    if chart.log:
        low, high, y = np.log(low), np.log(high), np.log(np.maximum(y, low / 2))
    share = np.nan_to_num(np.clip((y - low) / (high - low), -0.05, 1.05))
    return np.round((1 - share) * HEIGHT).astype(int)


def _line(line: Line, chart: Curves) -> str:
    x, y = _x(line.x, chart.span), _y(line.y, chart)
    color = f"c{line.color % palette.COLORS} d{line.color // palette.COLORS % 3}"
    name = html.escape(line.name)
    parts = []
    if line.low is not None:
        for part in _pieces(line.low):
            low, high = _y(line.low, chart)[part], _y(line.high, chart)[part]
            outline = np.concatenate([np.stack([x[part], high], 1), np.stack([x[part], low], 1)[::-1]])
            parts.append(f'<path class="band {color}" d="{_path(*outline.T)}Z"/>')
    d = "".join(_path(x[part], y[part]) for part in _pieces(line.y))
    if line.dots or len(line.x) <= 2:
        known = np.isfinite(line.y)
        dots = "".join(f"M{a},{b}h0" for a, b in zip(x[known], y[known]))
        parts.append(f'<path class="dots {color}" d="{dots}"/>')
    named = f' data-n="{name}"' if name else ""
    parts.append(f'<path class="line{" faint" if line.faint else ""} {color}"{named} d="{d}"/>')
    return "".join(parts)


def _areas(chart: Curves) -> str:
    """Parts of a whole, each between the sum of those before it and the sum with it."""
    parts, below = [], np.zeros_like(chart.lines[0].y)
    for line in chart.lines:
        above = below + np.nan_to_num(line.y)
        x = _x(line.x, chart.span)
        outline = np.concatenate([np.stack([x, _y(above, chart)], 1), np.stack([x, _y(below, chart)], 1)[::-1]])
        color = f"c{line.color % palette.COLORS}"
        parts.append(f'<path class="area {color}" d="{_path(*outline.T)}Z"/>')
        parts.append(
            f'<path class="line thin {color}" data-n="{html.escape(line.name)}" d="{_path(x, _y(above, chart))}"/>'
        )
        below = above
    return "".join(parts)


def _pieces(values: np.ndarray) -> list[slice]:
    """Runs of neighbors without NaN."""
    edges = np.flatnonzero(np.diff(np.isfinite(values).astype(int), prepend=0, append=0))
    return [slice(a, b) for a, b in zip(edges[::2], edges[1::2])]


def _path(x: np.ndarray, y: np.ndarray) -> str:
    return "M" + " ".join(f"{a},{b}" for a, b in zip(x.tolist(), y.tolist())) + ("h0" if len(x) == 1 else "")


def _marks(marks: list[list[Mark]], span: tuple[float, float]) -> str:
    """Vertical lines; those that fall on one place are one. The color is the kind's, among several runs the run's."""
    parts = []
    for number, run in enumerate(marks):
        kinds: dict[str, set[int]] = {}
        for mark in run:
            kinds.setdefault(mark.kind, set()).add(int(_x(mark.x, span)))
        for kind, places in kinds.items():
            color = f"run c{number % palette.COLORS}" if len(marks) > 1 else kind
            d = "".join(f"M{x},0V{HEIGHT}" for x in sorted(places))
            parts.append(f'<path class="mark {color}" d="{d}"/>')
    return "".join(parts)


def _mark_legend(marks: list[list[Mark]]) -> str:
    if len(marks) > 1:
        return "<figcaption><span class=m>events of a run, in its color</span></figcaption>" if any(marks) else ""
    kinds = {mark.kind: None for mark in marks[0]}
    return f"<figcaption>{''.join(f'<span class="m {kind}">{NAMES[kind]}</span>' for kind in kinds)}</figcaption>"


def _levels(chart: Curves) -> str:
    d = "".join(f"M0,{_y(value, chart)}H{WIDTH}" for value in chart.levels.values())
    return f'<path class=level d="{d}"/>' if d else ""


def _level_labels(chart: Curves) -> str:
    return "".join(
        f'<b class=at style="top:{_y(value, chart) / HEIGHT:.1%}">{html.escape(name)} {level_text(value, chart)}</b>'
        for name, value in chart.levels.items()
    )


def level_text(value: float, chart: Curves) -> str:
    """The value of a horizontal line."""
    return short(float(f"{value:.3g}"), chart.unit) if chart.unit else f"{value:.2f}"


def _title(title: str) -> str:
    return f"<h4>{html.escape(title)}</h4>" if title else ""


def _y_labels(labels: list[tuple[int, str]]) -> str:
    spans = "".join(f'<i style="top:{place / HEIGHT:.1%}">{html.escape(text)}</i>' for place, text in labels)
    return f"<div class=ys>{spans}</div>"


def _x_labels(span: tuple[float, float], named: list[tuple[float, str]] | None = None) -> str:
    places = (
        [(x, short(x)) for x in ticks(*span, count=6, whole=True)] if named is None else named[:: -(-len(named) // 14)]
    )
    few = len(places) <= 5  # on a phone every other one is left out
    spans = "".join(
        f'<i{"" if few or i % 2 == 0 else " class=m"} style="left:{_x(x, span) / WIDTH:.1%}">{html.escape(text)}</i>'
        for i, (x, text) in enumerate(places)
    )
    return f"<div class=xs>{spans}</div>"


def _legend(chart: Curves) -> str:
    spans = "".join(
        f'<span class="c{line.color % palette.COLORS} d{line.color // palette.COLORS % 3}'
        f'{" o" if line.dots else ""}">{html.escape(line.name)}</span>'
        for line in chart.lines
        if line.name
    )
    return f"<figcaption>{spans}</figcaption>"


def _heat(chart: Heat, x_name: str) -> str:
    rows, columns = chart.grid.shape
    levels = _levels_of(chart)
    name = chart.column_name if chart.columns else x_name
    attributes = (
        f'data-x="{chart.span[0]:.6g} {chart.span[1]:.6g}" data-y="{chart.low:.6g} {chart.high:.6g}" '
        f'data-log="{int(chart.log)}" data-unit="{chart.unit}" data-rows="{html.escape(",".join(chart.rows))}" '
        f'data-row="{html.escape(chart.row_name)}" data-name="{html.escape(name)}" '
        f'data-v="{base64.b64encode(levels.tobytes()).decode()}"'
    )
    if chart.columns:
        attributes += f' data-columns="{html.escape(";".join(chart.columns))}"'
        x_labels = _x_labels((0, columns), [(i + 0.5, text) for i, text in enumerate(chart.columns)])
    else:
        x_labels = _x_labels(chart.span)
    every = max(1, -(-rows // LABELS))
    y_labels = [(round((i + 0.5) / rows * HEIGHT), text) for i, text in enumerate(chart.rows) if i % every == 0]
    height = min(max(rows * (14 if rows < 20 else 5), 60), 320)
    alt = html.escape(f"heat map, {rows} rows")
    return (
        f'<figure class=heat style="--h:{height}px" {attributes}>{_title(chart.title)}<div class=plot>'
        f'<img alt="{alt}" src="data:image/png;base64,{_png(levels, chart.colors)}">'
        f"{_y_labels(y_labels)}{x_labels}</div>"
        f"<figcaption>{_scale(chart)}</figcaption></figure>"
    )


def _rows_by(chart: Heat) -> str:
    return f"{chart.row_name}s by {chart.column_name}" if chart.columns else f"{chart.row_name}s"


def _levels_of(chart: Heat) -> np.ndarray:
    """[rows, columns] uint8: 1..255 from low to high, 0 where there is no number."""
    low, high, grid = chart.low, chart.high, chart.grid
    if chart.log:
        low, high, grid = np.log(low), np.log(high), np.log(np.where(grid > 0, grid, low))
    share = np.clip((grid - low) / (high - low), 0.0, 1.0)
    return np.where(np.isfinite(share), np.round(1 + 254 * np.nan_to_num(share)), 0).astype(np.uint8)


def _png(levels: np.ndarray, scale: palette.Scale) -> str:
    colors = palette.HEAT[scale]((np.arange(256) - 1) / 254, bytes=True)
    colors[0] = 0
    buffer = io.BytesIO()
    image.imsave(buffer, colors[levels], format="png")
    return base64.b64encode(buffer.getvalue()).decode()


def _scale(chart: Heat) -> str:
    """The color scale with its ends, and what a row is."""
    colors = ",".join(palette.STOPS[chart.colors])
    low, high = (short(float(f"{end:.3g}"), chart.unit) for end in (chart.low, chart.high))
    return (
        f"<span>{html.escape(_rows_by(chart))}</span><em>{low}"
        f'<u style="background:linear-gradient(90deg,{colors})"></u>{high}</em>'
    )
