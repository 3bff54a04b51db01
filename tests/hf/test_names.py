"""The name map, against the tensor index and the configuration that Kimi K3 was released with."""

import gzip
import json
import math

import pytest

from k3jax.hf import CheckpointError, config, names


@pytest.fixture(scope="module")
def released(goldens):
    """The released model's configuration, and the names of all its tensors."""
    described = config.read(json.loads((goldens / "kimi_k3_config.json").read_text()))
    with gzip.open(goldens / "kimi_k3_index.json.gz") as file:
        return described.model, json.load(file)


def test_every_text_tensor_of_the_release_is_claimed_once(released):
    model, index = released
    found = names.match(model, index["weight_map"], multimodal=True)
    tensors = names.tensors(model)
    stored = [found.prefix + t.name + end for t in tensors for end in _endings(t, found)]
    assert len(stored) == len(set(stored))
    assert set(stored) | set(found.not_text) == set(index["weight_map"])
    assert not set(stored) & set(found.not_text)
    assert len(stored) + len(found.not_text) == 497_220
    assert (found.prefix, len(found.packed), len(found.not_text)) == ("language_model.", 92 * 896 * 3, 168)
    assert all(name.startswith(("vision_tower.", "mm_projector.")) for name in found.not_text)


def test_every_weight_is_filled_once(released):
    model, _ = released
    filled: dict = {}
    for tensor in names.tensors(model):
        for leaf in tensor.leaves:
            assert tensor.where not in filled.setdefault(leaf, set())
            filled[leaf].add(tensor.where)
    for path, shape in names.shapes(model).items():
        lead = len(next(iter(filled[path])))
        assert len(filled[path]) == math.prod(shape[:lead]), path


def test_shapes_and_dtypes_add_up_to_the_bytes_of_the_release(released):
    model, index = released
    packed = names.match(model, index["weight_map"], multimodal=True).packed

    def size(tensor):
        if tensor.name in packed:
            return math.prod(tensor.shape) // 2 + math.prod(tensor.shape) // 32
        count = model.kda.head_dim if tensor.form is names.A_LOG else math.prod(tensor.shape)
        return count * (4 if tensor.release_precise else 2)

    block = 4608 * 1024 + 1024 * 1536 + 2 * 4096 * 1024 + 2 * 1024
    vision = 3 * 14 * 14 * 1024 + 64 * 64 * 1024 + 27 * block + 1024
    projector = 4096 * 4096 + 7168 * 4096 + 7168
    text = sum(size(tensor) for tensor in names.tensors(model))
    assert text + 2 * (vision + projector) == index["metadata"]["total_size"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n: n.discard("model.layers.4.self_attn.A_log"), r"lacks 1 tensors: model\.layers\.4\.self_attn\.A_log"),
        (lambda n: n.add("model.layers.6.mlp_res_norm.weight"), r"no place for: model\.layers\.6\.mlp_res_norm"),
        (lambda n: n.add("model.layers.0.self_attn.q_proj.bias"), r"no place for: .*q_proj\.bias"),
        (lambda n: n.add("vision_tower.patch_embed.proj.weight"), r"no place for: vision_tower\.patch_embed"),
        (lambda n: n.add("language_model.model.norm.weight"), r"lacks .* no place for"),
        (lambda n: n.add("model.layers.1.block_sparse_moe.experts.0.w1.weight_packed"), r"lacks .*w1\.weight_scale"),
        (lambda n: n.add("model.layers.0.mlp.up_proj.weight_packed"), r"no place for: .*up_proj\.weight_packed"),
    ],
)
def test_missing_and_unknown_names_are_refused_by_name(small_k3, change, message):
    found = {tensor.name for tensor in names.tensors(small_k3)}
    names.match(small_k3, found, multimodal=False)
    change(found)
    with pytest.raises(CheckpointError, match=message):
        names.match(small_k3, found, multimodal=False)


def test_both_forms_of_a_matrix_at_once_are_refused(small_k3):
    w1 = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    found = {tensor.name for tensor in names.tensors(small_k3)} | {w1 + "_packed", w1 + "_scale"}
    with pytest.raises(CheckpointError, match=r"no place for: .*experts\.0\.w1\.weight$"):
        names.match(small_k3, found, multimodal=False)


def test_more_experts_than_tensors_are_refused_before_they_are_listed(small_k3):
    from k3jax import config as c

    absurd = c.replace(small_k3, moe=c.replace(small_k3.moe, experts=10**12))
    with pytest.raises(CheckpointError, match="1000000000000 experts"):
        names.match(absurd, {"lm_head.weight"}, multimodal=False)


def _endings(tensor, found):
    return (names.PACKED, names.SCALE) if tensor.name in found.packed else ("",)
