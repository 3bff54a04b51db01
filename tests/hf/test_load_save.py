"""Import and export are inverses, bit for bit and name for name, with one tensor in memory beside the weights."""

import json
import pathlib
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from k3jax import config as c
from k3jax.hf import CheckpointError, load_hf, mxfp4, names, open_checkpoint, release_for, safetensors_io, save_hf
from k3jax.hf.load import read_leaves
from k3jax.hf.save import released_tensors


def bits(array) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)


def contents(folder: pathlib.Path) -> dict:
    """Every tensor of a folder by its full name: dtype, shape and bytes."""
    stored = open_checkpoint(folder).stored
    return {name: (s.dtype, s.shape, bits(safetensors_io.read(name, s)).tobytes()) for name, s in stored.items()}


def assert_same_weights(ours: tuple[dict, dict], theirs: tuple[dict, dict]) -> None:
    """Bit for bit, path for path."""
    for a, b in zip(ours, theirs, strict=True):
        a, b = dict(names.flatten(a)), dict(names.flatten(b))
        assert a.keys() == b.keys()
        for path, leaf in a.items():
            np.testing.assert_array_equal(bits(leaf), bits(b[path]), err_msg=str(path))


def loaded(folder: pathlib.Path) -> tuple[c.ModelConfig, dict, dict]:
    """As load_hf, in NumPy, which a test reads faster."""
    checkpoint = open_checkpoint(folder)
    leaves = dict(read_leaves(checkpoint))
    tree: tuple[dict, dict] = ({}, {})
    for path, leaf in leaves.items():
        node = tree[path[-1] == "bias"]
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return checkpoint.model, *tree


def test_import_then_export_is_the_identity(golden, tmp_path):
    model, params, router = load_hf(golden)
    save_hf(tmp_path / "again", model, params, router, like=golden)
    assert contents(tmp_path / "again") == contents(golden)
    written, given = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "again", golden))
    assert written == given


def test_export_alone_gives_the_released_names_shapes_and_dtypes(golden, tmp_path):
    model, params, router = loaded(golden)
    release = release_for(model, dtype="float32", packed=golden.name == "k3_tiny_mxfp4")
    save_hf(tmp_path / "again", model, params, router, release=release)
    found, wanted = contents(tmp_path / "again"), contents(golden)
    assert {name: value[:2] for name, value in found.items()} == {name: value[:2] for name, value in wanted.items()}
    assert {n for n in found if found[n] != wanted[n]} <= {n for n in found if n.endswith(("_packed", "_scale"))}
    assert_same_weights(loaded(tmp_path / "again")[1:], (params, router))


