"""The charts of runs as plain numbers: which curves and heat maps there are, and the few points that each needs.

`k3jax.report.svg` draws them for the page, `k3jax.report.png` for files.
"""

import dataclasses

import numpy as np

from k3jax.report import catalog, palette
from k3jax.report.axis import Axis
from k3jax.report.buckets import bucket, raster
from k3jax.report.fields import Field
from k3jax.report.run import Run, last_value

COLUMNS = 400  # of a curve
CELLS = 240  # columns of a heat map
MAX_MAPS = 4  # runs whose heat maps are shown; of more there are only curves
FEW_ROWS = 3  # lists so short are curves
FEW_POINTS = 3  # of so few each is a dot
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
    names on an axis of its own, called `x_name`; None is the axis of the page. legend: whether its lines need names.
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
    legend: bool = True


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


@dataclasses.dataclass(frozen=True)
class Member:
    """One field of the runs that have it: (number of the run, run, field)."""

    name: str
    label: str
    found: list[tuple[int, Run, Field]]

    @property
    def is_list(self) -> bool:
        return self.found[0][2].values.ndim > 1


def cards(runs: list[Run], axis: Axis) -> list[Card]:
    """A card for every number of the lines: those of training that are known in the catalog's order, any others, those
    of evaluations, and those of lines of other kinds."""
    train = [{n: f for n, f in run.train.items() if n not in catalog.HIDDEN} for run in runs]
    shown_with_loss = {"bytes"} | ({"bits_per_byte"} if in_bits(runs) else set())
    evals = [{n: f for n, f in run.evals.items() if n not in shown_with_loss | catalog.COUNTERS} for run in runs]
    others = [run.other for run in runs]
    return [
        *_group_cards(train, runs, axis, known=catalog.SPECS),
        *_group_cards(evals, runs, axis, section="evaluation"),
        *_group_cards(others, runs, axis),
    ]


def in_bits(runs: list[Run]) -> bool:
    """Whether the training lines say how many bytes their tokens stand for."""
    return any(last_value(run.train.get("bits_per_byte")) is not None for run in runs)


def _group_cards(
    tables: list[dict[str, Field]],
    runs: list[Run],
    axis: Axis,
    *,
    known: dict[str, catalog.Spec] | None = None,
    section: str = "further",
) -> list[Card]:
    """Cards of the fields of every run, those of one group together."""
    groups: dict[str, tuple[catalog.Spec, dict[tuple[str, bool], Member]]] = {
        name: (spec, {}) for name, spec in (known or {}).items()
    }
    for number, (run, table) in enumerate(zip(runs, tables)):
        for name, field in table.items():
            if np.isfinite(field.values).any():
                is_list = field.values.ndim > 1
                group, label = (name, "") if name in groups else catalog.split(name, scalar=not is_list)
                _, members = groups.setdefault(group, (catalog.Spec(section, catalog.words(group)), {}))
                member = members.setdefault((name, is_list), Member(name, label.replace("_", " "), []))
                member.found.append((number, run, field))
    several = len(runs) > 1
    return [_card(spec, list(members.values()), axis, several=several) for spec, members in groups.values() if members]


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


def _card(spec: catalog.Spec, members: list[Member], axis: Axis, *, several: bool) -> Card:
    scalars = [member for member in members if not member.is_list]
    charts: list[Curves | Heat] = _scalar_charts(spec, scalars, axis, several=several) if scalars else []
    for member in members:
        if member.is_list:
            charts += _list_charts(member, spec, axis, several=several)
    return Card(spec.section, spec.title, spec.note, charts, wide=several and len(charts) > 1)


def _scalar_charts(spec: catalog.Spec, members: list[Member], axis: Axis, *, several: bool) -> list[Curves]:
    """One run: a chart with a line per field. Several: a chart per field with a line per run."""

    def one(run: Run, field: Field, label: str, color: int) -> Line:
        dots = spec.section == "evaluation" or len(field.steps) <= FEW_POINTS
        return line(label, axis.places(run, field.steps), field.values, axis, color, dots=dots)

    look = {"scale": spec.scale, "unit": spec.unit}
    if several:
        return [
            curves(member.label, [one(run, field, run.name, i) for i, run, field in member.found], axis.span, **look)
            for member in members
        ]
    lines = [one(*member.found[0][1:], member.label or spec.title, i) for i, member in enumerate(members)]
    stacked = spec.stacked and all(np.array_equal(part.x, lines[0].x) for part in lines)
    return [curves("", lines, axis.span, stacked=stacked, legend=len(lines) > 1 or bool(members[0].label), **look)]


def _list_charts(member: Member, spec: catalog.Spec, axis: Axis, *, several: bool) -> list[Curves | Heat]:
    """Curves, a heat map with a row per entry, and for nested lists a table of the newest values."""
    found = [(i, run, _rows(field, spec)) for i, run, field in member.found]
    count = found[0][2].values.shape[1]
    each = not several and count <= (palette.COLORS if spec.inner == "source" else FEW_ROWS)
    if each:
        lines = _entries(*found[0][1:], spec, axis)
    else:
        lines = [_envelope(run, field, axis, i, several=several) for i, run, field in found]
    charts: list[Curves | Heat] = [curves(member.label, lines, axis.span, scale=spec.scale, unit=spec.unit)]
    if len(found) <= MAX_MAPS and not (each and count <= FEW_ROWS):
        charts += _heats(found, spec, axis, several=several)
    if len(found) <= MAX_MAPS:
        charts += [table for _, run, field in member.found for table in _latest(run, field, spec, several=several)]
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


def _latest(run: Run, field: Field, spec: catalog.Spec, *, several: bool) -> list[Heat]:
    """The newest values of nested lists, as a table."""
    values = field.values
    if values.ndim < 3:
        return []
    grid = values[-1].reshape(-1, values.shape[-1]).T
    known = grid[np.isfinite(grid)]
    if not len(known):
        return []
    low, high, log = _range(known, spec.scale, robust=True)
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
