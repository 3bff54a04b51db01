"""Safetensors files: a header that is checked by name before any data is read, and a writer that streams.

The `safetensors` library reads and writes whole files, lets the last of two equal names win, and does not say which
tensor is wrong. Here one tensor is in memory at a time, and every refusal names the file and the tensor; the tests hold
both to agree on what is valid. Nothing is memory-mapped: a file that shrinks while it is read is an error, not a fault.
"""

import json
import math
import os
import pathlib
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from k3jax.hf.errors import CheckpointError, parse_object

MAX_HEADER = 100_000_000
DTYPES = {
    "F32": np.dtype("<f4"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype("u1"),
    "F64": np.dtype("<f8"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "BOOL": np.dtype("?"),
}


class Stored(NamedTuple):
    """Where one tensor lies: ``offset`` counts from the start of the file."""

    path: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Bytes."""
        return nbytes(self.dtype, self.shape)


class Spec(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize


def read_header(path: pathlib.Path) -> dict[str, Stored]:
    """Every tensor of a file, from its header alone.

    Raises:
      CheckpointError: the file is truncated; its header is longer than the file or not what the format says; a tensor
        has an unknown dtype, a shape that disagrees with its bytes, overlaps another, or runs past the end; bytes
        belong to no tensor; a name appears twice.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            limit = f"{size} bytes" if size - 8 < MAX_HEADER else f"the {MAX_HEADER} bytes that are allowed"
            raise CheckpointError(f"{path}: the header says {length} bytes, but the file has {limit}: is it truncated?")
        header = parse_object(file.read(length), f"the header of {path}")
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _entry(path, name, entry, start, size) for name, entry in header.items()}
    _check_layout(path, tensors, start, size)
    return tensors


def _entry(path: pathlib.Path, name: str, entry: Any, start: int, size: int) -> Stored:
    """One tensor of a header, checked on its own."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{path}: {name} must have dtype, shape and data_offsets, and has {entry!r}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name} has the dtype {dtype!r}, which is none of {', '.join(DTYPES)}")
    if not _counts(shape):
        raise CheckpointError(f"{path}: {name} has the shape {shape!r}, which is no list of sizes")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{path}: {name} has the offsets {offsets!r}, which are no [begin, end]")
    begin, end = offsets
    if end > size - start:
        raise CheckpointError(f"{path}: {name} ends at byte {start + end} of a file of {size}: is it truncated?")
    if end - begin != nbytes(dtype, shape):
        needed = f"{dtype} {shape} needs {nbytes(dtype, shape)}"
        raise CheckpointError(f"{path}: {name} has {end - begin} bytes, but {needed}")
    return Stored(path, dtype, tuple(shape), start + begin)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_layout(path: pathlib.Path, tensors: dict[str, Stored], start: int, size: int) -> None:
    """Tensors must follow each other without overlap or gap, up to the end of the file."""
    end, last = start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size)):
        if tensor.offset < end:
            raise CheckpointError(f"{path}: {name} overlaps {last}: it starts at byte {tensor.offset}, before {end}")
        if tensor.offset > end:
            raise CheckpointError(f"{path}: bytes {end} to {tensor.offset}, before {name}, belong to no tensor")
        end, last = tensor.offset + tensor.size, name
    if end != size:
        raise CheckpointError(f"{path}: bytes {end} to {size}, after {last}, belong to no tensor")


def read(name: str, tensor: Stored) -> np.ndarray:
    """The array of one tensor, in its stored dtype.

    Raises:
      CheckpointError: the file ends before the tensor does.
    """
    dtype = DTYPES[tensor.dtype]
    flat = np.fromfile(tensor.path, dtype=dtype, count=math.prod(tensor.shape), offset=tensor.offset)
    if flat.nbytes != tensor.size:
        raise CheckpointError(f"{tensor.path}: {name} ends after {flat.nbytes} of {tensor.size} bytes")
    return flat.reshape(tensor.shape)


def write(path: pathlib.Path, specs: Sequence[Spec], arrays: Iterable[np.ndarray]) -> None:
    """Writes a file from its specifications and, one at a time, their arrays in the same order.

    Raises:
      ValueError: an array differs from its specification.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        begin, end = end, end + nbytes(spec.dtype, spec.shape)
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for spec, array in zip(specs, arrays, strict=True):
            if array.shape != spec.shape or array.dtype != DTYPES[spec.dtype]:
                raise ValueError(f"{array.dtype} {array.shape} for the announced {spec}")
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        file.flush()
        os.fsync(file.fileno())
