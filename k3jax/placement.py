"""Where the arrays of a run lie on its mesh: the state by its parameters' logical axes, batches by rows."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import AxisType, Mesh, NamedSharding

from k3jax import layouts, sharding
from k3jax.config import ConfigError, ModelConfig
from k3jax.config_layout import ALONE, Layout, replace
from k3jax.data import Batch
from k3jax.model import weights
from k3jax.roles import meta_by_path, meta_of, path_name
from k3jax.run_config import TrainConfig
from k3jax.step import TrainState, abstract_batch, abstract_state


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with all axes, those not named at size 1, in JAX's explicit sharding mode.

    Raises:
      ConfigError: the sizes do not multiply to the number of devices; the message has the sizes that would.
    """
    devices = jax.devices() if devices is None else devices
    shape = [sizes.get(name, 1) for name in sharding.MESH_AXES]
    if np.prod(shape) != len(devices):
        factors = " x ".join(f"{name} {size}" for name, size in zip(sharding.MESH_AXES, shape) if size > 1) or "1"
        raise ConfigError(
            f"the mesh {factors} needs {np.prod(shape)} devices, but there are {len(devices)}"
            f"{sizes_that_fit(shape, len(devices))}"
        )
    kinds = (AxisType.Explicit,) * len(shape)
    return Mesh(np.asarray(devices).reshape(shape), sharding.MESH_AXES, axis_types=kinds)


def sizes_that_fit(shape: Sequence[int], devices: int) -> str:
    """For one axis at a time, the size with which the others as they are make up all devices."""
    fits = []
    for name, size in zip(sharding.MESH_AXES, shape):
        others = math.prod(shape) // size
        if devices % others == 0 and (size > 1 or name == "data"):
            fits.append(f"{name} = {devices // others}")
    return f"; {' or '.join(fits)} would fit" if fits else ""


