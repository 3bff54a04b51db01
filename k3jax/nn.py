"""Parameters and the few layers that every component shares. The only place that makes a parameter."""

import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from k3jax import sharding
from k3jax.roles import ParamMeta, Role

type Initializer = Callable[[Array, tuple[int, ...], jnp.dtype], Array]


class State(nnx.Variable):
    """An array that the model reads and training moves without a gradient (the router bias)."""


def param(
    key: Array, name: str, shape: tuple[int, ...], *, role: Role, axes: tuple[str, ...], init: Initializer
) -> nnx.Param:
    """A float32 parameter with its role and logical axes.

    The random key is folded in by ``name``, so that adding a parameter changes no other's initial value.

    Raises:
      ValueError: ``axes`` does not name every dimension of ``shape``.
      KeyError: an axis has no sharding rule.
    """
    if len(axes) != len(shape):
        raise ValueError(f"parameter {name}: {len(axes)} axes {axes} for shape {shape}")
    sharding.spec(axes)
    folded = jax.random.fold_in(key, zlib.crc32(name.encode()))
    return nnx.Param(init(folded, shape, jnp.float32), role=role, axes=axes)


def normal(std: float) -> Initializer:
    """Normal initializer with standard deviation ``std``."""
    return jax.nn.initializers.normal(std)


ones = jax.nn.initializers.ones
zeros = jax.nn.initializers.zeros


def norm_weight(key: Array, name: str, width: int, axis: str) -> nnx.Param:
    """The gain of an RMSNorm: ones."""
    return param(key, name, (width,), role=Role.NORM, axes=(axis,), init=ones)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis: statistics in float32, the gain applied in x's dtype, as the released code does."""
    x32 = x.astype(jnp.float32)
    normalized = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return normalized.astype(x.dtype) * weight.astype(x.dtype)


def einsum(equation: str, x: Array, weight: Array) -> Array:
    """``jnp.einsum`` of an activation with a float32 master weight, cast to the activation's dtype."""
    return jnp.einsum(equation, x, weight.astype(x.dtype))


def metadata(params: nnx.State) -> dict:
    """The tree of :class:`ParamMeta` that mirrors ``nnx.to_pure_dict(params)``.

    Raises:
      ValueError: a parameter was made without a role; the message names its path.
    """

    def meta(path: tuple, variable: nnx.Variable) -> ParamMeta:
        facts = variable.get_metadata()
        if "role" not in facts or "axes" not in facts:
            raise ValueError(f"parameter {'.'.join(map(str, path))} has no role or no logical axes: make it with nn.param")
        return ParamMeta(role=facts["role"], axes=tuple(facts["axes"]))

    tree: dict = {}
    for path, variable in nnx.to_flat_state(params):
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = meta(path, variable)
    return tree
