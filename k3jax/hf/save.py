"""Our weights into the released format, one tensor at a time."""

import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from k3jax import config as c
from k3jax.hf import config, mxfp4, names, safetensors_io
from k3jax.hf.checkpoint import CONFIG, INDEX, SINGLE, Checkpoint, Release, open_checkpoint, specs
from k3jax.hf.errors import CheckpointError
from k3jax.hf.names import SCALE, Path, Tensor
from k3jax.hf.safetensors_io import DTYPES, Spec
from k3jax.model import weights

MAX_SHARD_BYTES = 5_000_000_000


class _Unit(NamedTuple):
    """Tensors that are made together: what they are, and how to make them."""

    specs: list[Spec]
    make: Callable[[], list[np.ndarray]]

    @property
    def size(self) -> int:
        return sum(safetensors_io.nbytes(spec.dtype, spec.shape) for spec in self.specs)


def release_for(model: c.ModelConfig, *, dtype: c.Dtype = "bfloat16", packed: bool = False) -> Release:
    """The form in which a model of this kind is released: Kimi Linear's if it has none of Kimi K3's parts, else K3's.

    Args:
      model: the model.
      dtype: of the weights; Kimi K3 keeps a few small ones in float32 beside bfloat16, and so does this.
      packed: routed experts as MXFP4, 4.25 bits a weight.
    """
    plain = isinstance(model.residual, c.PlainResidual) and isinstance(model.activation, c.SwiGLU)
    linear = plain and isinstance(model.kda.decay, c.SoftplusDecay) and not model.moe.latent
    tensors = names.tensors(model)
    forms = names.a_log_shapes(model)
    return Release(
        nested=not linear,
        prefix="" if linear else names.PREFIX,
        a_log="broadcast" if linear or "padded" not in forms else "padded",
        dtype=dtype,
        precise=frozenset(t.name for t in tensors if t.release_precise and dtype != "float32"),
        packed=frozenset(t.name for t in tensors if t.expert and packed),
    )


def save_hf(
    folder: str | pathlib.Path,
    model: c.ModelConfig,
    params: weights.Tree,
    router: weights.Tree,
    *,
    release: Release | None = None,
    like: str | pathlib.Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a model in the released format.

    The folder appears under its name when it is complete; until then it is a hidden sibling. One tensor is in memory
    beside the weights at a time.

    Args:
      folder: must not exist, or be empty.
      model, params, router: as :func:`~k3jax.hf.load.load_hf` returns them.
      release: how the weights are stored; None is the form of ``like``, else ``release_for(model, dtype=model.dtype)``.
      like: a released folder of the same model. Its configuration is kept, the tensors of its vision tower are copied,
        and packed experts keep their scales where these represent the weights exactly.
      max_shard_bytes: above this size the weights are split in several files with an index.

    Raises:
      CheckpointError: the folder is in the way; the released format cannot express the model, or the model is not that
        of ``like``; an expert cannot be packed.
      ValueError: a weight is missing or has the wrong shape.
    """
    folder = pathlib.Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not an empty folder; it is left as it is")
    source = None if like is None else open_checkpoint(like)
    if release is None:
        release = source.release if source else release_for(model, dtype=model.dtype)
    described = _describe(model, release, source)
    units = _units(model, params, router, release, source)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        (partial / CONFIG).write_text(json.dumps(described, indent=2) + "\n")
        _write_shards(partial, units, max_shard_bytes)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def released_tensors(
    model: c.ModelConfig, params: weights.Tree, router: weights.Tree
) -> Iterator[tuple[Tensor, np.ndarray]]:
    """Every released tensor with its array, in its released shape (``A_log`` as [H]) and our dtype.

    ``params`` may be any tree of the parameters' shapes, gradients for example.

    Raises:
      ValueError: a weight is missing or has the wrong shape.
    """
    leaves = dict(names.flatten(params)) | dict(names.flatten(router))
    _check_shapes(names.shapes(model), leaves)
    for tensor in names.tensors(model):
        yield tensor, _released(tensor, leaves)


def _released(tensor: Tensor, leaves: dict[Path, np.ndarray]) -> np.ndarray:
    parts = [np.asarray(leaves[path][tensor.where]) for path in tensor.leaves]
    return tensor.form.released(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1))


def _check_shapes(shapes: dict[Path, tuple[int, ...]], leaves: dict[Path, np.ndarray]) -> None:
    found = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    if found != shapes:
        path = min((p for p in shapes.keys() | found.keys() if shapes.get(p) != found.get(p)), key=str)
        raise ValueError(f"weight {path} has the shape {found.get(path)}, but the model has {shapes.get(path)}")


def _describe(model: c.ModelConfig, release: Release, source: Checkpoint | None) -> dict:
    """The configuration to write: that of ``source`` if the form is kept too."""
    made = config.write(model, dtype=release.dtype, nested=release.nested, packed=bool(release.packed))
    if source is None:
        return made
    theirs = config.matching(source.model, model)
    if theirs != model:
        raise CheckpointError(f"{source.folder} is not this model: {config.differences(theirs, model)}")
    return dict(source.config) if release == source.release else made


def _units(model, params, router, release: Release, source: Checkpoint | None) -> list[_Unit]:
    """What to write: the text tensors, then copies of what is not text."""
    leaves = dict(names.flatten(params)) | dict(names.flatten(router))
    _check_shapes(names.shapes(model), leaves)

    def text(tensor: Tensor) -> _Unit:
        wanted = specs(model, release, tensor)
        return _Unit(wanted, lambda: _stored(tensor, wanted, _released(tensor, leaves), release, source))

    def copied(name: str) -> _Unit:
        found = source.stored[name]
        return _Unit([Spec(name, found.dtype, found.shape)], lambda: [safetensors_io.read(name, found)])

    others = source.not_text if source and release.nested else ()
    return [text(tensor) for tensor in names.tensors(model)] + [copied(name) for name in others]


def _stored(tensor: Tensor, wanted: list[Spec], array, release: Release, source: Checkpoint | None) -> list[np.ndarray]:
    """The arrays that are stored for one tensor."""
    if tensor.name not in release.packed:
        array = names.pad_a_log(array, wanted[0].shape) if tensor.form is names.A_LOG else array
        return [array.astype(DTYPES[wanted[0].dtype])]
    scale = None
    if source and tensor.name in source.release.packed:
        name = source.release.prefix + tensor.name + SCALE
        scale = safetensors_io.read(name, source.stored[name])
    try:
        return list(mxfp4.pack(array, scale))
    except ValueError as error:
        raise CheckpointError(f"{tensor.name} cannot be packed: {error}") from error


def _write_shards(folder: pathlib.Path, units: list[_Unit], max_shard_bytes: int) -> None:
    shards: list[list[_Unit]] = [[]]
    used = 0
    for unit in units:
        if shards[-1] and used + unit.size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(unit)
        used += unit.size
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    files = [SINGLE] if len(shards) == 1 else files
    for file, shard in zip(files, shards):
        arrays = (array for unit in shard for array in unit.make())
        safetensors_io.write(folder / file, [spec for unit in shard for spec in unit.specs], arrays)
    if len(shards) > 1:
        placed = {spec.name: file for file, shard in zip(files, shards) for unit in shard for spec in unit.specs}
        index = {"metadata": {"total_size": sum(unit.size for unit in units)}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