def layout_of_flag(text: str, config: TrainConfig) -> tuple[Mesh | None, Layout]:
    """The mesh and the layout of a command; no mesh for a single device.

    By default the devices share the rows: all of them or, in a single process, as many as the rows divide over.
    """
    devices = jax.devices()
    if not text and jax.process_count() == 1:
        rows = math.gcd(*(stage.batch // stage.micro_batches for stage in stages_of(config)))
        count = next(count for count in range(len(devices), 0, -1) if rows % count == 0)
        if count < len(devices):
            logging.warning("using %d of %d devices: over more, %d rows do not divide", count, len(devices), rows)
        devices = devices[:count]
    if len(devices) == 1 and not text:
        return None, ALONE
    layout = layouts.load(text or f"data={len(devices)}")
    return make_mesh(layout.sizes, devices), layout


def stages_of(config: TrainConfig) -> list[TrainConfig]:
    return [config.at(number) for number in range(config.last_stage + 1)]


def layout_of(mesh: Mesh, layout: Layout) -> Layout:
    """The layout with the sizes of a mesh."""
    return replace(layout, **mesh.shape)


def check_batch(config: TrainConfig, mesh: Mesh) -> None:
    """Raises ConfigError when the rows or the tokens of some stage do not divide over the mesh."""
    ways = int(np.prod([mesh.shape[axis] for axis in sharding.BATCH_AXES]))
    for number, stage in enumerate(stages_of(config)):
        rows = stage.batch // stage.micro_batches
        if rows % ways:
            fitting = max(rows - rows % ways, ways)
            raise ConfigError(
                f"stage {number}: {stage.batch} rows in {stage.micro_batches} micro-batches are {rows} at a time, and "
                f"do not divide over {' x '.join(sharding.BATCH_AXES)} = {ways} devices; {fitting} or "
                f"{fitting + ways} would"
            )
        _check_time(f"stage {number}", stage.seq_len, config.model, mesh)


def _check_time(name: str, seq_len: int, model: ModelConfig, mesh: Mesh) -> None:
    context, ways = mesh.shape["context"], mesh.shape["context"] * mesh.shape["tensor"]
    if seq_len % ways:
        near = max(seq_len - seq_len % ways, ways)
        raise ConfigError(
            f"{name}: rows of {seq_len} tokens do not divide over {' x '.join(sharding.TIME_AXES)} = {ways} devices; "
            f"rows of {near} or {near + ways} would"
        )
    if context > 1 and seq_len // context < model.kda.conv - 1:
        raise ConfigError(
            f"{name}: rows of {seq_len} tokens over context = {context} devices are {seq_len // context} tokens on "
            f"each, shorter than the {model.kda.conv - 1} before it that the convolution of {model.kda.conv} taps "
            f"reads; context must be at most {seq_len // (model.kda.conv - 1)}"
        )


def check_model(model: ModelConfig, mesh: Mesh) -> None:
    """Raises ConfigError when a dimension that must be split does not divide over the mesh; the message names it."""
    metas, shapes = meta_by_path(weights.structure(model).meta), weights.structure(model).shapes.params
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        sharding.fitting(mesh, meta_of(metas, path, leaf.ndim).axes, leaf.shape, name=path_name(path))


def state_shardings(config: TrainConfig, mesh: Mesh, layout: Layout = ALONE) -> TrainState:
    """The sharding of every array of the train state.

    A parameter lies as its logical axes say; what the optimizer keeps for a parameter lies like it, or is spread
    further (``layout.optimizer``); the rest is everywhere.

    Raises:
      ConfigError: a dimension that must be split does not divide.
    """
    state = abstract_state(config)
    metas = meta_by_path(weights.structure(config.model).meta)
    placed = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.weights.params):
        name, axes = path_name(path), meta_of(metas, path, leaf.ndim).axes
        placed[name] = leaf.shape, sharding.fitting(mesh, axes, leaf.shape, name=name, dense=layout.dense)

    def place(path, leaf) -> NamedSharding:
        parts = path_name(path).split("/")
        for start in range(len(parts)):
            shape, where = placed.get("/".join(parts[start:]), (None, None))
            if shape == leaf.shape:
                is_kept = parts[0] == "opt_state"
                return sharding.spread_further(where, shape, layout.optimizer) if is_kept else where
        return sharding.replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, state)


def abstract(config: TrainConfig, mesh: Mesh, layout: Layout = ALONE) -> tuple[TrainState, Batch]:
    """Shapes, dtypes and shardings of what a train step takes; nothing is allocated."""

    def one(x, where):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    state = jax.tree.map(one, abstract_state(config), state_shardings(config, mesh, layout))
    return state, jax.tree.map(lambda x: one(x, sharding.rows(mesh)), abstract_batch(config))


def put(tree, shardings):
    """Arrays that every process holds whole, laid out on the mesh."""
    return jax.tree.map(
        lambda x, s: jax.make_array_from_callback(np.shape(x), s, lambda index: np.asarray(x)[index]), tree, shardings
    )


def rows_of_this_process(batch: int, mesh: Mesh) -> tuple[int, int]:
    """``(part, parts)``: which of so many equal parts of the rows the devices of this process need."""
    where = sharding.rows(mesh).addressable_devices_indices_map((batch, 1)).values()
    starts = [index[0].start or 0 for index in where]
    stops = [index[0].stop or batch for index in where]
    size = max(stops) - min(starts)
    if batch % size or min(starts) % size:
        return 0, 1
    return min(starts) // size, batch // size


def put_batch(batch: Batch, mesh: Mesh, part: int, parts: int) -> Batch:
    """One global batch from the rows that this process read."""
    here, rows = sharding.rows(mesh), len(batch.tokens_BT)

    def one(local: np.ndarray) -> jax.Array:
        shape = (rows * parts, *local.shape[1:])

        def block(index):
            start = index[0].start or 0
            stop = shape[0] if index[0].stop is None else index[0].stop
            return local[start - part * rows : stop - part * rows]

        return jax.make_array_from_callback(shape, here, block)

    return jax.tree.map(one, batch)
