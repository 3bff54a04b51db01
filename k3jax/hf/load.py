"""Released weights into ours, one tensor at a time."""

import pathlib
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import config as c
from k3jax.hf import names
from k3jax.hf.checkpoint import Checkpoint, open_checkpoint
from k3jax.hf.names import Path, Tensor
from k3jax.model import weights

type Masters = Literal["float32", "stored"]

ALIGNMENT = 64


def load_hf(
    folder: str | pathlib.Path, *, dtype: c.Dtype | None = None, masters: Masters = "float32"
) -> tuple[c.ModelConfig, weights.Tree, weights.Tree]:
    """The model of a folder in the released format.

    Everything is checked before the first weight is read (:func:`~k3jax.hf.checkpoint.open_checkpoint`), and one tensor
    is in memory beside the weights at a time.

    Args:
      folder: ``config.json`` and one or several safetensors files.
      dtype: the compute dtype; None is the one that ``config.json`` names.
      masters: dtype of the weights. "float32" holds any stored value exactly. "stored" is bfloat16 where the file has
        bfloat16 or MXFP4 (both exact), except for the few small weights that Kimi K3 releases in float32: half the
        memory, for inference.

    Returns:
      the configuration, the parameters and the router biases, as in :class:`~k3jax.model.weights.Weights`.

    Raises:
      CheckpointError: the folder is refused, or a file changed since it was checked; the message says why by name.
    """
    checkpoint = open_checkpoint(folder)
    model = c.replace(checkpoint.model, dtype=dtype or checkpoint.model.dtype)
    arrays = {path: jax.device_put(array) for path, array in read_leaves(checkpoint, masters)}
    shapes = weights.structure(model).shapes
    return model, _fill(shapes.params, arrays), _fill(shapes.router, arrays)


def read_leaves(checkpoint: Checkpoint, masters: Masters = "float32") -> Iterator[tuple[Path, np.ndarray]]:
    """Every weight of our model by its path, complete when it is yielded.

    Raises:
      CheckpointError: as :meth:`~k3jax.hf.checkpoint.Checkpoint.read`.
    """
    sources: dict[Path, list[Tensor]] = {}
    for tensor in names.tensors(checkpoint.model):
        for path in tensor.leaves:
            sources.setdefault(path, []).append(tensor)
    shapes = names.shapes(checkpoint.model)
    for path, tensors in sources.items():
        leaf = _empty(shapes[path], _dtype(checkpoint, tensors, masters))
        for tensor in tensors:
            leaf[tensor.where] = _part(checkpoint.read(tensor), tensor, path, shapes)
        yield path, leaf


def _part(array: np.ndarray, tensor: Tensor, path: Path, shapes: dict[Path, tuple[int, ...]]) -> np.ndarray:
    """The view of a released array that belongs to the weight at ``path``."""
    lead = len(tensor.where)
    widths = [shapes[leaf][-1] for leaf in tensor.leaves]
    start = sum(widths[: tensor.leaves.index(path)])
    shape = shapes[path][lead:]
    if len(widths) == 1:
        return tensor.form.ours(array, shape)
    joined = tensor.form.ours(array, (*shape[:-1], sum(widths)))
    return joined[..., start : start + shape[-1]]


def _dtype(checkpoint: Checkpoint, tensors: list[Tensor], masters: Masters) -> np.dtype:
    if masters not in ("float32", "stored"):
        raise ValueError(f"masters = {masters!r}, but it must be 'float32' or 'stored'")
    release = checkpoint.release
    wide = any(t.precise or (t.name not in release.packed and release.dtype_of(t) == "F32") for t in tensors)
    return np.dtype("float32") if masters == "float32" or wide else jnp.dtype("bfloat16")


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array aligned so that JAX takes it over on a CPU instead of copying it."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)


def _fill(tree: Any, arrays: dict[Path, Any], path: Path = ()) -> Any:
    """``tree`` with every leaf replaced by the array of its path."""
    if not isinstance(tree, dict):
        return arrays[path]
    return {key: _fill(node, arrays, (*path, key)) for key, node in tree.items()}
