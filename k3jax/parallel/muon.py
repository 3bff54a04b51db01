"""Muon over a mesh: Newton-Schulz on whole matrices only, each on one device.

Left to the compiler, Newton-Schulz of a sharded matrix is a reduction of the full Gram matrix per iteration. Here the
matrices of one shape and sharding form a stack; an all-to-all over the mesh axes that shard them hands each device
whole ones, and a second one hands the results back (the owner-based scheme of the K3 report, arXiv 2607.24653, 5.2).
Batch axes of a stack (layers, heads, experts) may be sharded as they like: that moves nothing. Where a stack does not
divide, zero matrices fill it up.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.config_optim import Muon
from k3jax.optim.blocks import BlockLayout, block_layout
from k3jax.optim.muon import newton_schulz
from k3jax.roles import Role, meta_by_path, meta_of, path_name
from k3jax.sharding import names_of

PIECE_BYTES = 2**29
"""Float32 bytes of the whole matrices that a device works on at once; a longer stack goes through in pieces."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices that travel together, as one device has them.

    paths: of the parameters that they are from. role: theirs. count: how many matrices there are, of which this device
      holds a part each.
    part: shape of a part, the dimensions of the matrix not merged yet. ways: into how many parts each dimension is cut.
    axes: the mesh axes that cut them, in the order of the dimensions.
    shape: of a whole matrix, no more rows than columns.
    each, pieces: a device orthogonalizes `each` matrices at a time, `pieces` times.
    """

    paths: tuple[str, ...]
    role: Role
    count: int
    part: tuple[int, ...]
    ways: tuple[int, ...]
    axes: tuple[str, ...]
    shape: tuple[int, int]
    each: int
    pieces: int

    @property
    def devices(self) -> int:
        """How many devices share the matrices, and cut each of them."""
        return math.prod(self.ways)

    @property
    def padded(self) -> int:
        """The count with the zero matrices."""
        return self.pieces * self.each * self.devices

    def bytes(self, dtype: str) -> int:
        """What a device sends in a step if the parts travel in this dtype: out and back, its own part left out."""
        sent = self.padded * math.prod(self.part) * jnp.dtype(dtype).itemsize
        return 2 * sent * (self.devices - 1) // self.devices


def orthogonalize_shards(updates: Any, meta: Any, specs: Any, *, config: Muon, piece_bytes: int = PIECE_BYTES) -> Any:
    """`k3jax.optim.orthogonalize` of one device's shards, inside ``jax.shard_map``.

    The matrices travel in ``config.dtype``: exact with float32; with bfloat16 rounded once before and once after.

    Args:
      updates: tree of this device's shards; masked-out nodes are left alone.
      meta: tree of ParamMeta that covers the arrays.
      specs: tree of PartitionSpec that covers the arrays, those of the whole ones.
      config: as for `k3jax.optim.orthogonalize`.
      piece_bytes: see `PIECE_BYTES`.

    Returns:
      The tree of shards, float32. Two all-to-alls per stack whose matrices are sharded (in a loop over pieces, if there
      are several), and no other communication.
    """
    entries = (entry for spec in _by_path(specs).values() for entry in spec)
    sizes = {name: lax.axis_size(name) for entry in entries for name in names_of(entry)}
    leaves, treedef = jax.tree_util.tree_flatten_with_path(updates)
    shapes = {path_name(path): x.shape for path, x in leaves}
    layouts, stacks = _plan(leaves, meta, specs, sizes, config, piece_bytes, local=True)
    parts = {}
    for path, x in leaves:
        name, layout = path_name(path), layouts[path_name(path)]
        x = x.astype(config.dtype).transpose(layout.permutation)
        parts[name] = x.reshape(-1, *x.shape[layout.batch :])
    for stack in stacks:
        parts |= zip(stack.paths, _orthogonalize_stack([parts[name] for name in stack.paths], stack, config))
    results = [_unpermuted(parts[name], layouts[name], shape) for name, shape in shapes.items()]
    return jax.tree.unflatten(treedef, results)


def orthogonalize_arrays(updates: Any, meta: Any, *, config: Muon) -> Any:
    """`k3jax.optim.orthogonalize` of arrays that lie on the mesh in scope as their types say (explicit axes)."""
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, updates)

    def shards(updates):
        return orthogonalize_shards(updates, meta, specs, config=config)

    return jax.shard_map(shards, out_specs=specs, check_vma=False)(updates)


def stacks_of(
    shapes: Any, meta: Any, specs: Any, sizes: Mapping[str, int], *, config: Muon, piece_bytes: int = PIECE_BYTES
) -> list[Stack]:
    """The stacks that `orthogonalize_shards` forms, by arithmetic.

    Args:
      shapes: tree of whole arrays or ShapeDtypeStructs, those that Muon updates.
      meta, specs, config, piece_bytes: as for `orthogonalize_shards`.
      sizes: devices along each mesh axis.

    Raises:
      ValueError: a dimension does not divide over its axes; the message names the parameter, both, and their sizes.
    """
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    return _plan(leaves, meta, specs, sizes, config, piece_bytes, local=False)[1]


def bytes_per_step(shapes: Any, meta: Any, specs: Any, sizes: Mapping[str, int], *, config: Muon, **options) -> int:
    """What each device sends in one step of `orthogonalize_shards`; arguments as for `stacks_of`."""
    return sum(stack.bytes(config.dtype) for stack in stacks_of(shapes, meta, specs, sizes, config=config, **options))


def _plan(leaves, meta, specs, sizes, config, piece_bytes, *, local) -> tuple[dict[str, BlockLayout], list[Stack]]:
    """The layout of every array as a whole, and the stacks. local: the leaves are one device's shards."""
    metas, specs = meta_by_path(meta), _by_path(specs)
    layouts, groups = {}, collections.defaultdict(list)
    for path, x in leaves:
        name, shape = path_name(path), x.shape
        meta_x, cuts = meta_of(metas, path, len(shape)), _cuts(specs, name, len(shape))
        ways = [math.prod(sizes[axis] for axis in cut) for cut in cuts]
        if not local:
            shape = tuple(_share(name, n, cut, ways) for n, cut, ways in zip(shape, cuts, ways))
        whole = tuple(n * k for n, k in zip(shape, ways))
        layout = layouts[name] = block_layout(meta_x, whole, heads=config.heads)
        order = layout.permutation[layout.batch :]
        part, ways = (tuple(values[i] for i in order) for values in (shape, ways))
        axes = tuple(axis for i in order for axis in cuts[i] if sizes[axis] > 1)
        count = math.prod(shape[i] for i in layout.permutation[: layout.batch])
        groups[meta_x.role, part, ways, axes, (layout.short, layout.long)].append((name, count))
    return layouts, [_stack(key, members, piece_bytes) for key, members in groups.items()]