@pytest.mark.parametrize("kind", ["small_k3", "small_linear"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_then_import_is_the_identity(request, numbered, kind, dtype, tmp_path):
    model = c.replace(request.getfixturevalue(kind), dtype=dtype)
    params, router = numbered(model)
    save_hf(tmp_path / "one", model, params, router)
    found, *weights = loaded(tmp_path / "one")
    assert found == c.replace(model, remat=found.remat)
    if dtype == "float32":
        assert_same_weights(weights, (params, router))
    else:
        ours, theirs = dict(names.flatten(params)), dict(names.flatten(weights[0]))
        for path, leaf in ours.items():
            exact = path[-1] in {"q_conv", "k_conv", "v_conv", "A_log", "dt_bias", "out_norm"}
            wanted = leaf if exact else leaf.astype(ml_dtypes.bfloat16).astype(np.float32)
            np.testing.assert_array_equal(theirs[path], wanted, err_msg=str(path))
    save_hf(tmp_path / "two", found, *weights)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_bfloat16_beside_float32_is_kept_tensor_by_tensor(small_linear, numbered, tmp_path):
    """A release may mix dtypes in its own way; a re-export like it keeps them all."""
    model = c.replace(small_linear, dtype="bfloat16")
    params, router = numbered(model)
    odd = {"model.layers.1.block_sparse_moe.gate.weight", "model.layers.3.self_attn.dt_bias"}
    save_hf(tmp_path / "one", model, params, router, release=release_for(model)._replace(precise=frozenset(odd)))
    assert open_checkpoint(tmp_path / "one").release.precise == odd
    save_hf(tmp_path / "two", *loaded(tmp_path / "one"), like=tmp_path / "one")
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_stored_masters_are_half_as_large_and_as_exact(small_k3, numbered, tmp_path):
    model = c.replace(small_k3, dtype="bfloat16")
    save_hf(tmp_path / "one", model, *numbered(model))
    checkpoint = open_checkpoint(tmp_path / "one")
    wide, narrow = dict(read_leaves(checkpoint)), dict(read_leaves(checkpoint, "stored"))
    for path, leaf in narrow.items():
        np.testing.assert_array_equal(leaf.astype(np.float32), wide[path])
    half = {path[-1] for path, leaf in narrow.items() if leaf.dtype == ml_dtypes.bfloat16}
    assert half >= {"embed", "head", "q", "k_up", "gate", "up", "down", "norm"}
    assert not half & {"A_log", "dt_bias", "bias", "router", "out_norm", "q_conv"}
    with pytest.raises(ValueError, match="masters = 'float16'"):
        next(read_leaves(checkpoint, "float16"))


def test_packed_experts_come_back_as_what_they_stand_for(small_k3, numbered, tmp_path):
    params, router = numbered(small_k3)
    release = release_for(small_k3, dtype="float32", packed=True)
    save_hf(tmp_path / "one", small_k3, params, router, release=release)
    model, *weights = loaded(tmp_path / "one")
    ours, theirs = dict(names.flatten(params)), dict(names.flatten(weights[0]))
    for path, leaf in ours.items():
        if path[-2:-1] == ("ffn",) and leaf.ndim == 5:
            error = np.linalg.norm(theirs[path] - leaf) / np.linalg.norm(leaf)
            assert 0.05 < error < 0.15, path
        else:
            np.testing.assert_array_equal(theirs[path], leaf)
    save_hf(tmp_path / "two", model, *weights, release=release)
    assert_same_weights(loaded(tmp_path / "two")[1:], weights)
    save_hf(tmp_path / "three", model, *weights, like=tmp_path / "one")
    assert contents(tmp_path / "three") == contents(tmp_path / "one")


def test_a_packed_release_is_unpacked_on_request(goldens, tmp_path):
    folder = goldens / "k3_tiny_mxfp4"
    model, *weights = loaded(folder)
    release = open_checkpoint(folder).release._replace(packed=frozenset())
    save_hf(tmp_path / "plain", model, *weights, like=folder, release=release)
    assert "quantization_config" not in (tmp_path / "plain" / "config.json").read_text()
    assert_same_weights(loaded(tmp_path / "plain")[1:], weights)


def edited(folder: pathlib.Path, target: pathlib.Path, change) -> pathlib.Path:
    """A copy of a folder after ``change`` of its dict of arrays, whose result is written."""
    target.mkdir()
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    safetensors.numpy.save_file(change(arrays), target / "model.safetensors")
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


def test_the_vision_tower_is_carried_over(goldens, tmp_path):
    vision = {"vision_tower.x.weight": np.arange(6, dtype=np.float16).reshape(2, 3)}
    source = edited(goldens / "k3_tiny", tmp_path / "source", lambda arrays: arrays | vision)
    save_hf(tmp_path / "again", *loaded(source), like=source)
    assert contents(tmp_path / "again") == contents(source)


@pytest.mark.parametrize("name", ["k3_tiny_mxfp4", "kimi_linear_tiny"])
def test_the_prefix_may_be_there_or_not(goldens, name, tmp_path):
    def swap(arrays):
        first, new = ("language_model.", "") if "language_model.lm_head.weight" in arrays else ("", "language_model.")
        return {new + key.removeprefix(first): array for key, array in arrays.items()}

    source = edited(goldens / name, tmp_path / "source", swap)
    assert_same_weights(loaded(source)[1:], loaded(goldens / name)[1:])
    save_hf(tmp_path / "again", *loaded(source), like=source)
    assert contents(tmp_path / "again") == contents(source)


def test_experts_may_be_packed_in_part(goldens, tmp_path):
    """Names decide, matrix by matrix, and a re-export keeps each as it was."""
    name = "language_model.model.layers.5.block_sparse_moe.experts.3.w2.weight"

    def unpack_one(arrays):
        arrays[name] = mxfp4.unpack(arrays.pop(name + "_packed"), arrays.pop(name + "_scale"))
        return arrays

    folder = goldens / "k3_tiny_mxfp4"
    source = edited(folder, tmp_path / "source", unpack_one)
    assert_same_weights(loaded(source)[1:], loaded(folder)[1:])
    save_hf(tmp_path / "again", *loaded(source), like=source)
    assert contents(tmp_path / "again") == contents(source)


def test_large_models_are_split_with_an_index(goldens, tmp_path):
    folder = goldens / "k3_tiny_mxfp4"
    save_hf(tmp_path / "split", *loaded(folder), like=folder, max_shard_bytes=300_000)
    files = sorted(path.name for path in (tmp_path / "split").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 5
    assert all((tmp_path / "split" / file).stat().st_size < 350_000 for file in files)
    index = json.loads((tmp_path / "split" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(s.size for s in open_checkpoint(folder).stored.values())
    pairs = {name.rpartition("_")[0]: file for name, file in index["weight_map"].items() if name.endswith("_packed")}
    assert all(index["weight_map"][f"{name}_scale"] == file for name, file in pairs.items())
    assert contents(tmp_path / "split") == contents(folder)


def test_matrices_land_where_the_model_reads_them(small_k3, numbered):
    """Against the released meaning: ``y = W x`` with rows in the order of heads."""
    params, router = numbered(small_k3)
    released = {tensor.name: array for tensor, array in released_tensors(small_k3, params, router)}
    layer = params["segments"][0][0]["mixer"]
    x = np.random.default_rng(1).normal(size=48).astype(np.float32)
    np.testing.assert_allclose(
        released["model.layers.0.self_attn.q_proj.weight"] @ x,
        np.einsum("d,dhk->hk", x, layer["q"][0, 0]).reshape(-1), rtol=1e-5, atol=1e-5,
    )  # fmt: skip
    o = np.random.default_rng(2).normal(size=(3, 8)).astype(np.float32)
    np.testing.assert_allclose(
        released["model.layers.0.self_attn.o_proj.weight"] @ o.reshape(-1),
        np.einsum("hv,dhv->d", o, layer["out"][0, 0]), rtol=1e-5, atol=1e-5,
    )  # fmt: skip
    conv = released["model.layers.0.self_attn.k_conv1d.weight"]
    np.testing.assert_array_equal(conv[8 * 2 + 5, 0, 3], layer["k_conv"][0, 0, 3, 2, 5])
    slot = next(t for t in names.tensors(small_k3) if t.name == "model.layers.2.self_attn.kv_b_proj.weight")
    k_up, v_up = (dict(names.flatten(params))[leaf][slot.where] for leaf in slot.leaves)
    per_head = released[slot.name].reshape(4, 6 + 7, 10)
    np.testing.assert_array_equal(per_head[:, :6], k_up.transpose(1, 2, 0))
    np.testing.assert_array_equal(per_head[:, 6:], v_up.transpose(1, 2, 0))


def test_one_tensor_at_a_time_is_in_memory(numbered, small_k3, tmp_path):
    """Both ways, the peak above the weights themselves is far below the largest of our stacked weights."""
    model = c.replace(
        small_k3, dim=64, layers=40, full_attention=c.every_fourth(40), residual=c.BlockAttnRes(12),
        moe=c.MoE(experts=24, active=2, width=64, shared=1, latent=c.Latent(64)),
    )  # fmt: skip
    params, router = numbered(model)
    sizes = [leaf.nbytes for _, leaf in names.flatten(params)]
    largest = 4 * max(np.prod(tensor.shape) for tensor in names.tensors(model))
    assert max(sizes) > 100 * largest
    allowed = 6 * largest + 2**19

    tracemalloc.start()
    save_hf(tmp_path / "one", model, params, router)
    _, peak = tracemalloc.get_traced_memory()
    bookkeeping = 2048 * len(names.tensors(model))  # names and headers
    assert peak < allowed + bookkeeping < sum(sizes) / 5

    checkpoint = open_checkpoint(tmp_path / "one")
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    leaves = dict(read_leaves(checkpoint))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak - before - sum(leaf.nbytes for leaf in leaves.values()) < allowed


def test_jax_takes_the_arrays_over(goldens):
    """On a CPU an imported array is not copied again."""
    path, leaf = next(read_leaves(open_checkpoint(goldens / "k3_tiny")))
    assert path == ("embed",)
    assert jax.device_put(leaf).unsafe_buffer_pointer() == leaf.ctypes.data


def test_a_failed_export_leaves_nothing(small_k3, numbered, tmp_path):
    params, router = numbered(small_k3)
    params["segments"][0][1]["ffn"]["up"][..., 0] = np.nan
    release = release_for(small_k3, packed=True)
    with pytest.raises(CheckpointError, match=r"experts\.0\.w3\.weight cannot be packed: a value is not finite"):
        save_hf(tmp_path / "one", small_k3, params, router, release=release)
    assert not list(tmp_path.iterdir())


def test_exports_that_are_refused(small_k3, small_linear, numbered, tmp_path, goldens):
    params, router = numbered(small_linear)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="full exists and is not an empty folder"):
        save_hf(tmp_path / "full", small_linear, params, router)
    with pytest.raises(CheckpointError, match=r"is not this model: vocab = 256 would become 40"):
        save_hf(tmp_path / "one", small_k3, *numbered(small_k3), like=goldens / "k3_tiny")
    with pytest.raises(CheckpointError, match=r"experts\.0\.w1\.weight cannot be packed: an input width of 48"):
        save_hf(tmp_path / "one", small_linear, params, router, release=release_for(small_linear, packed=True))
    with pytest.raises(CheckpointError, match="cannot express this model: residual = FullAttnRes"):
        save_hf(tmp_path / "one", c.replace(small_k3, residual=c.FullAttnRes()), *numbered(small_k3))
    params["head"] = params["head"][:, :39]
    with pytest.raises(ValueError, match=r"\('head',\) has the shape \(48, 39\), but the model has \(48, 40\)"):
        save_hf(tmp_path / "one", small_linear, params, router)
    del params["head"]
    with pytest.raises(ValueError, match=r"\('head',\) has the shape None"):
        save_hf(tmp_path / "one", small_linear, params, router)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
