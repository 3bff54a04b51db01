"""A plan: what is known of a layout before a device has been seen, and how it came to be known."""

import dataclasses
from typing import NamedTuple

from k3jax import layouts, placement
from k3jax.config import ConfigError
from k3jax.config_layout import Layout
from k3jax.plan.chips import Topology
from k3jax.plan.hlo import Collective
from k3jax.plan.needs import Memory, Times


@dataclasses.dataclass(frozen=True)
class Compiled:
    """From the compiler's program. fused: where the times of fused operations come from. unknown: kernels of which no
    time is known."""

    fused: str
    unknown: list[str]
    lower_seconds: float
    compile_seconds: float


class Remedy(NamedTuple):
    """A change, as the flags that make it, and the bytes per device that the step would then need."""

    flags: str
    total: int


class Term(NamedTuple):
    """One part of a sum by arithmetic. amount: bytes or seconds. source: what it follows from."""

    name: str
    amount: float
    source: str


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """From shapes and rates alone. peak: when most is needed; memory: what makes up `Memory.other` then. times: what
    makes up a step."""

    peak: str
    memory: list[Term]
    times: list[Term]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """remedies: what would make it fit, if it does not (`k3jax.plan.remedies`)."""

    topology: Topology
    layout: Layout
    memory: Memory
    times: Times
    sent: list[Collective]
    made: Compiled | Arithmetic
    remedies: list[Remedy] = dataclasses.field(default_factory=list)


def check_devices(layout: Layout, topology: Topology) -> None:
    """Raises ConfigError when the layout is not for as many devices."""
    if layout.devices != topology.devices:
        raise ConfigError(
            f"the layout is for {layouts.product(layout)}, but {topology.name} has {topology.devices}"
            f"{placement.sizes_that_fit(tuple(layout.sizes.values()), topology.devices)}; --layout names another, "
            "--search finds one"
        )