def _stack(key, members, piece_bytes) -> Stack:
    role, part, ways, axes, shape = key
    paths, counts = zip(*members)
    per_device = -(-sum(counts) // math.prod(ways))
    pieces = min(per_device, -(-per_device * math.prod(shape) * 4 // piece_bytes))
    return Stack(paths, role, sum(counts), part, ways, axes, shape, each=-(-per_device // pieces), pieces=pieces)


def _orthogonalize_stack(parts: list[Array], stack: Stack, config: Muon) -> list[Array]:
    """Each [count, *stack.part], in its own place again."""
    x = jnp.concatenate([*parts, jnp.zeros((stack.padded - stack.count, *stack.part), parts[0].dtype)])
    x = x.reshape(stack.pieces, stack.devices * stack.each, *stack.part)

    def piece(x):
        whole = newton_schulz(_gather(x, stack), schedule=config.newton_schulz, dtype=config.dtype, eps=config.eps)
        return _scatter((config.scale(stack.shape[1]) * whole).astype(config.dtype), stack)

    x = piece(x[0]) if stack.pieces == 1 else lax.map(piece, x).reshape(stack.padded, *stack.part)
    ends = itertools.accumulate(len(part) for part in parts)
    return jnp.split(x, list(ends))[:-1]


def _gather(x: Array, stack: Stack) -> Array:
    """Parts of all matrices [devices * each, *part] to this device's own whole ones [each, short, long]."""
    dims = range(len(stack.part))
    x = _exchange(x, stack).reshape(*stack.ways, stack.each, *stack.part)
    order = [len(dims), *itertools.chain(*((i, len(dims) + 1 + i) for i in dims))]
    return x.transpose(order).reshape(stack.each, *stack.shape)


def _scatter(x: Array, stack: Stack) -> Array:
    """The inverse of `_gather`."""
    dims = range(len(stack.part))
    x = x.reshape(stack.each, *itertools.chain(*zip(stack.ways, stack.part)))
    order = [*(1 + 2 * i for i in dims), 0, *(2 + 2 * i for i in dims)]
    return _exchange(x.transpose(order).reshape(-1, *stack.part), stack)


def _exchange(x: Array, stack: Stack) -> Array:
    return lax.all_to_all(x, stack.axes, split_axis=0, concat_axis=0, tiled=True) if stack.axes else x


def _unpermuted(x: Array, layout: BlockLayout, shape: tuple[int, ...]) -> Array:
    inverse = sorted(range(len(shape)), key=layout.permutation.__getitem__)
    return x.reshape([shape[i] for i in layout.permutation]).transpose(inverse).astype(jnp.float32)


def _by_path(specs: Any) -> dict[str, Any]:
    def is_spec(node):
        return isinstance(node, jax.sharding.PartitionSpec)

    return {path_name(path): spec for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)}


def _cuts(specs: Mapping[str, Any], name: str, ndim: int) -> list[tuple[str, ...]]:
    """The mesh axes that cut each dimension of an array."""
    if name not in specs:
        raise ValueError(f"parameter {name!r} has no PartitionSpec; there are specs for {sorted(specs)}")
    entries = [*specs[name], *(None,) * (ndim - len(specs[name]))]
    return [names_of(entry) for entry in entries]


def _share(name: str, size: int, axes: tuple[str, ...], ways: int) -> int:
    if size % ways:
        raise ValueError(f"parameter {name!r}: a dimension of {size} does not divide over {axes}, {ways} devices")
    return size // ways
