"""The name map: which released tensor is which slice of which of our weights, and how its axes are turned.

A table of rules per part of the model; :func:`tensors` unrolls it over layers and experts, and :func:`match` holds the
result against the names that a checkpoint really has. Nothing here reads or allocates a tensor.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from k3jax import config as c
from k3jax.hf.errors import CheckpointError, listing
from k3jax.model import layout, weights

type Path = tuple[str | int, ...]

PREFIX = "language_model."
NOT_TEXT = ("vision_tower.", "mm_projector.")
PACKED, SCALE = "_packed", "_scale"


class Form(NamedTuple):
    """How a released tensor's axes become ours. All three work on views.

    shape: the released shape for one of ours. ours: a released array in our shape. released: the way back.
    """

    shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    ours: Callable[[np.ndarray, tuple[int, ...]], np.ndarray]
    released: Callable[[np.ndarray], np.ndarray]


# [out, in] to input first, the output axis split in ours.
MATRIX = Form(
    lambda shape: (math.prod(shape[1:]), shape[0]),
    lambda array, shape: array.T.reshape(shape),
    lambda array: array.reshape(array.shape[0], -1).T,
)
# [out, in] kept, the input axis split in ours: what multiplies heads or an inner width back to the outer one.
BACK = Form(
    lambda shape: (shape[0], math.prod(shape[1:])),
    lambda array, shape: array.reshape(shape),
    lambda array: array.reshape(array.shape[0], -1),
)
VECTOR = Form(
    lambda shape: (math.prod(shape),), lambda array, shape: array.reshape(shape), lambda array: array.reshape(-1)
)
ROW = Form(lambda shape: (1, *shape), lambda array, shape: array.reshape(shape), lambda array: array[None])
# Depthwise convolution, [channel, 1, tap].
CONV = Form(
    lambda shape: (math.prod(shape[1:]), 1, shape[0]),
    lambda array, shape: array[:, 0].T.reshape(shape),
    lambda array: array.reshape(array.shape[0], 1, -1).T,
)
# One number per head, stored in one of the shapes of `a_log_shapes`; a form of its own so that it can be recognized.
A_LOG = Form(*VECTOR)


class Rule(NamedTuple):
    """A released name below its layer, and our weights there: several are joined along their last axis.

    precise: may be stored in float32 beside bfloat16 weights. release_precise: and is, in Kimi K3.
    """

    name: str
    leaves: tuple[str, ...]
    form: Form
    precise: bool = False
    release_precise: bool = False


def _rule(name: str, leaves: str, form: Form, **flags: bool) -> Rule:
    return Rule(name, tuple(leaves.split()), form, **flags)


_EXACT = {"precise": True, "release_precise": True}

MODEL = (
    _rule("model.embed_tokens.weight", "embed", BACK),
    _rule("lm_head.weight", "head", MATRIX),
    _rule("model.norm.weight", "norm", VECTOR),
    _rule("model.output_attn_res_norm.weight", "mix/norm", VECTOR),
    _rule("model.output_attn_res_proj.weight", "mix/query", ROW),
)
LAYER = (
    _rule("input_layernorm.weight", "mixer_norm", VECTOR),
    _rule("post_attention_layernorm.weight", "ffn_norm", VECTOR),
    _rule("self_attention_res_norm.weight", "mixer_mix/norm", VECTOR),
    _rule("self_attention_res_proj.weight", "mixer_mix/query", ROW),
    _rule("mlp_res_norm.weight", "ffn_mix/norm", VECTOR),
    _rule("mlp_res_proj.weight", "ffn_mix/query", ROW),
)
MIXER = {
    "kda": (
        *(_rule(f"self_attn.{x}_proj.weight", f"mixer/{x}", MATRIX) for x in "qkv"),
        *(_rule(f"self_attn.{x}_conv1d.weight", f"mixer/{x}_conv", CONV, **_EXACT) for x in "qkv"),
        _rule("self_attn.f_a_proj.weight", "mixer/forget_in", MATRIX),
        _rule("self_attn.f_b_proj.weight", "mixer/forget_out", MATRIX),
        _rule("self_attn.b_proj.weight", "mixer/beta", MATRIX),
        _rule("self_attn.A_log", "mixer/A_log", A_LOG, **_EXACT),
        _rule("self_attn.dt_bias", "mixer/dt_bias", VECTOR, **_EXACT),
        _rule("self_attn.g_proj.weight", "mixer/gate", MATRIX),
        _rule("self_attn.g_a_proj.weight", "mixer/gate_in", MATRIX),
        _rule("self_attn.g_b_proj.weight", "mixer/gate_out", MATRIX),
        _rule("self_attn.o_norm.weight", "mixer/out_norm", VECTOR, **_EXACT),
        _rule("self_attn.o_proj.weight", "mixer/out", BACK),
    ),
    "mla": (
        _rule("self_attn.q_proj.weight", "mixer/q", MATRIX),
        _rule("self_attn.q_a_proj.weight", "mixer/q_down", MATRIX),
        _rule("self_attn.q_a_layernorm.weight", "mixer/q_norm", VECTOR),
        _rule("self_attn.q_b_proj.weight", "mixer/q_up", MATRIX),
        _rule("self_attn.kv_a_proj_with_mqa.weight", "mixer/kv_down", MATRIX),
        _rule("self_attn.kv_a_layernorm.weight", "mixer/kv_norm", VECTOR),
        _rule("self_attn.kv_b_proj.weight", "mixer/k_up mixer/v_up", MATRIX),
        _rule("self_attn.g_proj.weight", "mixer/gate", MATRIX),
        _rule("self_attn.o_proj.weight", "mixer/out", BACK),
    ),
}
FFN = {
    "dense": (
        _rule("mlp.gate_proj.weight", "ffn/gate", MATRIX),
        _rule("mlp.up_proj.weight", "ffn/up", MATRIX),
        _rule("mlp.down_proj.weight", "ffn/down", BACK),
    ),
    "moe": (
        _rule("block_sparse_moe.gate.weight", "ffn/router", MATRIX, precise=True),
        _rule("block_sparse_moe.gate.e_score_correction_bias", "ffn/bias", VECTOR, **_EXACT),
        _rule("block_sparse_moe.routed_expert_down_proj.weight", "ffn/latent_down", MATRIX),
        _rule("block_sparse_moe.routed_expert_norm.weight", "ffn/latent_norm", VECTOR),
        _rule("block_sparse_moe.routed_expert_up_proj.weight", "ffn/latent_up", BACK),
        _rule("block_sparse_moe.shared_experts.gate_proj.weight", "ffn/shared/gate", MATRIX),
        _rule("block_sparse_moe.shared_experts.up_proj.weight", "ffn/shared/up", MATRIX),
        _rule("block_sparse_moe.shared_experts.down_proj.weight", "ffn/shared/down", BACK),
        _rule("block_sparse_moe.experts.{}.w1.weight", "ffn/gate", MATRIX),
        _rule("block_sparse_moe.experts.{}.w2.weight", "ffn/down", BACK),
        _rule("block_sparse_moe.experts.{}.w3.weight", "ffn/up", MATRIX),
    ),
}


class Tensor(NamedTuple):
    """One released tensor, without prefix.

    leaves: paths of our weights. where: the leading indices of its slice of them. form: how axes are turned. shape:
    released; of ``A_log``, [H]. expert: a routed expert's matrix, which may be packed. precise, release_precise: as in
    :class:`Rule`.
    """

    name: str
    leaves: tuple[Path, ...]
    where: tuple[int, ...]
    form: Form
    shape: tuple[int, ...]
    expert: bool
    precise: bool
    release_precise: bool


def shapes(model: c.ModelConfig) -> dict[Path, tuple[int, ...]]:
    """The shape of every weight by its path, the router biases included."""
    structure = weights.structure(model).shapes
    return {path: leaf.shape for tree in structure for path, leaf in flatten(tree)}


def flatten(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of a nested dict and their paths."""
    if not isinstance(tree, dict):
        yield path, tree
        return
    for key, node in tree.items():
        yield from flatten(node, (*path, key))


