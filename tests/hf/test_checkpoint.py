"""Folders that are refused: by name, from their headers, before a weight is read."""

import json
import math
import pathlib

import numpy as np
import pytest
import safetensors.numpy

from k3jax.hf import CheckpointError, load_hf, open_checkpoint, safetensors_io

NORM = "model.layers.2.input_layernorm.weight"


@pytest.fixture
def no_reading(monkeypatch):
    """Any read of a weight fails the test."""

    def read(name, _):
        raise AssertionError(f"{name} was read before everything was checked")

    monkeypatch.setattr(safetensors_io, "read", read)


def edit_json(path: pathlib.Path, change) -> None:
    """Rewrites a JSON file after ``change`` of its content."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def edit_tensors(folder: pathlib.Path, change) -> None:
    """Rewrites a folder's weights after ``change`` of the dict of arrays."""
    path = folder / "model.safetensors"
    arrays = safetensors.numpy.load_file(path)
    change(arrays)
    safetensors.numpy.save_file(arrays, path)


def shard(folder: pathlib.Path) -> dict[str, str]:
    """Splits a folder's weights in two files with an index, which is returned."""
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = sorted(arrays)[: len(arrays) // 2], sorted(arrays)[len(arrays) // 2 :]
    placed = {}
    for file, half in zip(("one.safetensors", "two.safetensors"), halves):
        safetensors.numpy.save_file({name: arrays[name] for name in half}, folder / file)
        placed |= dict.fromkeys(half, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return placed


def refused(folder: pathlib.Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_hf(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop(NORM), f"lacks 1 tensors: {NORM}"),
        (lambda a: a.update({"model.extra": np.zeros(2, np.float32)}), "no place for: model.extra"),
        (lambda a: a.update({"vision_tower.x": np.zeros(2, np.float32)}), "no place for: vision_tower.x"),
        (lambda a: a.update({NORM: a[NORM].astype(np.float64)}), rf"{NORM} is F64 \[64\], but it must be F32 \[64\]"),
        (lambda a: a.update({NORM: a[NORM].astype(np.float16)}), rf"{NORM} is F16"),
        (lambda a: a.update({NORM: a[NORM][:63]}), rf"{NORM} is F32 \[63\], but it must be F32 \[64\]"),
        (lambda a: a.update({NORM: a[NORM][None]}), rf"{NORM} is F32 \[1, 64\]"),
        (lambda a: a.update({"lm_head.weight": a["lm_head.weight"].T}), r"lm_head.weight is F32 \[64, 256\]"),
        (
            lambda a: a.update({"model.layers.0.self_attn.A_log": np.zeros(5, np.float32)}),
            r"layers.0.self_attn.A_log is F32 \[5\], but its shape must be \[16\] or \[1, 1, 3, 1\] or \[3\]",
        ),
        (
            lambda a: a.update({"model.layers.1.self_attn.A_log": np.zeros(3, np.float32)}),
            r"layers.1.self_attn.A_log is F32 \[3\], but it must be F32 \[1, 1, 3, 1\]",
        ),
    ],
)
def test_wrong_tensors(linear_copy, no_reading, change, message):
    edit_tensors(linear_copy, change)
    refused(linear_copy, message)


@pytest.mark.parametrize(
    ("ending", "array", "message"),
    [
        ("packed", np.zeros((32, 16), np.float32), r"w1.weight_packed is F32 \[32, 16\], but it must be U8 \[32, 16\]"),
        ("packed", np.zeros((32, 32), np.uint8), r"w1.weight_packed is U8 \[32, 32\]"),
        ("scale", np.zeros((32, 2), np.uint8), r"w1.weight_scale is U8 \[32, 2\], but it must be U8 \[32, 1\]"),
    ],
)
def test_wrong_packed_tensors(k3_copy, no_reading, ending, array, message):
    name = f"language_model.model.layers.3.block_sparse_moe.experts.2.w1.weight_{ending}"
    edit_tensors(k3_copy, lambda arrays: arrays.update({name: array}))
    refused(k3_copy, message)


def test_a_vision_tower_is_skipped_in_the_multimodal_form_only(k3_copy, linear_copy):
    extra = {"vision_tower.a": np.zeros(2, np.float16), "mm_projector.b": np.zeros(3, np.float32)}
    edit_tensors(k3_copy, lambda arrays: arrays.update(extra))
    assert open_checkpoint(k3_copy).not_text == ("mm_projector.b", "vision_tower.a")
    edit_tensors(linear_copy, lambda arrays: arrays.update(extra))
    refused(linear_copy, "has 2 tensors that the model has no place for: mm_projector.b, vision_tower.a")


def test_padding_of_a_log_and_nan_scales(k3_copy):
    a_log = "language_model.model.layers.4.self_attn.A_log"
    scale = "language_model.model.layers.3.block_sparse_moe.experts.2.w3.weight_scale"
    edit_tensors(k3_copy, lambda arrays: arrays[a_log].__setitem__(7, 1e-3))
    refused(k3_copy, "layers.4.self_attn.A_log: entries 3 to 15 are padding and must be zero")
    edit_tensors(k3_copy, lambda arrays: arrays[a_log].__setitem__(7, 0))
    load_hf(k3_copy)
    edit_tensors(k3_copy, lambda arrays: arrays[scale].__setitem__((3, 0), 255))
    refused(k3_copy, "experts.2.w3.weight_scale: 1 scales are 255")


def test_damaged_files(linear_copy, no_reading):
    path = linear_copy / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    refused(linear_copy, r"model\.safetensors: .* ends at byte .*truncated")
    path.write_bytes(b"\xff" * 8 + whole[8:])
    refused(linear_copy, r"model\.safetensors: the header says")
    path.write_bytes(whole + b"\0")
    refused(linear_copy, "belong to no tensor")
    path.write_bytes(b"")
    refused(linear_copy, "the header says 0 bytes")


def test_incomplete_folders(linear_copy, no_reading, tmp_path):
    refused(tmp_path / "nowhere", "nowhere is not a folder")
    (linear_copy / "model.safetensors").rename(linear_copy / "pytorch_model.bin")
    refused(linear_copy, "neither .* pytorch_model.bin would have to be unpickled, which is never done")
    (linear_copy / "config.json").unlink()
    refused(linear_copy, "config.json is missing")


def test_damaged_configurations(linear_copy, no_reading):
    path = linear_copy / "config.json"
    text = path.read_text()
    path.write_text(text.replace("{", '{"vocab_size": 256,', 1))
    refused(linear_copy, "config.json: vocab_size appears twice")
    path.write_text(text[:-1])
    refused(linear_copy, "config.json is not JSON")
    path.write_text("[]")
    refused(linear_copy, "config.json must hold a JSON object")
    path.write_text(text)
    edit_json(path, lambda data: data.update(num_experts=9))
    refused(linear_copy, "lacks 21 tensors: model.layers.1.block_sparse_moe.experts.8.w1.weight")


def test_shards_are_read_like_one_file(linear_copy, goldens):
    shard(linear_copy)
    one, many = open_checkpoint(goldens / "kimi_linear_tiny"), open_checkpoint(linear_copy)
    assert one.stored.keys() == many.stored.keys()
    assert len({stored.path for stored in many.stored.values()}) == 2


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("file", ["../one.safetensors", "/one.safetensors", "sub/one.safetensors", "..", "", "a\0b"])
def test_an_index_that_leaves_the_folder(linear_copy, no_reading, file):
    shard(linear_copy)
    (linear_copy.parent / "one.safetensors").write_bytes((linear_copy / "one.safetensors").read_bytes())
    edit_json(linear_copy / INDEX, lambda data: data["weight_map"].update({NORM: file}))
    refused(linear_copy, "is not the name of a file inside the folder")


def test_links_that_leave_the_folder(linear_copy, no_reading, tmp_path):
    shard(linear_copy)
    (linear_copy / "two.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (linear_copy / "two.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    refused(linear_copy, r"two\.safetensors is a link to .*elsewhere\.safetensors, outside the folder")


def test_links_of_the_hugging_face_cache(goldens, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, name in enumerate(("config.json", "model.safetensors")):
        (blobs / str(number)).write_bytes((goldens / "kimi_linear_tiny" / name).read_bytes())
        (snapshot / name).symlink_to(pathlib.Path("../../blobs") / str(number))
    assert open_checkpoint(snapshot).model.dim == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update({NORM: "two.safetensors"}), rf"one\.safetensors has tensors .* not place there: {NORM}"),
        (lambda m: m.pop(NORM), rf"one\.safetensors has tensors .* not place there: {NORM}"),
        (lambda m: m.update({"model.new": "one.safetensors"}), r"one\.safetensors lack tensors .* there: model\.new"),
        (lambda m: m.update({"model.new": "three.safetensors"}), r"three\.safetensors is missing"),
        (lambda m: m.update({"model.new": "weights.bin"}), r"weights\.bin is missing"),
        (lambda m: m.update({"model.new": "config.json"}), r"names config\.json, which is no safetensors file"),
        (lambda m: m.update({"model.new": 3}), "must hold a weight_map"),
    ],
)
def test_an_index_and_files_that_disagree(linear_copy, no_reading, change, message):
    shard(linear_copy)
    edit_json(linear_copy / INDEX, lambda data: change(data["weight_map"]))
    refused(linear_copy, message)


