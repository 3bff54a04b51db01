"""The charts of runs as plain numbers: which curves and heat maps there are, and the few points that each needs.

`k3jax.report.svg` draws them for the page, `k3jax.report.png` for files.
"""

import dataclasses

import numpy as np

from k3jax.report import catalog, palette
from k3jax.report.axis import Axis
from k3jax.report.buckets import bucket, raster
from k3jax.report.fields import Field
from k3jax.report.run import Run

COLUMNS = 400  # of a curve
CELLS = 240  # columns of a heat map
MAX_MAPS = 4  # runs whose heat maps are shown; of more there are only curves
FEW_ROWS = 3  # lists so short are curves
LOG_FACTOR = 30  # from where on numbers are shown on a logarithmic scale


@dataclasses.dataclass(frozen=True)
class Line:
    """One curve; `low` and `high` are the extremes around it, `color` counts through the palette."""

    name: str
    x: np.ndarray
    y: np.ndarray
    color: int = 0
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    dots: bool = False
    faint: bool = False


@dataclasses.dataclass(frozen=True)
class Curves:
    """Lines over one axis, from x `span[0]` to `span[1]` and from y `low` to `high`.

    levels: horizontal lines by name. stacked: each line is a part, drawn on top of those before it. x_ticks: places and
    names on an axis of its own, called `x_name`; None is the axis of the page.
    """

    title: str
    lines: list[Line]
    span: tuple[float, float]
    low: float
    high: float
    log: bool = False
    unit: catalog.Unit = ""
    stacked: bool = False
    levels: dict[str, float] = dataclasses.field(default_factory=dict)
    x_ticks: list[tuple[float, str]] | None = None
    x_name: str = ""


@dataclasses.dataclass(frozen=True)
class Heat:
    """A table of colors. grid: [rows, columns]; `columns` are the names of its columns, None when they divide the
    horizontal axis of the page. `low` and `high` are the values at the ends of the color scale."""

    title: str
    grid: np.ndarray
    rows: list[str]
    row_name: str
    span: tuple[float, float]
    low: float
    high: float
    log: bool = False
    unit: catalog.Unit = ""
    colors: palette.Scale = "plain"
    columns: list[str] | None = None
    column_name: str = ""


@dataclasses.dataclass(frozen=True)
class Card:
    """What is shown under one title. A wide one takes the whole width of the page."""

    section: str
    title: str
    note: str
    charts: list[Curves | Heat]
    wide: bool = False


def cards(runs: list[Run], axis: Axis) -> list[Card]:
    """A card for every number that the training lines hold, except the loss: known ones first, in the catalog's
    order."""
    groups: dict[str, tuple[catalog.Spec, dict[str, str]]] = {name: (spec, {}) for name, spec in catalog.SPECS.items()}
    for run in runs:
        for name, field in run.train.items():
            if name in catalog.HIDDEN or not np.isfinite(field.values).any():
                continue
            group, member, spec = catalog.find(name, scalar=field.values.ndim == 1)
            groups.setdefault(group, (spec, {}))[1][name] = member
    return [_card(spec, names, runs, axis) for spec, names in groups.values() if names]


def curves(
    title: str, lines: list[Line], span: tuple[float, float], *, scale: catalog.Scale = "auto", **rest
) -> Curves:
    """A chart whose value axis fits its lines and levels."""
    ends = [values for line in lines for values in (line.y, line.low, line.high) if values is not None]
    if rest.get("stacked"):
        ends = [np.nansum([line.y for line in lines], axis=0)]
    known = np.concatenate([*map(np.ravel, ends), list(rest.get("levels", {}).values())])
    known = known[np.isfinite(known)]
    low, high, log = _range(known, scale)
    return Curves(title, lines, span, low, high, log, **rest)


def line(name: str, x: np.ndarray, y: np.ndarray, axis: Axis, color: int, **rest) -> Line:
    """A curve of at most COLUMNS points with the extremes around it."""
    few = bucket(x, y, axis.span, COLUMNS)
    thinned = few.mean.shape != y.shape
    return Line(name, few.x, few.mean, color, few.low if thinned else None, few.high if thinned else None, **rest)


