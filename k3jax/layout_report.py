"""How every array of a run lies on a mesh, how many bytes of it a device holds, and why; from shapes alone."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from k3jax import placement, sharding
from k3jax.config import ModelConfig
from k3jax.config_layout import Layout
from k3jax.model import attnres, weights
from k3jax.roles import ParamMeta, meta_by_path, path_name
from k3jax.run_config import TrainConfig
from k3jax.step import abstract_state

LISTED = 16e6
"""Bytes from which on an array that several devices hold alike is listed."""


class Placed(NamedTuple):
    """One array. spec: how it lies. bytes: of a device's part. copies: how many devices hold the same part. why: role
    and rule."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    bytes: int
    copies: int
    why: str


def mesh_of(layout: Layout) -> AbstractMesh:
    """The mesh of a layout, of no devices in particular."""
    sizes = tuple(layout.sizes[name] for name in sharding.MESH_AXES)
    return AbstractMesh(sizes, sharding.MESH_AXES, axis_types=(AxisType.Explicit,) * len(sizes))


def state(config: TrainConfig, layout: Layout) -> list[Placed]:
    """Every array of the train state.

    Raises:
      ConfigError: the layout does not fit the model.
    """
    mesh, metas = mesh_of(layout), meta_by_path(weights.structure(config.model).meta)
    where = jax.tree.leaves(placement.state_shardings(config, mesh, layout))
    leaves = jax.tree_util.tree_leaves_with_path(abstract_state(config))
    return [_placed(path_name(path), x, s, metas, layout) for (path, x), s in zip(leaves, where)]


def _placed(path: str, x, where: NamedSharding, metas: dict[str, ParamMeta], layout: Layout) -> Placed:
    parts = path.split("/")
    meta = next((metas[name] for n in range(len(parts)) if (name := "/".join(parts[n:])) in metas), None)
    why = "small: the same everywhere"
    if meta is not None and math.prod(x.shape) > 1:
        why = f"{meta.role.value}: {_rules(meta.axes, layout)}"
        if parts[0] == "opt_state":
            why = f"like its parameter{', spread over ' + ' x '.join(layout.optimizer) if layout.optimizer else ''}"
    return _array(path, x.shape, x.dtype, where, why)


def _rules(axes: tuple[str, ...], layout: Layout) -> str:
    """What the logical axes of a parameter do, in words."""
    words = []
    for axis in axes:
        mesh_axes, gathered = sharding.rule(axis)
        mesh_axes = layout.dense if axis in sharding.DENSE else mesh_axes
        if mesh_axes:
            words.append(f"{axis} {'spread at rest' if gathered else 'split'} over {' x '.join(mesh_axes)}")
    return ", ".join(words) or "no axis is large enough to be worth it"


def _array(path: str, shape, dtype, where: NamedSharding, why: str) -> Placed:
    local = math.prod(where.shard_shape(tuple(shape)))
    copies = where.mesh.size * local // max(math.prod(shape), 1)
    return Placed(path, tuple(shape), str(dtype), where.spec, local * jnp.dtype(dtype).itemsize, copies, why)


def activations(config: TrainConfig, layout: Layout) -> list[Placed]:
    """The large arrays of tokens in a step of one micro-batch: what lies between sub-layers, and what one layer of each
    kind makes at its widest. The layer inputs are what ``remat='full'`` keeps."""
    mesh, model = mesh_of(layout), config.model
    B, T, D = config.batch // config.micro_batches, config.seq_len, model.dim

    def one(name: str, shape, dtype, spec, why: str) -> Placed:
        return _array(name, shape, dtype, NamedSharding(mesh, spec), why)

    between, heads = "tokens apart: rows over data x fsdp x expert, time over context x tensor", "heads over tensor"
    found = [
        one("batch", (4, B, T), "int32", sharding.CUT_ROWS, "rows apart, the same over context x tensor: it is small"),
        one("stream", (B, T, D), model.dtype, sharding.TOKENS, between),
        one("layer inputs", (model.layers, B, T, D), model.dtype, sharding.SOURCES, between),
    ]
    slots = attnres.source_slots(model.residual, model.layers)
    if slots:
        found.append(one("depth sources", (slots, B, T, D), model.dtype, sharding.SOURCES, between))
    if model.mla.share > 1:
        found.append(one("keys and values, lent", (B, T, model.mla.cache_dim), model.dtype, sharding.TOKENS, between))
    found += [one(*row, heads) for row in _mixers(model, B, T)]
    if any(kind.ffn == "moe" for kind in model.kinds):
        L = model.moe.latent.dim if model.moe.latent else D
        copies = (B, T, model.moe.active * L)
        found.append(one("MoE latents of tokens", (B, T, L), model.dtype, sharding.TOKENS, between))
        found.append(one("MoE rows, if balanced", copies, model.dtype, sharding.TOKENS, "one for each copy of a token"))
    chunk = min(config.loss_chunk, T // layout.context) * layout.context
    logits = (B, chunk, model.vocab), "float32", sharding.BY_VOCABULARY
    found.append(one("logits of a chunk", *logits, "vocabulary over tensor"))
    return found


def _mixers(model: ModelConfig, B: int, T: int) -> Iterator[tuple]:
    mixers = {kind.mixer for kind in model.kinds}
    if "kda" in mixers:
        yield "KDA q, k, v, gate", (4, B, T, model.kda.heads, model.kda.head_dim), model.dtype, sharding.BY_HEADS
    if "mla" in mixers:
        yield "MLA q, k, v", (3, B, T, model.mla.heads, model.mla.qk_dim), model.dtype, sharding.BY_HEADS


def text(config: TrainConfig, layout: Layout) -> list[str]:
    """The description of a layout, a line at a time."""
    placed, live = state(config, layout), activations(config, layout)
    by_kind = {"parameters": "weights/params", "router biases": "weights/router", "optimizer": "opt_state"}
    lines = [f"{layout.devices:,} devices: " + " x ".join(f"{n} {s}" for n, s in layout.sizes.items() if s > 1)]
    for name, prefix in by_kind.items():
        size = sum(one.bytes for one in placed if one.path.startswith(prefix))
        lines.append(f"  {name:22}{size:>18,} bytes per device")
    lines += ["", *table(placed), "", "activations of one micro-batch", *table(live)]
    alike = [one for one in placed if one.bytes >= LISTED and one.copies > 1]
    lines += ["", f"arrays that several devices hold alike, from {LISTED / 1e6:.0f} MB on: {len(alike) or 'none'}"]
    for one in alike:
        lines.append(f"  {one.path}: {one.bytes / 1e6:,.0f} MB on each of {one.copies} devices; {one.why}")
    return lines


def table(placed: list[Placed]) -> list[str]:
    """One line per array."""
    rows = [("array", "shape", "sharding", "bytes per device", "copies", "why")]
    for one in placed:
        spec = " ".join(_entry(entry) for entry in one.spec) or "-"
        rows.append((one.path, " ".join(map(str, one.shape)), spec, f"{one.bytes:,}", str(one.copies), one.why))
    widths = [max(map(len, column)) + 2 for column in zip(*rows)]
    return ["".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _entry(entry) -> str:
    return "-" if entry is None else entry if isinstance(entry, str) else "x".join(entry)
