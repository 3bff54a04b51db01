"""The file format: the same files are valid here and in the safetensors library, and others are refused by name."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from k3jax.hf import CheckpointError, safetensors_io
from k3jax.hf.safetensors_io import Spec

PLAIN = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
OTHER = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}


def file_of(path, header, data: bytes, length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def with_b(**changes) -> dict:
    return {**PLAIN, "b": {**OTHER, **changes}}


def test_reads_what_the_library_writes(tmp_path):
    arrays = {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "y": np.arange(5, dtype=np.uint8),
        "scalar": np.array(3.0, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "f.safetensors")
    found = safetensors_io.read_header(tmp_path / "f.safetensors")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(safetensors_io.read(name, found[name]), array)


def test_the_library_reads_what_is_written(tmp_path):
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3).T, np.arange(4).astype(ml_dtypes.bfloat16)]
    specs = [Spec("x", "F32", (3, 2)), Spec("y", "BF16", (4,))]
    safetensors_io.write(tmp_path / "f.safetensors", specs, iter(arrays))
    with safetensors.safe_open(tmp_path / "f.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
        for spec, array in zip(specs, arrays):
            np.testing.assert_array_equal(file.get_tensor(spec.name), array)


def test_an_array_other_than_announced_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"float32 \(2,\) for the announced .*name='x'"):
        safetensors_io.write(tmp_path / "f", [Spec("x", "F32", (3,))], iter([np.zeros(2, np.float32)]))
    with pytest.raises(ValueError, match="shorter"):
        safetensors_io.write(tmp_path / "f", [Spec("x", "F32", (3,))], iter([]))


TWICE = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
REFUSED = {
    "longer header": (PLAIN, 8, 10**6, "header says 1000000 bytes"),
    "huge header": (PLAIN, 8, 2**63, "header says 9223372036854775808 bytes"),
    "truncated": (PLAIN, 4, None, "a ends at byte .*truncated"),
    "past the end": (with_b(data_offsets=[8, 24], shape=[4]), 16, None, "b ends at byte"),
    "overlap": (with_b(data_offsets=[4, 12]), 12, None, "b overlaps a"),
    "same place": (with_b(data_offsets=[0, 8]), 8, None, "b overlaps a"),
    "gap": (with_b(data_offsets=[12, 20]), 20, None, "before b, belong to no tensor"),
    "bytes at the end": (PLAIN, 12, None, "after a, belong to no tensor"),
    "shape and bytes": (with_b(shape=[3]), 16, None, r"b has 8 bytes, but F32 \[3\] needs 12"),
    "reversed": (with_b(data_offsets=[16, 8]), 16, None, r"b has the offsets \[16, 8\]"),
    "negative size": (with_b(shape=[-2]), 16, None, r"b has the shape \[-2\]"),
    "huge size": (with_b(shape=[2**40, 2**40]), 16, None, "b has 8 bytes"),
    "dtype": (with_b(dtype="F31"), 16, None, "b has the dtype 'F31'"),
    "lacks a key": ({"a": {"dtype": "F32", "shape": [2]}}, 8, None, "a must have dtype, shape and data_offsets"),
    "no object": (b"[1]", 0, None, "must hold a JSON object"),
    "no JSON": (b"{", 0, None, "is not JSON"),
    "twice": (TWICE, 8, None, "a appears twice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_broken_files_are_refused_by_name(tmp_path, case):
    header, size, length, message = REFUSED[case]
    path = file_of(tmp_path / "broken.safetensors", header, bytes(size), length)
    with pytest.raises(CheckpointError, match=message) as error:
        safetensors_io.read_header(path)
    assert "broken.safetensors" in str(error.value)
    if case != "twice":  # the library keeps one of two equal names
        with pytest.raises(safetensors.SafetensorError), safetensors.safe_open(path, framework="np"):
            pass


@pytest.mark.parametrize("size", [0, 3, 8])
def test_a_file_too_short_for_a_header_is_refused(tmp_path, size):
    path = tmp_path / "short.safetensors"
    path.write_bytes(b"\1" * size)
    with pytest.raises(CheckpointError, match=r"short\.safetensors: the header says"):
        safetensors_io.read_header(path)


def test_a_file_cut_after_the_check_is_refused(tmp_path):
    path = file_of(tmp_path / "f.safetensors", PLAIN, bytes(8))
    found = safetensors_io.read_header(path)["a"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="a ends after 4 of 8 bytes"):
        safetensors_io.read("a", found)