def _card(spec: catalog.Spec, names: dict[str, str], runs: list[Run], axis: Axis) -> Card:
    lists = [name for name in names if any(run.train[name].values.ndim > 1 for run in runs if name in run.train)]
    scalars = {name: member for name, member in names.items() if name not in lists}
    charts: list[Curves | Heat] = _scalar_charts(spec, scalars, runs, axis) if scalars else []
    for name in lists:
        charts += _list_charts(name, spec, runs, axis)
    return Card(spec.section, spec.title, spec.note, charts, wide=len(runs) > 1 and len(charts) > 1)


def _scalar_charts(spec: catalog.Spec, names: dict[str, str], runs: list[Run], axis: Axis) -> list[Curves]:
    """One run: a chart with a line per name. Several: a chart per name with a line per run."""

    def one(run: Run, name: str, label: str, color: int) -> Line:
        field = run.train[name]
        return line(label, axis.places(run, field.steps), field.values, axis, color)

    if len(runs) == 1:
        lines = [one(runs[0], name, member.replace("_", " "), i) for i, (name, member) in enumerate(names.items())]
        return [curves("", lines, axis.span, scale=spec.scale, unit=spec.unit, stacked=spec.stacked)]
    return [
        curves(
            member.replace("_", " "),
            [one(run, name, run.name, i) for i, run in enumerate(runs) if name in run.train],
            axis.span,
            scale=spec.scale,
            unit=spec.unit,
        )
        for name, member in names.items()
    ]


def _list_charts(name: str, spec: catalog.Spec, runs: list[Run], axis: Axis) -> list[Curves | Heat]:
    """Curves, a heat map with a row per entry, and for nested lists a table of the newest values."""
    found = [(i, run, _rows(run.train[name], spec)) for i, run in enumerate(runs) if name in run.train]
    several, count = len(runs) > 1, found[0][2].values.shape[1]
    each = not several and count <= (palette.COLORS if spec.inner == "source" else FEW_ROWS)
    if each:
        lines = _entries(*found[0][1:], spec, axis)
    else:
        lines = [_envelope(run, field, axis, i, several=several) for i, run, field in found]
    charts: list[Curves | Heat] = [curves("", lines, axis.span, scale=spec.scale, unit=spec.unit)]
    if len(runs) <= MAX_MAPS and not (each and count <= FEW_ROWS):
        charts += _heats(found, spec, axis, several=several)
    if len(runs) <= MAX_MAPS:
        charts += [chart for _, run, _ in found for chart in _latest(name, spec, run, several=several)]
    return charts


def _entries(run: Run, field: Field, spec: catalog.Spec, axis: Axis) -> list[Line]:
    """A curve per entry of a list."""
    x, labels = axis.places(run, field.steps), row_labels(run, spec, field.values.shape[1])
    return [line(f"{_row_name(spec)} {label}", x, field.values[:, i], axis, i) for i, label in enumerate(labels)]


def _heats(found: list[tuple[int, Run, Field]], spec: catalog.Spec, axis: Axis, *, several: bool) -> list[Heat]:
    """A heat map per run, all with the same scale of colors."""
    everything = np.concatenate([field.values.ravel() for _, _, field in found])
    low, high, log = _range(everything[np.isfinite(everything)], spec.scale, robust=True)
    tint: palette.Scale = {"high": "bad", "low": "good", "": "plain"}[spec.extreme]
    heats = []
    for _, run, field in found:
        x = axis.places(run, field.steps)
        few = bucket(x, field.values.T, axis.span, CELLS)
        cells = {"high": few.high, "low": few.low, "": few.mean}[spec.extreme]
        grid = raster(few.x, cells, axis.span, CELLS)
        width = (axis.span[1] - axis.span[0]) / CELLS
        ended = axis.span[0] + np.arange(CELLS) * width > x[-1]
        grid = np.where(ended, np.nan, grid)
        labels = row_labels(run, spec, len(grid))
        title = run.name if several else ""
        heats.append(Heat(title, grid, labels, _row_name(spec), axis.span, low, high, log, spec.unit, tint))
    return heats


def _rows(field: Field, spec: catalog.Spec) -> Field:
    """[N, rows]: of nested lists, the extreme over the innermost; of depth sources, the mean over layers."""
    values = field.values
    if values.ndim == 2:
        return field
    if spec.inner == "source":
        count = np.isfinite(values).sum(axis=tuple(range(1, values.ndim - 1)))
        total = np.nansum(values, axis=tuple(range(1, values.ndim - 1)))
        return Field(field.steps, np.where(count > 0, total / np.maximum(count, 1), np.nan))
    fill, reduce = (np.inf, np.min) if spec.extreme == "low" else (-np.inf, np.max)
    worst = reduce(np.where(np.isfinite(values), values, fill), axis=-1)
    return Field(field.steps, np.where(np.isfinite(worst), worst, np.nan).reshape(len(values), -1))


