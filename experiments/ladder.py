"""Fits a line of loss over computation to each recipe of a ladder, L = A C^-a, and compares the two.

    python -m experiments.ladder s12_ladder

C is in PFLOP/s-days and L in nats, as published. The ratio is the computation that the baseline needs, over that of the
control, for the loss that the control's line has at the largest rung; its interval is a bootstrap over seeds.
"""

import math
import pathlib
from typing import NamedTuple

import matplotlib
import numpy as np
from absl import app, flags
from matplotlib.figure import Figure

from experiments import folder, table
from experiments.study import Study, load
from k3jax.config import ConfigError, require
from k3jax.exits import leave
from k3jax.report.palette import LIGHT, SERIES
from k3jax.report.png import STYLE

PFLOP_DAY = 1e15 * 86400
PUBLISHED = {"Kimi Linear": (2.2879, 0.0527), "its MLA baseline": (2.3092, 0.0536)}

Points = dict[float, list[float]]
"""Losses of the seeds in nats, by computation."""


class Power(NamedTuple):
    """L = A C^-a."""

    A: float
    a: float

    def loss(self, C: float) -> float:
        return self.A * C**-self.a

    def computation(self, L: float) -> float:
        """Where the line has this loss."""
        return (self.A / L) ** (1 / self.a)


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
    """See the head of this file. A draw whose line does not fall has no ratio and counts as infinite."""
    rng = np.random.default_rng(seed)

    def drawn(points: Points) -> Points:
        return {C: list(rng.choice(losses, len(losses))) for C, losses in points.items()}

    def ratio(lines: tuple[Power, Power]) -> float:
        C = max(control)
        return lines[1].computation(lines[0].loss(C)) / C if lines[1].a > 0 else math.inf

    lines = fit(control), fit(other)
    ratios = [ratio((fit(drawn(control)), fit(drawn(other)))) for _ in range(draws)]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Comparison(*lines, ratio(lines), float(low), float(high))


def points_of(study: Study, found: list[table.Row], variant: str) -> Points:
    """The points of a variant at its best rates."""
    points: Points = {}
    for (_, name), seeds in table.at_best(study, found).items():
        if name == variant:
            for row in seeds.values():
                losses = points.setdefault(row["flops"] / PFLOP_DAY, [])
                losses.append(study.metric.of({"metrics": row}) * math.log(2))
    return points


def figure(study: Study, points: dict[str, Points], found: Comparison) -> Figure:
    """Points and lines, and the published lines drawn through the control's largest rung, for their slope."""
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(6, 4), layout="constrained", facecolor="white")
        axes = drawn.add_subplot()
        for number, (name, line) in enumerate(zip(points, (found.control, found.other))):
            C = np.array(sorted(points[name]))
            every = [(c, loss) for c, losses in points[name].items() for loss in losses]
            axes.plot(*zip(*every), "o", color=SERIES[number], markersize=4)
            axes.plot(C, [line.loss(c) for c in C], color=SERIES[number], label=f"{name}: {line.A:.3g} C^-{line.a:.3f}")
        C = np.array(sorted(points[study.control]))
        for style, (name, (_, slope)) in zip(("--", ":"), PUBLISHED.items()):
            through = found.control.loss(C[-1]) * (C / C[-1]) ** -slope
            axes.plot(C, through, style, color=LIGHT["soft"], label=f"slope of {name}: {slope}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("PFLOP/s-days")
        axes.set_ylabel("nats per byte")
        axes.legend()
    return drawn


def main(argv: list[str]) -> None:
    try:
        if len(argv) != 2:
            raise ConfigError(f"give one study, got {argv[1:]}")
        study, place = load(argv[1])
        found = table.rows(study, pathlib.Path(flags.FLAGS.root))
        other = next(name for name in study.variants if name != study.control)
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
