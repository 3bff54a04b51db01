"""Fits a line of loss over computation to each recipe of a ladder, L = A C^-a, and compares the two.

    python -m experiments.ladder s12_ladder

C is in PFLOP/s-days and L in nats, as published. The ratio is the computation that the baseline needs, over that of the
control, for the loss that the control's line has at the largest rung. Its interval is a bootstrap over the seeds of
every rung: it says nothing of how well a line describes the points, and with few seeds it is too narrow, by a tenth
with five and by a fifth with three.
"""

import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from absl import app, flags
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import folder, table
from experiments.study import Study, load
from k3jax.config import ConfigError, require
from k3jax.exits import leave
from k3jax.report.palette import SERIES
from k3jax.report.png import STYLE

PFLOP_DAY = 1e15 * 86400
LINE = re.compile(r"([\d.]+) C\^-([\d.]+)")

Points = dict[float, list[float]]
"""Losses of the seeds in nats, by computation."""


class Power(NamedTuple):
    """L = A C^-a."""

    A: float
    a: float

    def loss(self, C: float) -> float:
        return self.A * C**-self.a

    def computation(self, L: float) -> float:
        """Where the line has this loss; infinite for a line that does not fall, or comes there beyond all numbers."""
        if self.a <= 0:
            return math.inf
        exponent = math.log(self.A / L) / self.a
        return math.exp(exponent) if exponent < 700 else math.inf

    @classmethod
    def of(cls, text: str) -> "Power | None":
        """From ``A C^-a``; None for other text."""
        match = LINE.fullmatch(text)
        return cls(float(match[1]), float(match[2])) if match else None


class Comparison(NamedTuple):
    """Both lines, the ratio of computations at equal loss, and its 95 % bootstrap interval."""

    control: Power
    other: Power
    ratio: float
    low: float
    high: float


def fit(points: Points) -> Power:
    """Least squares of log L over log C, every seed a point.

    Raises:
      ConfigError: fewer than two sizes.
    """
    require(len(points) > 1, f"a line needs two sizes, and only {len(points)} has finished runs")
    C, L = zip(*((C, L) for C, losses in points.items() for L in losses))
    slope, intercept = np.polyfit(np.log(C), np.log(L), 1)
    return Power(math.exp(intercept), -float(slope))


def compare(control: Points, other: Points, *, draws: int = 2000, seed: int = 0) -> Comparison:
    """See the head of this file. A draw whose baseline does not fall has no ratio and counts as infinite."""
    rng = np.random.default_rng(seed)

    def drawn(points: Points) -> Points:
        return {C: list(rng.choice(losses, len(losses))) for C, losses in points.items()}

    def ratio(lines: tuple[Power, Power]) -> float:
        C = max(control)
        return lines[1].computation(lines[0].loss(C)) / C

    lines = fit(control), fit(other)
    ratios = [ratio((fit(drawn(control)), fit(drawn(other)))) for _ in range(draws)]
    low, high = np.quantile(ratios, [0.025, 0.975], method="nearest")  # between infinite ones there is no middle
    return Comparison(*lines, ratio(lines), float(low), float(high))


def points_of(study: Study, found: list[table.Row], variant: str) -> Points:
    """The points of a variant at its best rates.

    Raises:
      ConfigError: the study is not decided by bits per byte, or a run diverged.
    """
    metric = study.metric.name
    require(metric == "bits_per_byte", f"study {study.name} is decided by {metric}, but a ladder by bits_per_byte")
    points: Points = {}
    for (rung, name), seeds in table.at_best(study, found).items():
        if name == variant:
            for seed, row in seeds.items():
                loss = study.metric.of({"metrics": row}) * math.log(2)
                require(math.isfinite(loss), f"{rung} {variant}, seed {seed} diverged: a line needs all of its points")
                points.setdefault(row["flops"] / PFLOP_DAY, []).append(loss)
    return points


def figure(study: Study, points: dict[str, Points], found: Comparison) -> Figure:
    """Points and lines; beside them, because neither their computation nor their unit of loss is that of runs on bytes,
    the published lines over the computation of the runs behind them."""
    published = list(_published(study, list(points)))
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(10 if published else 6, 5), layout="constrained", facecolor="white")
        panels = drawn.subplots(1, 2 if published else 1, squeeze=False)[0]
        for number, (name, line) in enumerate(zip(points, (found.control, found.other))):
            every = [(c, loss) for c, losses in points[name].items() for loss in losses]
            panels[0].plot(*zip(*every), "o", color=SERIES[number], markersize=4)
            _line(panels[0], line, (min(points[name]), max(points[name])), name, color=SERIES[number])
        _scales(panels[0], f"here: ratio {found.ratio:.2f} [{found.low:.2f}, {found.high:.2f}]", "nats per byte")
        for number, (source, span, lines) in enumerate(published):
            for (name, line), style in zip(lines.items(), ("-", "--")):
                _line(panels[1], line, span, name, color=SERIES[number], linestyle=style)
            control, other = lines.values()
            ratio = other.computation(control.loss(span[1])) / span[1]
            panels[1].plot([], [], " ", label=f"{source}: ratio {ratio:.2f} at {span[1]:g}")
        if published:
            _scales(panels[1], "published", "nats per token")
    return drawn


def _published(study: Study, names: list[str]) -> Iterator[tuple[str, tuple[float, float], dict[str, Power]]]:
    """Source, span and lines of what is published on all the variants ``names``."""
    for one in study.published:
        lines = {name: Power.of(str(one.numbers.get(name))) for name in names}
        if one.span and all(lines.values()):
            yield one.source, one.span, lines


def _line(axes: Axes, line: Power, span: tuple[float, float], name: str, **style: Any) -> None:
    axes.plot(span, [line.loss(C) for C in span], label=f"{name}: {line.A:.4g} C^-{line.a:.4f}", **style)


def _scales(axes: Axes, title: str, loss: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%.3g"))
    axes.yaxis.set_minor_formatter(ticker.FormatStrFormatter("%.3g"))
    axes.set_title(title)
    axes.set_xlabel("PFLOP/s-days")
    axes.set_ylabel(loss)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.15))


def main(argv: list[str]) -> None:
    try:
        if len(argv) != 2:
            raise ConfigError(f"give one study, got {argv[1:]}")
        study, place = load(argv[1])
        found = table.rows(study, pathlib.Path(flags.FLAGS.root))
        absent = table.missing(study, found)
        require(not absent, f"study {study.name} is not finished. {'; '.join(absent)}")
        require(len(study.variants) == 2, f"a ladder compares two variants, and {study.name} has {len(study.variants)}")
        (other,) = {*study.variants} - {study.control}
        points = {name: points_of(study, found, name) for name in (study.control, other)}
        result = compare(points[study.control], points[other])
    except ConfigError as error:
        leave(f"experiments.ladder: {error}")
    with matplotlib.rc_context(STYLE):
        figure(study, points, result).savefig(place / "ladder.png", dpi=110)
    print(f"{study.control}: L = {result.control.A:.4g} C^-{result.control.a:.4f}")
    print(f"{other}: L = {result.other.A:.4g} C^-{result.other.a:.4f}")
    print(f"computation ratio at equal loss: {result.ratio:.3f} [{result.low:.3f}, {result.high:.3f}]")
    print(f"written: {place / 'ladder.png'}")


if __name__ == "__main__":
    flags.DEFINE_string("root", str(folder.ROOT), "where the folders of runs lie")
    app.run(main)
