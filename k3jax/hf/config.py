"""The released ``config.json``, and the :class:`~k3jax.config.ModelConfig` it stands for.

Two forms exist: Kimi Linear's flat one (``model_type`` "kimi_linear") and Kimi K3's, which has it under ``text_config``
beside the vision tower. Every key must be known: a field that this model has no place for is refused unless it has the
one value under which it changes nothing, and a misspelt one cannot pass for an absent one.
"""

from typing import Any, NamedTuple

from k3jax import config as c
from k3jax import config_io
from k3jax.hf.errors import CheckpointError
from k3jax.hf.fields import REQUIRED, Fields

# Keys without a meaning for the text backbone: token ids, generation defaults, book-keeping of the file's tools, and
# position settings of a model that has no position encoding.
IGNORED = frozenset(
    """
    _attn_implementation _name_or_path add_cross_attention architectures auto_map bad_words_ids begin_suppress_tokens
    bos_token_id chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id head_dim id2label ignore_index image_placeholder is_decoder
    is_encoder_decoder label2id length_penalty max_length max_position_embeddings media_placeholder_token_id min_length
    model_max_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_scores pad_token_id prefix problem_type pruned_heads remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate rope_scaling rope_theta sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript
    transformers_version typical_p unk_token_id use_bfloat16 use_cache use_grouped_topk
""".split()
)

# Fields with the only value that this model can stand for, and why.
FIXED = {
    "tie_word_embeddings": (False, "embedding and head are separate weights"),
    "moe_layer_freq": (1, "every layer after the dense ones is a mixture of experts"),
    "num_expert_group": (1, "experts are not grouped"),
    "topk_group": (1, "experts are not grouped"),
    "topk_method": ("noaux_tc", "experts are chosen by biased scores"),
    "num_nextn_predict_layers": (0, "there is no multi-token prediction layer"),
    "attention_bias": (False, "projections have no bias"),
    "attention_dropout": (0, "there is no dropout"),
    "hidden_dropout": (0, "there is no dropout"),
}
FIXED_REQUIRED = {
    "mla_use_nope": (True, "the released model has no position encoding"),
    "moe_router_activation_func": ("sigmoid", "router scores are sigmoids"),
    "moe_renormalize": (True, "router weights are normalized over the chosen experts"),
}

PACKED_WEIGHTS = {
    "num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False,
    "scale_dtype": "torch.uint8",
}  # fmt: skip
PACKED_FORMAT = "mxfp4-pack-quantized"
UNPACKED_MODULES = ["self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj", "lm_head"]


class Described(NamedTuple):
    """What a ``config.json`` says: the model (with ``dtype`` as stored), and whether it is the multimodal form."""

    model: c.ModelConfig
    nested: bool


def read(data: dict[str, Any], where: str = "config.json") -> Described:
    """The model that a parsed ``config.json`` describes.

    Raises:
      CheckpointError: a field is missing, misspelt, ill-typed, inconsistent with another, or asks for something this
        model does not have; the message names it, its value, and what would be valid.
    """
    top = Fields(where, data)
    model_type = top.take("model_type", str)
    if model_type == "kimi_linear":
        return Described(_read_text(top, None), nested=False)
    if model_type != "kimi_k3":
        raise CheckpointError(f"{where}: model_type = {model_type!r}, but only 'kimi_k3' and 'kimi_linear' are known")
    text = Fields(f"{where}: text_config", top.take("text_config", dict))
    text.fixed("model_type", "kimi_linear", "it is the text model of kimi_k3", required=True)
    dtype = _dtype(top, None)
    top.fixed("tie_word_embeddings", *FIXED["tie_word_embeddings"], required=False)
    _check_quantization(top)
    top.take("vision_config", dict, None)
    top.finish(IGNORED)
    return Described(_read_text(text, dtype), nested=True)


def _read_text(f: Fields, outer_dtype: str | None) -> c.ModelConfig:
    for name, (value, reason) in FIXED.items():
        f.fixed(name, value, reason, required=False)
    for name, (value, reason) in FIXED_REQUIRED.items():
        f.fixed(name, value, reason, required=True)
    _check_quantization(f)
    dtype = _dtype(f, outer_dtype)
    if dtype is None:
        raise CheckpointError(f"{f.where} lacks 'dtype'; it must be 'float32' or 'bfloat16'")
    heads = f.take("num_attention_heads", int)
    f.fixed("num_key_value_heads", heads, "it must equal num_attention_heads", required=False)
    layers, block = f.take("num_hidden_layers", int), f.take("attn_res_block_size", int, None)
    try:
        kda, full_attention = _read_kda(f, layers)
        model = c.ModelConfig(
            vocab=f.take("vocab_size", int),
            dim=f.take("hidden_size", int),
            layers=layers,
            full_attention=full_attention,
            kda=kda,
            mla=_read_mla(f, heads),
            dense_width=f.take("intermediate_size", int),
            dense_layers=f.take("first_k_dense_replace", int),
            moe=_read_moe(f),
            residual=c.PlainResidual() if block is None else c.BlockAttnRes(block),
            activation=_read_activation(f),
            eps=f.take("rms_norm_eps", float),
            init_std=f.take("initializer_range", float, 0.02),
            dtype=dtype,
        )
    except c.ConfigError as error:
        raise CheckpointError(f"{f.where}: {error}") from error
    f.finish(IGNORED)
    return model


