"""What a study is: data over :class:`k3jax.run_config.TrainConfig`. It trains nothing and decides nothing by itself."""

import dataclasses
import importlib
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from experiments import measures
from k3jax import config_io
from k3jax.config import ConfigError, require, require_positive
from k3jax.config_optim import Tunable
from k3jax.config_tasks import Task
from k3jax.run_config import TrainConfig

FOLDER = pathlib.Path(__file__).parent

Diff = Mapping[str, Any]
"""{dotted path of a field: its new value}, such as {"model.residual": PlainResidual()}."""

Variant = Diff | Callable[[TrainConfig], Diff]
"""A diff, or what makes one from the run of a rung, for a change that depends on its sizes."""


@dataclass(frozen=True)
class Rung:
    """One size, or one data set, of a study.

    Attributes:
      config: the run of the control; each variant changes it.
      planned: a published size, for `experiments.plan`: the command that runs studies leaves it out.
      layout: where the plan puts it on as many devices, a name or fields (`k3jax.layouts`); empty for none of its own.
    """

    config: TrainConfig
    planned: bool = False
    layout: str = ""


@dataclass(frozen=True)
class Metric:
    """A number of a run (`experiments.measures` has their names), and which way is better."""

    name: str
    better: Literal["higher", "lower"]

    def best(self, values: list[float]) -> int:
        """The place of the best value."""
        return values.index(min(values) if self.better == "lower" else max(values))

    def of(self, found: dict[str, Any]) -> float:
        """The value in a result; the worst there is for a run that diverged, or ended with a number that is none."""
        value = found["metrics"][self.name]
        worst = math.inf if self.better == "lower" else -math.inf
        return worst if value is None or not math.isfinite(value) else value


@dataclass(frozen=True)
class Published:
    """Numbers of a paper to compare with: where they stand, and what they are by variant. A line of loss over
    computation is text, ``A C^-a``, and ``span`` the PFLOP/s-days of the smallest and the largest run behind it."""

    source: str
    numbers: dict[str, float | str]
    span: tuple[float, float] | None = None


@dataclass(frozen=True)
class Study:
    """A question and how it is answered; fixed before the first run.

    Attributes:
      name: of the study and of its folder of runs.
      question: one sentence.
      rungs, variants: what is run. The control is one of the variants.
      control: the variant that the others are compared with, seed by seed.
      rates: the peak learning rates that every variant is searched over with the first seed.
      seeds: runs of every variant at its best rate, that of the search among them.
      metric: what decides, at the end of a run.
      rule: what the differences of the metric will be taken to mean, in words.
      shown: further metrics for the table.
      tasks: measured at the end of every run beside those trained on.
      examples: of each cell of a task.
      stretch: held-out text is measured once more at the end, in rows this many times as long as those trained on.
      published: numbers to compare with.
    """

    name: str
    question: str
    rungs: dict[str, Rung]
    variants: dict[str, Variant]
    control: str
    rates: tuple[float, ...]
    metric: Metric
    rule: str
    seeds: int = 5
    shown: tuple[str, ...] = ()
    tasks: tuple[Task, ...] = ()
    examples: int = 64
    stretch: int = 1
    published: tuple[Published, ...] = ()

    def __post_init__(self):
        require_positive(self, "seeds", "examples", "stretch")
        require(self.control in self.variants, f"study {self.name}: control {self.control!r} is none of its variants")
        require(len(self.rates) > 0, f"study {self.name}: no learning rates")
        require(self.seeds > 1, f"study {self.name}: seeds = {self.seeds}, but an interval needs at least two")
        for metric in self.measured:
            near = config_io.did_you_mean(metric, measures.NAMES)
            require(
                measures.known(metric),
                f"study {self.name}: no run measures {metric!r}{near} (experiments/measures.py has the names)",
            )
        for name, rung in self.rungs.items():
            tunable = isinstance(rung.config.optimizer.schedule, Tunable)
            require(
                rung.planned or tunable,
                f"study {self.name}: rung {name} searches a learning rate, so its optimizer.schedule must be Tunable",
            )

    @property
    def measured(self) -> tuple[str, ...]:
        """The numbers that it decides by or shows."""
        return self.metric.name, *self.shown

    @property
    def run_here(self) -> list[str]:
        """The rungs that are not only planned."""
        return [name for name, rung in self.rungs.items() if not rung.planned]

    def config(self, rung: str, variant: str, *, rate: float | None = None, seed: int = 0) -> TrainConfig:
        """The resolved run.

        Raises:
          ConfigError: there is no such rung or variant, or its diff has a path that does not exist or a value that its
            field does not take; the message names the study and the variant.
        """
        _known("rung", rung, self.rungs, self.name)
        _known("variant", variant, self.variants, self.name)
        config, change = self.rungs[rung].config, self.variants[variant]
        try:
            config = changed(config, change(config) if callable(change) else change)
        except ConfigError as error:
            raise ConfigError(f"study {self.name}, variant {variant}: {error}") from error
        if rate is not None:
            config = changed(config, {"optimizer.schedule.schedule.peak": rate})
        return changed(config, {"seed": seed})


