"""Which layouts a topology and a batch allow, and which of them arithmetic prefers."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from k3jax import layout_report, layouts, placement
from k3jax.config import ConfigError, replace
from k3jax.config_layout import Layout
from k3jax.parallel.transport import AllGather, Balanced, RaggedAllToAll
from k3jax.plan import arithmetic
from k3jax.plan.chips import Topology
from k3jax.plan.plans import Plan
from k3jax.plan.remedies import remedied
from k3jax.plan.units import size
from k3jax.run_config import TrainConfig

TRANSPORTS = (RaggedAllToAll(), AllGather(), Balanced())
LONG = 32768
"""Tokens from which on rows are cut: shorter ones have room on one device, and a cut only adds what it sends."""
PROMISING = 16
"""Of so many layouts, and those that no other beats, all transports and spreadings are looked at."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout. predicted: by arithmetic. compiled: the plan.json that the compiler's plan became, if it did. late: it
    did not, for want of time; failure: it did not, for this reason."""

    predicted: Plan
    compiled: dict[str, Any] | None = None
    late: str = ""
    failure: str = ""

    @property
    def layout(self) -> str:
        return layouts.text(self.predicted.layout)

    @property
    def fits(self) -> bool:
        return self.predicted.memory.fits if self.compiled is None else self.compiled["memory"]["fits"]

    @property
    def bytes(self) -> int:
        return self.predicted.memory.total if self.compiled is None else self.compiled["memory"]["total"]

    @property
    def step(self) -> float:
        return self.predicted.times.step if self.compiled is None else self.compiled["seconds"]["step"]

    @property
    def binding(self) -> str:
        return self.predicted.times.binding if self.compiled is None else self.compiled["binding"]


@dataclasses.dataclass(frozen=True)
class Found:
    """A search. legal: how many layouts are; fitting: those that fit, compiled ones before others, fastest first; best:
    of them those that no other beats in both memory and time; failed: those that the compiler refused, or found too
    large."""

    topology: Topology
    legal: int
    fitting: list[Candidate]
    best: list[Candidate]
    failed: list[Candidate] = dataclasses.field(default_factory=list)


def ranked(config: TrainConfig, topology: Topology) -> Found:
    """The layouts by arithmetic: all sizes of axes first, then the transports and spreadings of the most promising.

    Raises:
      ConfigError: no layout is legal, or none fits; the message has the nearest that would.
    """
    shapes = legal(config, topology)
    plans = [arithmetic.unchecked(config, layout, topology) for layout in shapes]
    fastest = sorted((Candidate(one) for one in plans), key=_rank)
    chosen = {id(one.predicted): one for one in (*fastest[:PROMISING], *undominated(fastest))}
    for one in chosen.values():
        others = itertools.islice(variants(one.predicted.layout), 1, None)
        plans += [arithmetic.unchecked(config, layout, topology) for layout in others]
    fitting = sorted((Candidate(one) for one in plans if one.memory.fits), key=_rank)
    if not fitting:
        least = min(plans, key=lambda one: one.memory.total)
        fixes = remedied(config, least).remedies
        flags = f"it would fit with {fixes[0].flags}" if fixes else "no single change makes it fit, but more devices"
        raise ConfigError(
            f"none of the {len(shapes)} layouts fits {topology.name}: nearest is {layouts.text(least.layout)} with "
            f"{size(least.memory.total)} of {size(least.memory.hbm)}; {flags}"
        )
    return Found(topology, len(shapes), fitting, undominated(fitting))


def _rank(one: Candidate) -> tuple[float, int]:
    return one.step, one.bytes


def undominated(found: Iterable[Candidate]) -> list[Candidate]:
    """Those that need less memory than every faster one."""
    front: list[Candidate] = []
    for one in sorted(found, key=_rank):
        if not front or one.bytes < front[-1].bytes:
            front.append(one)
    return front


def legal(config: TrainConfig, topology: Topology) -> list[Layout]:
    """Every way to share the topology's devices among the axes that the model and the batch allow, with tokens sent to
    their experts only, and with what the optimizer keeps spread over all axes that hold the same parameters. Rows
    shorter than `LONG` are not cut.

    Raises:
      ConfigError: there is none; the message names the nearest batch that has one.
    """
    splits = _Splits(config)
    longest = max(config.seq_len, *(stage.seq_len for stage in config.stages), 0)
    every = (layout for layout in _shapes(topology.devices) if longest >= LONG or layout.context == 1)
    shapes = [layout for layout in every if splits.fit(layout)]
    found = [layout for layout in shapes if _passes(placement.check_batch, config, layout_report.mesh_of(layout))]
    if not found:
        raise ConfigError(_nearest(config, topology, shapes))
    return [next(variants(layout)) for layout in found]


def _shapes(devices: int) -> Iterator[Layout]:
    for sizes in _products(devices, 5):
        yield Layout(**dict(zip(("data", "fsdp", "expert", "context", "tensor"), sizes)))


def _products(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of so many."""
    if count == 1:
        yield (total,)
        return
    for first in (n for n in range(1, total + 1) if total % n == 0):
        yield from ((first, *rest) for rest in _products(total // first, count - 1))


class _Splits:
    """Whether the dimensions that must be split divide: a question of two axes alone, asked once for each pair."""

    def __init__(self, config: TrainConfig):
        self._model, self._known = config.model, {}

    def fit(self, layout: Layout) -> bool:
        key = layout.expert, layout.tensor
        if key not in self._known:
            mesh = layout_report.mesh_of(Layout(expert=layout.expert, tensor=layout.tensor))
            self._known[key] = _passes(placement.check_model, self._model, mesh)
        return self._known[key]


def _passes(check: Callable, *args) -> bool:
    try:
        check(*args)
    except ConfigError:
        return False
    return True


def variants(layout: Layout) -> Iterator[Layout]:
    """The layout with other transports, and with dense weights spread over fewer axes; the first is the plainest."""
    denses = [("fsdp", "expert")] + [("expert",)] * (layout.fsdp > 1 and layout.expert > 1)
    for dense, transport in itertools.product(denses, TRANSPORTS if layout.expert > 1 else (AllGather(),)):
        alike = ("data", "context") if len(dense) == 2 else ("data", "fsdp", "context")
        optimizer = tuple(name for name in alike if layout.sizes[name] > 1)
        yield dataclasses.replace(layout, transport=transport, dense=dense, optimizer=optimizer)


def _nearest(config: TrainConfig, topology: Topology, shapes: list[Layout]) -> str:
    """What to say when no layout is legal. Rows are what can always be changed: `data` alone takes any model."""
    near: list[tuple[int, int, Layout]] = []
    for layout in shapes:
        ways = layout.data * layout.fsdp * layout.expert * config.micro_batches
        for batch in {max(config.batch // ways, 1) * ways, -(-config.batch // ways) * ways}:
            changed = replace(config, batch=batch, stages=())
            if _passes(placement.check_batch, changed, layout_report.mesh_of(layout)):
                near.append((abs(batch - config.batch), batch, layout))
    _, batch, layout = min(near, key=lambda one: one[:2])
    return (
        f"no layout of the {topology.devices:,} devices of {topology.name} takes {config.batch:,} rows of "
        f"{config.seq_len:,} tokens in {config.micro_batches} micro-batches; nearest is --batch {batch}, for which "
        f"{layouts.text(layout)} would do"
    )