def test_a_tensor_in_two_files(linear_copy, no_reading):
    shard(linear_copy)
    second = safetensors.numpy.load_file(linear_copy / "two.safetensors")
    second[NORM] = np.zeros(64, np.float32)
    safetensors.numpy.save_file(second, linear_copy / "two.safetensors")
    refused(linear_copy, rf"two\.safetensors has tensors .* not place there: {NORM}")


def test_an_index_beside_a_single_file(linear_copy, no_reading, goldens):
    shard(linear_copy)
    (linear_copy / "model.safetensors").write_bytes((goldens / "kimi_linear_tiny" / "model.safetensors").read_bytes())
    refused(linear_copy, "has both")


def test_an_index_without_a_map(linear_copy, no_reading):
    shard(linear_copy)
    edit_json(linear_copy / INDEX, lambda data: data.pop("weight_map"))
    refused(linear_copy, "must hold a weight_map")


def test_what_opening_says_of_a_release(golden):
    release = open_checkpoint(golden).release
    linear, packed = golden.name == "kimi_linear_tiny", golden.name == "k3_tiny_mxfp4"
    assert release.nested is not linear
    assert release.prefix == ("" if linear else "language_model.")
    assert release.a_log == ("broadcast" if linear else "padded")
    assert len(release.packed) == (12 * 8 * 3 if packed else 0)
    assert (release.dtype, release.precise) == ("float32", frozenset())


def test_every_golden_tensor_is_accounted_for(golden):
    checkpoint = open_checkpoint(golden)
    size = sum(stored.size for stored in checkpoint.stored.values())
    assert (golden / "model.safetensors").stat().st_size - size < 2**17
    assert all(math.prod(stored.shape) for stored in checkpoint.stored.values())