def _envelope(run: Run, field: Field, axis: Axis, color: int, *, several: bool) -> Line:
    """The mean over the rows, between the lowest and the highest of them."""
    few = bucket(axis.places(run, field.steps), field.values.T, axis.span, COLUMNS)
    known = np.isfinite(few.mean)
    count = known.sum(axis=0)
    mean = np.where(count > 0, np.nansum(few.mean, axis=0) / np.maximum(count, 1), np.nan)
    low = np.where(count > 0, np.where(known, few.low, np.inf).min(axis=0), np.nan)
    high = np.where(count > 0, np.where(known, few.high, -np.inf).max(axis=0), np.nan)
    return Line(run.name if several else "mean, between lowest and highest", few.x, mean, color, low, high)


def _latest(name: str, spec: catalog.Spec, run: Run, *, several: bool) -> list[Heat]:
    """The newest values of nested lists, as a table."""
    values = run.train[name].values
    if values.ndim < 3:
        return []
    grid = values[-1].reshape(-1, values.shape[-1]).T
    known = grid[np.isfinite(grid)]
    if not len(known):
        return []
    low, high, log = _range(known, "zero" if spec.inner == "source" else spec.scale)
    title = f"{run.name}, newest values by layer" if several else "Newest values by layer"
    inner = [str(i) for i in range(len(grid))]
    outer = row_labels(run, dataclasses.replace(spec, inner=""), grid.shape[1])
    outer_name = _row_name(dataclasses.replace(spec, inner=""))
    inner_name = spec.inner or "entry"
    return [
        Heat(title, grid, inner, inner_name, (0, 1), low, high, log, spec.unit, columns=outer, column_name=outer_name)
    ]


def row_labels(run: Run, spec: catalog.Spec, count: int) -> list[str]:
    """The numbers of the layers of a kind, from 1 as the configuration counts them; without it, their own order."""
    model = run.config.get("model")
    model = model if isinstance(model, dict) else {}
    total, full, dense = model.get("layers"), model.get("full_attention"), model.get("dense_layers")
    layers: list[int] = []
    if isinstance(total, int) and isinstance(full, list) and isinstance(dense, int):
        every = range(1, total + 1)
        layers = {
            "MLA": [n for n in every if n in full],
            "KDA": [n for n in every if n not in full],
            "MoE": [n for n in every if n > dense],
            "all": list(every),
        }.get(spec.layers, [])
    if spec.inner == "source" or not layers or count % len(layers):
        return [str(i) for i in range(0 if spec.inner == "source" else 1, count + (spec.inner != "source"))]
    return [str(layer) for layer in layers for _ in range(count // len(layers))]


def _row_name(spec: catalog.Spec) -> str:
    if spec.inner == "source":
        return "source"
    return {"": "entry", "all": "layer"}.get(spec.layers, f"{spec.layers} layer")


def _range(known: np.ndarray, scale: catalog.Scale, *, robust: bool = False) -> tuple[float, float, bool]:
    """(low, high, logarithmic) for an axis or, robust, a color scale: there a few outliers only reach its ends."""
    if not len(known):
        return 0.0, 1.0, False
    low, high = (float(x) for x in (np.percentile(known, [0.5, 99.5]) if robust else (known.min(), known.max())))
    positive = known[known > 0]
    if len(positive) == len(known):
        log = scale == "log" or (scale == "auto" and high > LOG_FACTOR * np.percentile(known, 2))
    else:
        log = scale == "log" and 2 * len(positive) > len(known)
        low = float(positive.min()) if log else low
    if log:
        margin = 1.0 if robust else max((high / low) ** 0.03, 1.001)
        return low / margin, max(high, low * 1.01) * margin, True
    if high <= low:
        high = low + (abs(low) * 0.1 or 1.0)
    margin = 0.0 if robust else 0.04 * (high - low)
    if scale == "zero" and low >= 0:
        return 0.0, high + margin, False
    return low - margin, high + margin, False
