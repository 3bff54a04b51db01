"""Parameters and the few layers that every component shares. The only place that makes a parameter."""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from k3jax import sharding
from k3jax.roles import ParamMeta, Role


class State(nnx.Variable):
    """An array that the model reads and training moves without a gradient (the router bias)."""


@dataclass(frozen=True)
class Normal:
    """Normal with standard deviation ``std``."""

    std: float

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return self.std * rng.standard_normal(shape, np.float32)


@dataclass(frozen=True)
class Uniform:
    """Uniform in [-bound, bound]."""

    bound: float

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return self.bound * (2 * rng.random(shape, np.float32) - 1)


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.full(shape, self.value, np.float32)


@dataclass(frozen=True)
class DecayBias:
    """Inverse softplus of a step size log-uniform in [low, high], as in Mamba-2 (arXiv 2405.21060)."""

    low: float = 1e-3
    high: float = 1e-1

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        step = np.exp(rng.uniform(math.log(self.low), math.log(self.high), shape))
        return (step + np.log(-np.expm1(-step))).astype(np.float32)


ZEROS, ONES = Constant(0.0), Constant(1.0)


def param(name: str, shape: tuple[int, ...], *, role: Role, axes: tuple[str, ...], init) -> nnx.Param:
    """A float32 parameter with its role, its logical axes and its initial distribution.

    The value is a placeholder until :func:`initialize` draws it: modules are built from shapes alone.

    Raises:
      ValueError: ``axes`` does not name every dimension of ``shape``.
      KeyError: an axis has no sharding rule.
    """
    if len(axes) != len(shape):
        raise ValueError(f"parameter {name}: {len(axes)} axes {axes} for shape {shape}")
    for axis in axes:
        sharding.rule(axis)
    return nnx.Param(jnp.zeros(shape, jnp.float32), role=role, axes=axes, init=init)


def initialize(make: Callable[[], nnx.Module], seed: int) -> nnx.Module:
    """The module that ``make`` builds, with every parameter drawn from its distribution.

    Drawing happens on the host, which needs no compilation and gives the same bits on every backend. Each parameter has
    a random stream of its own, keyed by its path, so that adding a parameter changes no other's initial value.
    """
    graph, params, rest = nnx.split(jax.eval_shape(make), nnx.Param, nnx.Variable)

    def draw(path: tuple, variable: nnx.Param) -> nnx.Param:
        stream = np.random.Philox(key=[seed, zlib.crc32(".".join(map(str, path)).encode())])
        value = variable.get_metadata()["init"].draw(np.random.Generator(stream), variable.shape)
        return variable.replace(jnp.asarray(value))

    drawn = nnx.from_flat_state({path: draw(path, variable) for path, variable in nnx.to_flat_state(params)})
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)
    return nnx.merge(graph, drawn, empty)


def norm_weight(name: str, width: int, axis: str) -> nnx.Param:
    """The gain of an RMSNorm: ones."""
    return param(name, (width,), role=Role.NORM, axes=(axis,), init=ONES)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis: statistics in float32, the gain applied in x's dtype, as the released code does."""
    x32 = x.astype(jnp.float32)
    normalized = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return normalized.astype(x.dtype) * weight.astype(x.dtype)


def einsum(equation: str, x: Array, weight: Array) -> Array:
    """``jnp.einsum`` of an activation with a float32 master weight, cast to the activation's dtype."""
    return jnp.einsum(equation, x, weight.astype(x.dtype))


def on_shards(fn: Callable, layer: nnx.Module, *arrays, dtype, out):
    """``fn(layer, *arrays)`` as an island (:func:`k3jax.sharding.island`), with the layer's weights gathered.

    Dimensions that are only spread at rest are gathered, matrices in the compute ``dtype``: their gradients are
    reduce-scattered in it on the way back. Dimensions that are split stay so: ``fn`` sees its part of heads, experts
    and widths.
    """
    if not sharding.active():
        return fn(layer, *arrays)
    variables = jax.tree.leaves(layer, is_leaf=lambda node: isinstance(node, nnx.Variable))
    spread = [_spread(variable) for variable in variables]

    def local(layer, *arrays):
        leaves, structure = jax.tree.flatten(layer)
        gathered = [_gathered(*pair, dtype) for pair in zip(leaves, spread)]
        return fn(jax.tree.unflatten(structure, gathered), *arrays)

    return sharding.island(local, out)(layer, *arrays)


def _spread(variable: nnx.Variable) -> tuple[bool, list[tuple[int, tuple[str, ...]]]]:
    """Whether a weight is a matrix, which a layer uses in its compute dtype, and which dimensions to gather, in order.

    Along the last dimension first, while the shard is small: the reduce-scatter of its gradient there comes last, and
    compilers tend to make an all-reduce of it. Experts the other way round: their first axis has the longer reach.
    """
    facts, entries = variable.get_metadata(), jax.typeof(variable[...]).sharding.spec
    if "axes" not in facts:
        return False, []
    rules = map(sharding.rule, facts["axes"])
    dims = [(n, entry) for n, (rule, entry) in enumerate(zip(rules, entries)) if rule.gathered and entry is not None]
    role = facts["role"]
    return role in (Role.MATRIX, Role.HEADS, Role.EXPERTS), dims if role is Role.EXPERTS else dims[::-1]


def _gathered(x: Array, how: tuple[bool, list[tuple[int, tuple[str, ...]]]], dtype) -> Array:
    is_matrix, dims = how
    x = x.astype(dtype) if is_matrix and dims else x
    for dim, axes in dims:
        x = sharding.gather(x, axes, dim)
    return x


def metadata(params: nnx.State) -> dict:
    """The tree of :class:`ParamMeta` that mirrors ``nnx.to_pure_dict(params)``.

    Raises:
      ValueError: a parameter was made without a role; the message names its path.
    """

    def meta(path: tuple, variable: nnx.Variable) -> ParamMeta:
        facts = variable.get_metadata()
        if "role" not in facts or "axes" not in facts:
            name = ".".join(map(str, path))
            raise ValueError(f"parameter {name} has no role or no logical axes: make it with nn.param")
        return ParamMeta(role=facts["role"], axes=tuple(facts["axes"]))

    tree: dict = {}
    for path, variable in nnx.to_flat_state(params):
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = meta(path, variable)
    return tree