def _read_kda(f: Fields, layers: int) -> tuple[c.KDA, tuple[int, ...]]:
    """The KDA layer, and which layers are MLA."""
    k = Fields(f"{f.where}: linear_attn_config", f.take("linear_attn_config", dict))
    head_dim, bound = k.take("head_dim", int), k.take("gate_lower_bound", float, None)
    full_rank = k.take("use_full_rank_gate", bool, False)
    full_attention, kda_layers = k.layers("full_attn_layers"), k.layers("kda_layers")
    if sorted(full_attention + kda_layers) != list(range(1, layers + 1)):
        wanted, found = set(range(1, layers + 1)), full_attention + kda_layers
        missing, repeated = sorted(wanted - set(found)), sorted({n for n in found if found.count(n) > 1})
        raise CheckpointError(
            f"{k.where}: full_attn_layers and kda_layers must name each of the layers 1 to {layers} once, but miss "
            f"{missing}, repeat {repeated} and go beyond with {sorted(set(found) - wanted)}"
        )
    kda = c.KDA(
        heads=k.take("num_heads", int),
        head_dim=head_dim,
        forget_rank=head_dim,
        conv=k.take("short_conv_kernel_size", int),
        decay=c.SoftplusDecay() if bound is None else c.BoundedDecay(bound),
        output_gate=c.FullRankGate() if full_rank else c.LowRankGate(head_dim),
    )
    k.finish()
    return kda, tuple(sorted(full_attention))


def _read_mla(f: Fields, heads: int) -> c.MLA:
    return c.MLA(
        heads=heads,
        q_rank=f.take("q_lora_rank", int, None),
        kv_rank=f.take("kv_lora_rank", int),
        nope_dim=f.take("qk_nope_head_dim", int),
        shared_dim=f.take("qk_rope_head_dim", int),
        v_dim=f.take("v_head_dim", int),
        output_gate=c.FullRankGate() if f.take("mla_use_output_gate", bool, False) else c.NoGate(),
    )


def _read_moe(f: Fields) -> c.MoE:
    width, norm = f.take("routed_expert_hidden_size", int, None), f.take("latent_moe_use_norm", bool, None)
    if (norm is None) if width is not None else bool(norm):
        pair = f"routed_expert_hidden_size = {width!r} and latent_moe_use_norm = {norm!r}"
        raise CheckpointError(f"{f.where}: {pair} do not fit: a latent needs both, and a norm needs a latent")
    return c.MoE(
        experts=f.take("num_experts", int),
        active=f.take("num_experts_per_token", int),
        width=f.take("moe_intermediate_size", int),
        shared=f.take("num_shared_experts", int),
        latent=None if width is None else c.Latent(width, norm),
        scale=f.take("routed_scaling_factor", float),
    )


def _read_activation(f: Fields) -> c.SiTU | c.SwiGLU:
    name = f.take("hidden_act", str)
    if name not in ("situ", "silu"):
        raise CheckpointError(f"{f.where}: hidden_act = {name!r}, but only 'situ' and 'silu' are known")
    default = REQUIRED if name == "situ" else None
    betas = [f.take(key, float, default) for key in ("activation_situ_beta", "activation_situ_linear_beta")]
    if name == "silu" and betas != [None, None]:
        raise CheckpointError(f"{f.where}: activation_situ_* = {betas}, but hidden_act = 'silu' has no such numbers")
    return c.SiTU(*betas) if name == "situ" else c.SwiGLU()


def _dtype(f: Fields, outer: str | None) -> str | None:
    """The dtype of the weights, under its new name or its old one."""
    names = {name: f.take(name, str, None) for name in ("dtype", "torch_dtype")}
    found = {name: value for name, value in names.items() if value is not None}
    wrong = {name: value for name, value in found.items() if value not in ("float32", "bfloat16")}
    if wrong:
        raise CheckpointError(f"{f.where}: {wrong} is not supported, only 'float32' and 'bfloat16'")
    values = set(found.values()) | ({outer} if outer else set())
    if len(values) > 1:
        raise CheckpointError(f"{f.where}: the dtype is given as {' and as '.join(sorted(values))}")
    return values.pop() if values else None


