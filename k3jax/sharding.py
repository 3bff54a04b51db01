"""Mesh axes, what a parameter's logical axes do on them, and the few helpers that the model is written with.

Between sub-layers, tokens are global arrays whose type says how they lie: rows over :data:`BATCH_AXES`, time over
:data:`TIME_AXES` (JAX's explicit sharding). A sub-layer is an island (:func:`island`): a function of what one device
holds, with its collectives written out. Where no mesh is in scope every helper here does nothing, and the same code is
the program of one device.

Every parameter names its logical axes where it is made (:func:`k3jax.nn.param`); nobody else writes a mesh axis. All
mesh axes are always present, at size 1 where they are not used, so that no rule has to ask.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from k3jax.config import ConfigError

MESH_AXES = ("data", "fsdp", "expert", "context", "tensor", "pipeline")
BATCH_AXES = ("data", "fsdp", "expert")
TIME_AXES = ("context", "tensor")
TOKEN_AXES = (*BATCH_AXES, *TIME_AXES)
"""Every axis that holds different tokens between sub-layers: sums over tokens are sums over exactly these."""

SPLIT: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "ff": ("tensor",),
    "experts": ("expert",),
}
"""Logical axes that stay apart in the computation: each device works on its own part."""

SPREAD: dict[str, tuple[str, ...]] = {
    "embed": ("fsdp", "expert"),
    "rank": ("fsdp", "expert"),
    "latent": ("tensor",),
    "expert_in": ("fsdp",),
    "expert_ff": ("tensor",),
}
"""Logical axes that are spread at rest only, and gathered right before a layer uses them (FSDP)."""

DENSE = ("embed", "rank")
"""Those of them that a layout may spread over fewer axes (`Layout.dense`)."""

WHOLE = ("key", "value", "router", "tap", "width")
"""Logical axes that every device holds whole."""

TOKENS = PartitionSpec(BATCH_AXES, TIME_AXES)
"""[B, T, ...] between sub-layers."""
SOURCES = PartitionSpec(None, BATCH_AXES, TIME_AXES)
"""[S, B, T, D]: the closed blocks of a depth mixture."""
ROWS = PartitionSpec(BATCH_AXES)
"""[B, ...]: whole rows, as a batch arrives."""
CUT_ROWS = PartitionSpec(None, BATCH_AXES)
"""[micro-batches, B, ...]"""
HEADS = PartitionSpec("tensor")
"""[H, ...]"""
BY_HEADS = PartitionSpec(None, BATCH_AXES, "context", "tensor")
"""[..., B, T, H, K] inside of a mixer."""
BY_VOCABULARY = PartitionSpec(BATCH_AXES, "context", "tensor")
"""[B, T, W] inside of the loss."""
PARTIAL = PartitionSpec(TOKEN_AXES)
"""A leading axis with one entry for every group of tokens (:func:`partial`)."""
EVERYWHERE = PartitionSpec()


class Rule(NamedTuple):
    """What a logical axis does: the mesh axes it lies on, and whether it is gathered before use."""

    mesh_axes: tuple[str, ...]
    gathered: bool


def rule(axis: str) -> Rule:
    """The rule of a logical axis.

    Raises:
      KeyError: there is none; the message lists the axes that have one.
    """
    if axis in SPLIT:
        return Rule(SPLIT[axis], False)
    if axis in SPREAD:
        return Rule(SPREAD[axis], True)
    if axis in WHOLE:
        return Rule((), False)
    raise KeyError(f"logical axis {axis!r} has no sharding rule; rules exist for {sorted((*SPLIT, *SPREAD, *WHOLE))}")


def spec(axes: Sequence[str], *, stacked: int = 0, dense: tuple[str, ...] = SPREAD["embed"]) -> PartitionSpec:
    """Sharding of a parameter with these logical axes, behind ``stacked`` unsharded layer axes.

    A mesh axis shards one dimension only: where two logical axes map to the same one, the first keeps it. ``dense``
    replaces the rule of :data:`DENSE`.

    Raises:
      KeyError: a logical axis without a rule; the message names it and lists those that exist.
    """
    used: set[str] = set()
    dims: list[tuple[str, ...]] = [()] * stacked
    for axis in axes:
        mesh_axes = dense if axis in DENSE else rule(axis).mesh_axes
        dims.append(tuple(name for name in mesh_axes if name not in used))
        used.update(mesh_axes)
    return PartitionSpec(*map(_entry, dims))


def fitting(
    mesh: Mesh, axes: Sequence[str], shape: Sequence[int], *, name: str = "", dense: tuple[str, ...] = SPREAD["embed"]
) -> NamedSharding:
    """Sharding of a parameter of this shape, whose last dimensions have these logical axes.

    A dimension that is only spread stays whole where its mesh axes do not divide it, or lies on the first of them.

    Raises:
      ConfigError: a dimension that must be split does not divide; the message has its name, sizes, and what would.
    """
    stacked, dims = len(shape) - len(axes), []
    for number, entry in enumerate(spec(axes, stacked=stacked, dense=dense)):
        names, size = names_of(entry), shape[number]
        names = tuple(one for one in names if mesh.shape[one] > 1) or names[:1]
        while names and size % _ways(mesh, names):
            if not rule(axes[number - stacked]).gathered:
                raise ConfigError(_does_not_divide(mesh, name, axes[number - stacked], size, names))
            names = names[:-1]
        dims.append(names)
    return NamedSharding(mesh, PartitionSpec(*map(_entry, dims)))


def spread_further(where: NamedSharding, shape: Sequence[int], over: Sequence[str]) -> NamedSharding:
    """The sharding with those of the mesh axes ``over`` that it does not use yet on the first dimension that they
    divide: ZeRO-1, for what the optimizer keeps."""
    mesh, dims = where.mesh, [names_of(entry) for entry in where.spec]
    dims += [()] * (len(shape) - len(dims))
    for axis in over:
        used = {name for names in dims for name in names}
        fits = [n for n, names in enumerate(dims) if shape[n] % (_ways(mesh, names) * mesh.shape[axis]) == 0]
        if axis not in used and fits:
            best = max(fits, key=lambda n: shape[n] / _ways(mesh, dims[n]))
            dims[best] = (*dims[best], axis)
    return NamedSharding(mesh, PartitionSpec(*map(_entry, dims)))


def divisors_near(size: int, ways: int) -> str:
    """The largest divisor of ``size`` below ``ways`` and the smallest above it, as text."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    below, above = [n for n in divisors if n < ways], [n for n in divisors if n > ways]
    return " or ".join(str(n) for n in (*below[-1:], *above[:1]))


