"""A folder in the released format, opened: everything is checked from its headers before any weight is read."""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from k3jax import config as c
from k3jax.hf import config, mxfp4, names, safetensors_io
from k3jax.hf.errors import CheckpointError, listing, parse_object
from k3jax.hf.names import PACKED, SCALE, Tensor
from k3jax.hf.safetensors_io import Stored

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
FLOATS = {"float32": "F32", "bfloat16": "BF16"}


class Release(NamedTuple):
    """How a model lies on disk, beyond what its configuration says.

    nested: Kimi K3's form of ``config.json``, with a ``text_config``. prefix: before every name of a text tensor.
    a_log: which of :func:`k3jax.hf.names.a_log_shapes`. dtype: of the weights. precise: names (without prefix) stored
    in float32 beside bfloat16 weights. packed: names of expert matrices stored as MXFP4.
    """

    nested: bool
    prefix: str
    a_log: str
    dtype: c.Dtype
    precise: frozenset[str]
    packed: frozenset[str]

    def dtype_of(self, tensor: Tensor) -> str:
        """The stored dtype of a tensor that is not packed."""
        return "F32" if tensor.name in self.precise else FLOATS[self.dtype]


class Checkpoint(NamedTuple):
    """An opened folder. ``stored`` has every tensor by its full name, those in ``not_text`` included."""

    folder: pathlib.Path
    config: Mapping[str, Any]
    model: c.ModelConfig
    release: Release
    stored: Mapping[str, Stored]
    not_text: tuple[str, ...]

    def read(self, tensor: Tensor) -> np.ndarray:
        """One tensor in its released shape (``A_log`` as [H]) and stored dtype; packed matrices as float32.

        Raises:
          CheckpointError: the file has been cut short, the padding of ``A_log`` is not zero, or a scale is NaN.
        """
        name = self.release.prefix + tensor.name
        if tensor.name in self.release.packed:
            packed, scale = (safetensors_io.read(name + end, self.stored[name + end]) for end in (PACKED, SCALE))
            try:
                return mxfp4.unpack(packed, scale)
            except ValueError as error:
                raise CheckpointError(f"{name + SCALE}: {error}") from error
        array = safetensors_io.read(name, self.stored[name])
        return names.unpad_a_log(name, array, self.model.kda.heads) if tensor.form is names.A_LOG else array


def open_checkpoint(folder: str | pathlib.Path) -> Checkpoint:
    """Opens a folder with ``config.json`` and one or several safetensors files; no weight is read.

    Raises:
      CheckpointError: a file is missing, lies outside the folder, is no safetensors file (pickles are never opened), or
        breaks its format; the configuration is not that of a model known here; a tensor is missing, unknown, or of
        another dtype or shape than the configuration says. The message names it.
    """
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    data = parse_object(_inside(folder, CONFIG).read_bytes(), folder / CONFIG)
    model, nested = config.read(data, str(folder / CONFIG))
    stored = _locate(folder)
    matched = names.match(model, stored, multimodal=nested)
    a_log = _a_log(model, matched.prefix, stored)
    release = Release(nested, matched.prefix, a_log, model.dtype, frozenset(), matched.packed)
    precise = frozenset(tensor.name for tensor in names.tensors(model) if _check(model, release, tensor, stored))
    return Checkpoint(folder, data, model, release._replace(precise=precise), stored, matched.not_text)