def _check_quantization(f: Fields) -> None:
    """Whether weights are packed is seen from their names; a quantization of another kind is refused here."""
    data = f.take("quantization_config", dict, None)
    if data is None:
        return
    groups = data.get("config_groups")
    weights = [g.get("weights") for g in groups.values()] if isinstance(groups, dict) else []
    kept = [{key: w.get(key) for key in PACKED_WEIGHTS} for w in weights if isinstance(w, dict)]
    if data.get("format") != PACKED_FORMAT or kept != [PACKED_WEIGHTS]:
        raise CheckpointError(
            f"{f.where}: quantization_config is not supported: only the format {PACKED_FORMAT!r} with one group of "
            f"weights {PACKED_WEIGHTS}"
        )


def write(model: c.ModelConfig, *, dtype: str, nested: bool, packed: bool) -> dict[str, Any]:
    """The ``config.json`` of a model whose weights are stored in ``dtype``, experts ``packed`` or not.

    Raises:
      CheckpointError: the released format cannot express a field of ``model``; the message names it.
    """
    text = {**_text_fields(model), "dtype": dtype, **({"quantization_config": _quantization()} if packed else {})}
    data = text
    if nested:
        data = {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "model_type": "kimi_k3",
            "text_config": text,
            "dtype": dtype,
            "tie_word_embeddings": False,
        }
    became = matching(read(data).model, model)
    if became != model:
        raise CheckpointError(f"the released format cannot express this model: {differences(model, became)}")
    return data


def differences(old: c.ModelConfig, new: c.ModelConfig) -> str:
    """The fields in which two configurations differ, in words."""
    return "; ".join(f"{path} = {a!r} would become {b!r}" for path, (a, b) in config_io.diff(old, new).items())


def matching(described: c.ModelConfig, model: c.ModelConfig) -> c.ModelConfig:
    """``described`` with what only training knows (balancer, compute dtype, rematerialization) taken from ``model``."""
    moe = c.replace(described.moe, balancer=model.moe.balancer)
    return c.replace(described, moe=moe, dtype=model.dtype, remat=model.remat)


def _text_fields(model: c.ModelConfig) -> dict[str, Any]:
    kda, mla, moe = model.kda, model.mla, model.moe
    fields = {name: value for name, (value, _) in (FIXED | FIXED_REQUIRED).items()}
    for name in ("attention_bias", "attention_dropout", "hidden_dropout"):
        del fields[name]
    linear = {
        "num_heads": kda.heads,
        "head_dim": kda.head_dim,
        "short_conv_kernel_size": kda.conv,
        "use_full_rank_gate": isinstance(kda.output_gate, c.FullRankGate),
        "full_attn_layers": list(model.full_attention),
        "kda_layers": [n for n in range(1, model.layers + 1) if n not in model.full_attention],
    }
    if isinstance(kda.decay, c.BoundedDecay):
        linear["gate_lower_bound"] = kda.decay.lower_bound
    fields |= {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": model.vocab,
        "hidden_size": model.dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": mla.heads,
        "num_key_value_heads": mla.heads,
        "intermediate_size": model.dense_width,
        "first_k_dense_replace": model.dense_layers,
        "rms_norm_eps": model.eps,
        "initializer_range": model.init_std,
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.shared_dim,
        "v_head_dim": mla.v_dim,
        "mla_use_output_gate": isinstance(mla.output_gate, c.FullRankGate),
        "num_experts": moe.experts,
        "num_experts_per_token": moe.active,
        "num_shared_experts": moe.shared,
        "moe_intermediate_size": moe.width,
        "routed_scaling_factor": moe.scale,
        "use_grouped_topk": True,
        "latent_moe_use_norm": bool(moe.latent and moe.latent.norm),
        "hidden_act": "situ" if isinstance(model.activation, c.SiTU) else "silu",
        "linear_attn_config": linear,
    }
    if isinstance(model.activation, c.SiTU):
        fields["activation_situ_beta"] = model.activation.beta
        fields["activation_situ_linear_beta"] = model.activation.linear_beta
    if moe.latent:
        fields["routed_expert_hidden_size"] = moe.latent.dim
    if isinstance(model.residual, c.BlockAttnRes):
        fields["attn_res_block_size"] = model.residual.block
    return fields


def _quantization() -> dict[str, Any]:
    group = {
        "format": PACKED_FORMAT, "targets": ["Linear"], "input_activations": None, "output_activations": None,
        "weights": PACKED_WEIGHTS,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": PACKED_FORMAT,
        "config_groups": {"group_0": group},
        "ignore": [f"re:.*{module}.*" for module in UNPACKED_MODULES],
    }