@lru_cache(maxsize=2)
def tensors(model: c.ModelConfig) -> tuple[Tensor, ...]:
    """Every released tensor of a model, in the order of its layers.

    Raises:
      CheckpointError: a weight has no released name.
    """
    known = shapes(model)
    unrolled = list(_unroll(MODEL, "", (), (), known))
    for number, (kind, slot) in enumerate(zip(model.kinds, layout.slots(layout.plan(model.kinds)))):
        rules = LAYER + MIXER[kind.mixer] + FFN[kind.ffn]
        root, where = ("segments", slot.segment, slot.run), (slot.repeat, slot.index)
        unrolled += _unroll(rules, f"model.layers.{number}.", root, where, known)
    nameless = known.keys() - {leaf for tensor in unrolled for leaf in tensor.leaves}
    if nameless:
        raise CheckpointError(f"these weights have no released name: {listing(map(str, nameless))}")
    return tuple(unrolled)


def _unroll(rules: Iterable[Rule], prefix: str, root: Path, where: tuple[int, ...], known: dict) -> Iterator[Tensor]:
    """The tensors of those rules whose weights exist under ``root``."""
    for rule in rules:
        leaves = tuple((*root, *leaf.split("/")) for leaf in rule.leaves)
        if any(leaf not in known for leaf in leaves):
            continue
        parts = [known[leaf][len(where) :] for leaf in leaves]
        expert = "{}" in rule.name
        if expert:
            parts = [part[1:] for part in parts]
        shape = rule.form.shape((*parts[0][:-1], sum(part[-1] for part in parts)))
        common = (rule.form, shape, expert, rule.precise, rule.release_precise)
        if not expert:
            yield Tensor(prefix + rule.name, leaves, where, *common)
            continue
        for number in range(known[leaves[0]][len(where)]):
            yield Tensor(prefix + rule.name.format(number), leaves, (*where, number), *common)