def changed[C](config: C, diff: Diff) -> C:
    """A frozen dataclass with the fields at dotted paths replaced; all of them at once, so that fields which depend on
    each other may change together.

    Raises:
      ConfigError: a path that does not exist, or a value of a type that its field does not take.
    """
    new = _changed(config, diff, "")
    # Dataclasses do not check types: what cannot be read back from its own text is no configuration.
    require(config_io.from_dict(type(new), config_io.to_dict(new)) == new, f"{diff} is not made of configurations")
    return new


def _changed(config: Any, diff: Diff, above: str) -> Any:
    fields = [field.name for field in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else []
    whole, parts = {}, {}
    for path, value in diff.items():
        head, dot, rest = path.partition(".")
        if head not in fields:
            near = config_io.did_you_mean(head, fields)
            place = f"{above}{head}: {type(config).__name__} has no field {head!r}{near}"
            raise ConfigError(f"{place} (fields: {', '.join(fields) or 'none'})")
        if dot:
            parts.setdefault(head, {})[rest] = value
        else:
            whole[head] = value
    for head, inner in parts.items():
        whole[head] = _changed(whole.get(head, getattr(config, head)), inner, f"{above}{head}.")
    return dataclasses.replace(config, **whole)


def folders() -> Iterator[pathlib.Path]:
    """The folder of every study."""
    for path in sorted(FOLDER.glob("*/study.py")):
        yield path.parent


def studies() -> dict[str, Study]:
    """Every study by name.

    Raises:
      ConfigError: two have one name.
    """
    found: dict[str, Study] = {}
    places: dict[str, pathlib.Path] = {}
    for folder in folders():
        study = importlib.import_module(f"experiments.{folder.name}.study").STUDY
        other = places.get(study.name)
        require(other is None, f"{other} and {folder} both hold a study named {study.name!r}")
        found[study.name], places[study.name] = study, folder
    return found


def load(name: str) -> tuple[Study, pathlib.Path]:
    """A study by name, or by a beginning that only one name has, and its folder.

    Raises:
      ConfigError: there is no such study; the message lists those there are.
    """
    every = studies()
    matching = [known for known in every if known.startswith(name)]
    if name not in every and len(matching) == 1:
        name = matching[0]
    _known("study", name, every, "experiments")
    places = {importlib.import_module(f"experiments.{f.name}.study").STUDY.name: f for f in folders()}
    return every[name], places[name]


def _known(what: str, name: str, options: Mapping[str, Any], where: str) -> None:
    near = config_io.did_you_mean(name, options)
    require(name in options, f"{where}: there is no {what} {name!r}{near} (there are: {', '.join(options)})")
