"""Every parameter as one device of a layout has it: at rest, gathered for use, and with what the optimizer keeps."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax.sharding import NamedSharding

from k3jax import accounting, layout_report, sharding
from k3jax.config import ModelConfig
from k3jax.config_layout import Layout
from k3jax.config_optim import Muon, Optimizer
from k3jax.roles import ParamMeta, Role

MATRICES = (Role.MATRIX, Role.HEADS, Role.EXPERTS)


class Gather(NamedTuple):
    """One all-gather of a parameter: the mesh axes, how many devices that is, and the array's shape after it."""

    axes: tuple[str, ...]
    ways: int
    shape: tuple[int, ...]


class Held(NamedTuple):
    """One parameter.

    part: of the model, as in `accounting`. shape: of the whole array, with its layer axes. where, kept: how it lies,
    and what the optimizer keeps of it. layers: how many of it are stacked. rest: shape of one layer's part on a device.
    gathers: in order, before a layer uses it. alike: mesh axes whose devices hold the same part, so that its gradient
    is summed over them.
    """

    path: str
    part: str
    meta: ParamMeta
    shape: tuple[int, ...]
    where: NamedSharding
    kept: NamedSharding
    layers: int
    rest: tuple[int, ...]
    gathers: tuple[Gather, ...]
    alike: tuple[str, ...]

    @property
    def used(self) -> tuple[int, ...]:
        """The shape that a layer computes with."""
        return self.gathers[-1].shape if self.gathers else self.rest

    @property
    def is_cast(self) -> bool:
        """Whether it travels in the compute dtype (`k3jax.nn.on_shards`)."""
        return self.meta.role in MATRICES and bool(self.gathers)

    @property
    def bytes(self) -> int:
        """At rest, float32, all layers."""
        return 4 * self.layers * math.prod(self.rest)

    @property
    def spread_over(self) -> tuple[str, ...]:
        """Mesh axes that only what the optimizer keeps is spread over."""
        before = set(_axes(self.where))
        return tuple(name for name in _axes(self.kept) if name not in before)

    def is_orthogonalized(self, optimizer: Optimizer) -> bool:
        """Whether Muon updates it."""
        return isinstance(getattr(optimizer, self.meta.role.group), Muon)

    def optimizer_bytes(self, optimizer: Optimizer) -> int:
        """A float32 momentum under Muon, two moments under AdamW."""
        moments = 1 if self.is_orthogonalized(optimizer) else 2
        return 4 * moments * math.prod(self.kept.shard_shape(self.shape))


def parameters(model: ModelConfig, layout: Layout) -> list[Held]:
    """All of them.

    Raises:
      ConfigError: a dimension that must be split does not divide over the layout's axes.
    """
    mesh = layout_report.mesh_of(layout)
    return [_held(one, mesh, layout) for one in _trained(model)]


@functools.lru_cache(maxsize=8)
def _trained(model: ModelConfig) -> tuple[accounting.Parameter, ...]:
    return tuple(one for one in accounting.parameters(model) if one.meta is not None)


def _held(one: accounting.Parameter, mesh, layout: Layout) -> Held:
    axes, stacked = one.meta.axes, one.stacked
    where = sharding.fitting(mesh, axes, one.shape, name=one.path, dense=layout.dense)
    kept = sharding.spread_further(where, one.shape, layout.optimizer)
    rest = where.shard_shape(one.shape)[stacked:]
    lies = [_large(mesh, entry) for entry in (*where.spec, *(None,) * len(one.shape))[stacked : len(one.shape)]]
    taken = {name for names in lies for name in names}
    alike = tuple(name for name in sharding.TOKEN_AXES if mesh.shape[name] > 1 and name not in taken)
    gathers = tuple(_gathers(mesh, one.meta.role, axes, lies, rest))
    layers = math.prod(one.shape[:stacked])
    return Held(one.path, one.part, one.meta, one.shape, where, kept, layers, rest, gathers, alike)


def _gathers(mesh, role: Role, axes: Sequence[str], lies: list[tuple[str, ...]], rest) -> Iterator[Gather]:
    """As `k3jax.nn.on_shards` does: the last dimension first, experts the other way round."""
    dims = [n for n, (axis, names) in enumerate(zip(axes, lies)) if names and sharding.rule(axis).gathered]
    shape = list(rest)
    for n in dims if role is Role.EXPERTS else reversed(dims):
        ways = math.prod(mesh.shape[name] for name in lies[n])
        shape[n] *= ways
        yield Gather(lies[n], ways, tuple(shape))


def _axes(where: NamedSharding) -> list[str]:
    return [name for entry in where.spec for name in _large(where.mesh, entry)]


def _large(mesh, entry) -> tuple[str, ...]:
    """The mesh axes of one dimension that hold more than one device."""
    return tuple(name for name in sharding.names_of(entry) if mesh.shape[name] > 1)