class Match(NamedTuple):
    """How a checkpoint's names meet a model's tensors.

    prefix: before every text name. packed: names (without prefix) stored as codes and scales. not_text: full names that
    belong to the vision tower and its projector.
    """

    prefix: str
    packed: frozenset[str]
    not_text: tuple[str, ...]


def match(model: c.ModelConfig, names: Iterable[str], *, multimodal: bool) -> Match:
    """Claims every name of a checkpoint once.

    Raises:
      CheckpointError: text names with and without prefix, a tensor that is missing, or one that nothing claims.
    """
    found = set(names)
    if "moe" in {kind.ffn for kind in model.kinds} and model.moe.experts > len(found):
        raise CheckpointError(f"the checkpoint has {len(found)} tensors, fewer than its {model.moe.experts} experts")
    not_text = {name for name in found if multimodal and name.startswith(NOT_TEXT)}
    text = found - not_text
    prefix = PREFIX if any(name.startswith(PREFIX) for name in text) else ""
    expected: set[str] = set()
    packed = set()
    for tensor in tensors(model):
        name = prefix + tensor.name
        if tensor.expert and name + PACKED in text:
            packed.add(tensor.name)
            expected.update((name + PACKED, name + SCALE))
        else:
            expected.add(name)
    missing, extra = expected - text, text - expected
    if missing or extra:
        problems = [f"lacks {len(missing)} tensors: {listing(missing)}"] if missing else []
        problems += [f"has {len(extra)} tensors that the model has no place for: {listing(extra)}"] if extra else []
        raise CheckpointError("the checkpoint " + ", and ".join(problems))
    return Match(prefix, frozenset(packed), tuple(sorted(not_text)))


def a_log_shapes(model: c.ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes in which the per-head ``A_log`` is released, by name: Kimi K3's, Kimi Linear's, and the plain one."""
    heads, padded = model.kda.heads, model.kda.head_dim
    forms = {"padded": (padded,), "broadcast": (1, 1, heads, 1), "plain": (heads,)}
    return {name: shape for name, shape in forms.items() if math.prod(shape) >= heads}


def unpad_a_log(name: str, array: np.ndarray, heads: int) -> np.ndarray:
    """``A_log`` [H] from any of its released shapes.

    Raises:
      CheckpointError: the padding is not zero.
    """
    flat = array.reshape(-1)
    if flat[heads:].any():
        raise CheckpointError(f"{name}: entries {heads} to {flat.size - 1} are padding and must be zero")
    return flat[:heads]


def pad_a_log(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """``A_log`` [H] in a released shape."""
    return np.pad(array, (0, math.prod(shape) - array.size)).reshape(shape)