def _does_not_divide(mesh: Mesh, name: str, axis: str, size: int, names: tuple[str, ...]) -> str:
    ways = _ways(mesh, names)
    label = " x ".join(f"{one} = {mesh.shape[one]}" for one in names)
    multiples = " or ".join(str(n) for n in dict.fromkeys((size - size % ways, size + -size % ways)) if n)
    return (
        f"parameter {name}: its dimension {axis!r} of size {size} does not divide over the mesh axis {label}; "
        f"{divisors_near(size, ways)} devices would divide it, or a size of {multiples}"
    )


def names_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _entry(names: tuple[str, ...]) -> Any:
    return None if not names else names[0] if len(names) == 1 else names


def _ways(mesh: Mesh, names: Sequence[str]) -> int:
    return math.prod(mesh.shape[name] for name in names)


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, EVERYWHERE)


def rows(mesh: Mesh) -> NamedSharding:
    """The rows of a batch spread over the axes that hold different ones."""
    return NamedSharding(mesh, ROWS)


def scope(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """``jax.set_mesh``, or nothing for None."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def active() -> bool:
    """Whether a mesh with our axes is in scope (``jax.set_mesh``)."""
    return set(MESH_AXES) <= set(jax.sharding.get_abstract_mesh().axis_names)


def spread_of(x: Array, dim: int) -> tuple[str, ...]:
    """The mesh axes that a dimension of a global array lies on."""
    return names_of(jax.typeof(x).sharding.spec[dim]) if active() else ()


def lie(x: Any, where: PartitionSpec) -> Any:
    """Every array of the tree ``x``, laid out as ``where`` says."""
    return jax.tree.map(lambda leaf: jax.reshard(leaf, where), x) if active() else x


def lie_like(x: Any, like: Any) -> Any:
    """Every array of the tree ``x``, laid out like its counterpart in ``like``."""
    return jax.tree.map(lambda a, b: jax.reshard(a, jax.typeof(b).sharding.spec), x, like) if active() else x


def spread(x: Any, over: Sequence[str]) -> Any:
    """Every array of the tree ``x``, spread over more axes (:func:`spread_further`)."""
    if not (active() and over):
        return x
    return jax.tree.map(lambda a: jax.reshard(a, spread_further(jax.typeof(a).sharding, a.shape, over).spec), x)


def zeros(like: Any) -> Any:
    """Zeros in the shapes, dtypes and shardings of a tree of ShapeDtypeStructs."""

    def one(x):
        return jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding.spec if active() else None)

    return jax.tree.map(one, like)


def out_sharding(where: PartitionSpec = EVERYWHERE) -> PartitionSpec | None:
    """For the argument of that name: how the result of an operation lies."""
    return where if active() else None


def island(fn: Callable, out: Any) -> Callable:
    """``fn`` as a function of what each device holds, by the types of its arguments; ``out`` says how its results make
    up global arrays. Inside, the helpers below are collectives.

    Values that are the same everywhere are not tracked (check_vma), because kernels do not say what theirs are: as a
    consequence a result that ``out`` calls replicated must be made so by the function itself.
    """
    return jax.shard_map(fn, out_specs=out, check_vma=False) if active() else fn


def _held(axes: Sequence[str] | str) -> tuple[str, ...]:
    """Those of the mesh axes that are manual here and hold more than one device."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    axes = (axes,) if isinstance(axes, str) else axes
    return tuple(name for name in axes if kinds.get(name) == AxisType.Manual and mesh.shape[name] > 1)


def size(axes: Sequence[str] | str) -> int:
    """In an island: how many devices the axes span."""
    return _ways(jax.sharding.get_abstract_mesh(), _held(axes))


def index(axes: Sequence[str] | str) -> Array | int:
    """In an island: which of them this one is."""
    held = _held(axes)
    return jax.lax.axis_index(held) if held else 0


def total[X](x: X, axes: Sequence[str] | str) -> X:
    """In an island: the sum over the axes."""
    held = _held(axes)
    return jax.lax.psum(x, held) if held else x


def largest[X](x: X, axes: Sequence[str] | str) -> X:
    """In an island: the maximum over the axes, without a gradient."""
    held = _held(axes)
    return jax.lax.pmax(jax.lax.stop_gradient(x), held) if held else x


def smallest[X](x: X, axes: Sequence[str] | str) -> X:
    """In an island: the minimum over the axes, without a gradient."""
    held = _held(axes)
    return jax.lax.pmin(jax.lax.stop_gradient(x), held) if held else x


def gather(x: Array, axes: Sequence[str] | str, dim: int) -> Array:
    """In an island: the parts of all devices along the axes, joined along ``dim``."""
    held = _held(axes)
    return jax.lax.all_gather(x, held, axis=dim, tiled=True) if held else x


def scatter(x: Array, axes: Sequence[str] | str, dim: int) -> Array:
    """In an island: this device's part along ``dim`` of the sum over the axes."""
    held = _held(axes)
    return jax.lax.psum_scatter(x, held, scatter_dimension=dim, tiled=True) if held else x


def exchange(x: Array, axes: Sequence[str] | str, *, cut: int, join: int) -> Array:
    """In an island: all-to-all, ``x`` cut along one dimension, what arrives joined along another."""
    held = _held(axes)
    return jax.lax.all_to_all(x, held, split_axis=cut, concat_axis=join, tiled=True) if held else x


def part(x: Any, axes: Sequence[str] | str, dim: int) -> Any:
    """In an island: this device's part along ``dim`` of arrays that all devices along the axes hold whole."""
    ways, number = size(axes), index(axes)
    if ways == 1:
        return x

    def one(leaf):
        length = leaf.shape[dim] // ways
        return jax.lax.dynamic_slice_in_dim(leaf, number * length, length, axis=dim)

    return jax.tree.map(one, x)


def partial[X](x: X) -> X:
    """In an island: a device's part of a sum (or an extreme) over tokens, with a leading axis to tell the parts apart.

    Such parts leave the island as they are (:data:`PARTIAL`), pass through the loop over layers, and are added up once
    for all layers (:func:`added_up`, :func:`greatest`).
    """
    inside = any(kind == AxisType.Manual for kind in jax.sharding.get_abstract_mesh().axis_types)
    return jax.tree.map(lambda leaf: leaf[None], x) if inside else x


def added_up[X](x: X, dim: int) -> X:
    """The sums whose parts :func:`partial` has set side by side along ``dim``: for all arrays of the tree, which have
    one dtype, a single all-reduce over TOKEN_AXES."""
    return _united(total, x, dim)


def greatest[X](x: X, dim: int) -> X:
    """The same for maxima."""
    return _united(largest, x, dim)


def _united(reduce, x, dim):
    leaves, structure = jax.tree.flatten(x)
    if not (active() and leaves):
        return x
    dtypes = {leaf.dtype for leaf in leaves}
    if len(dtypes) > 1:
        raise ValueError(f"arrays of dtypes {sorted(map(str, dtypes))} cannot share an all-reduce")

    def local(*parts):
        whole = reduce(jnp.concatenate([part.reshape(-1) for part in parts]), TOKEN_AXES)
        pieces = jnp.split(whole, list(itertools.accumulate(part.size for part in parts))[:-1])
        return [piece.reshape(part.shape[:dim] + part.shape[dim + 1 :]) for piece, part in zip(pieces, parts)]

    return jax.tree.unflatten(structure, island(local, EVERYWHERE)(*leaves))