def specs(model: c.ModelConfig, release: Release, tensor: Tensor) -> list[safetensors_io.Spec]:
    """What is stored of one tensor: itself, or its codes and scales."""
    name = release.prefix + tensor.name
    if tensor.name in release.packed:
        rows, columns = tensor.shape
        codes = safetensors_io.Spec(name + PACKED, "U8", (rows, columns // 2))
        return [codes, safetensors_io.Spec(name + SCALE, "U8", (rows, columns // mxfp4.GROUP))]
    shape = names.a_log_shapes(model)[release.a_log] if tensor.form is names.A_LOG else tensor.shape
    return [safetensors_io.Spec(name, release.dtype_of(tensor), shape)]


def _check(model: c.ModelConfig, release: Release, tensor: Tensor, stored: Mapping[str, Stored]) -> bool:
    """Checks dtype and shape; whether the tensor is stored in float32 beside weights that are not."""
    if tensor.name in release.packed and tensor.shape[1] % mxfp4.GROUP:
        raise CheckpointError(
            f"{release.prefix}{tensor.name} is packed, but its input width {tensor.shape[1]} is not a multiple of 32"
        )
    for spec in specs(model, release, tensor):
        found = stored[spec.name]
        dtypes = {spec.dtype, "F32"} if tensor.precise else {spec.dtype}
        if found.dtype not in dtypes or found.shape != spec.shape:
            raise CheckpointError(
                f"{found.path}: {spec.name} is {found.dtype} {list(found.shape)}, but it must be "
                f"{' or '.join(sorted(dtypes))} {list(spec.shape)}"
            )
    return release.dtype != "float32" and found.dtype == "F32"


def _a_log(model: c.ModelConfig, prefix: str, stored: Mapping[str, Stored]) -> str:
    """In which of its shapes ``A_log`` is stored."""
    forms = names.a_log_shapes(model)
    for tensor in names.tensors(model):
        if tensor.form is names.A_LOG:
            found = stored[prefix + tensor.name]
            for form, shape in forms.items():
                if shape == found.shape:
                    return form
            valid = " or ".join(str(list(shape)) for shape in forms.values())
            name = f"{found.path}: {prefix}{tensor.name}"
            raise CheckpointError(f"{name} is {found.dtype} {list(found.shape)}, but its shape must be {valid}")
    return next(iter(forms))


def _locate(folder: pathlib.Path) -> dict[str, Stored]:
    """Every tensor of a folder by name, from the index if there is one."""
    single, index = (folder / SINGLE).exists(), (folder / INDEX).exists()
    if single and index:
        raise CheckpointError(f"{folder} has both {SINGLE} and {INDEX}; which one counts is not clear, so remove one")
    if single:
        return safetensors_io.read_header(_inside(folder, SINGLE))
    if index:
        return _locate_shards(folder)
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    advice = f"; {listing(pickled)} would have to be unpickled, which is never done" if pickled else ""
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}{advice}")


def _locate_shards(folder: pathlib.Path) -> dict[str, Stored]:
    """Every tensor of the files that the index names; index and files must agree exactly."""
    index = parse_object(_inside(folder, INDEX).read_bytes(), folder / INDEX)
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise CheckpointError(f"{folder / INDEX} must hold a weight_map from tensor names to file names")
    paths = [_inside(folder, file) for file in sorted(set(placed.values()))]
    stored: dict[str, Stored] = {}
    for path in paths:
        if path.suffix != ".safetensors":
            raise CheckpointError(f"{folder / INDEX} names {path.name}, which is no safetensors file; it is not opened")
        header = safetensors_io.read_header(path)
        stray = [name for name in header if placed.get(name) != path.name]
        if stray:
            raise CheckpointError(f"{path} has tensors that {INDEX} does not place there: {listing(stray)}")
        stored |= header
    absent = placed.keys() - stored.keys()
    if absent:
        files = listing({placed[name] for name in absent})
        raise CheckpointError(f"{files} lack tensors that {INDEX} places there: {listing(absent)}")
    return stored


def _inside(folder: pathlib.Path, file: str) -> pathlib.Path:
    """The path of a plain file name in ``folder``.

    A link may not lead out of the folder, except from a snapshot of the Hugging Face cache to the blobs beside it.
    """
    if file in ("", ".", "..") or pathlib.PurePath(file).name != file or "\\" in file or "\0" in file:
        raise CheckpointError(f"{folder}: {file!r} is not the name of a file inside the folder")
    path = folder / file
    target, home = path.resolve(), folder.resolve()
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if target.parent not in homes:
        raise CheckpointError(f"{path} is a link to {target}, outside the folder: put the file itself there")
    if not target.is_file():
        raise CheckpointError(f"{path} is missing or not a file")
    return path
