"""config.json: what the released files say, what comes back, and what is refused."""

import copy
import json

import pytest

from k3jax import config as c
from k3jax.hf import CheckpointError, config


@pytest.fixture(scope="module")
def documents(goldens):
    """A released configuration of each form."""
    k3 = json.loads((goldens / "kimi_k3_config.json").read_text())
    return {"kimi_k3": k3, "kimi_linear": json.loads((goldens / "kimi_linear_tiny" / "config.json").read_text())}


def test_kimi_k3_is_read_in_full(documents):
    found = config.read(documents["kimi_k3"])
    assert found.nested
    assert found.model == c.ModelConfig(
        vocab=163840,
        dim=7168,
        layers=93,
        full_attention=c.every_fourth(93),
        kda=c.KDA(heads=96, head_dim=128, forget_rank=128, decay=c.BoundedDecay(-5.0)),
        mla=c.MLA(heads=96, q_rank=1536, kv_rank=512, nope_dim=128, shared_dim=64, v_dim=128),
        dense_width=33792,
        dense_layers=1,
        moe=c.MoE(experts=896, active=16, width=3072, shared=2, latent=c.Latent(3584)),
        residual=c.BlockAttnRes(12),
    )


def test_kimi_linear_is_read_in_full(documents):
    found = config.read(documents["kimi_linear"])
    assert not found.nested
    model = found.model
    assert model.kda == c.KDA(3, 16, 16, decay=c.SoftplusDecay(), output_gate=c.LowRankGate(16))
    assert model.mla == c.MLA(3, None, 16, 16, 8, 16, output_gate=c.NoGate())
    assert model.moe == c.MoE(experts=8, active=2, width=32, shared=1, scale=2.446)
    assert (model.residual, model.activation) == (c.PlainResidual(), c.SwiGLU())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["small_k3", "small_linear"])
def test_written_configurations_are_read_back(request, kind, nested):
    model = c.replace(request.getfixturevalue(kind), dtype="bfloat16")
    data = json.loads(json.dumps(config.write(model, dtype="bfloat16", nested=nested, packed=nested)))
    assert config.read(data) == (model, nested)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: c.replace(m, residual=c.FullAttnRes()), "residual = FullAttnRes"),
        (lambda m: c.replace(m, mla=c.replace(m.mla, position=c.RoPE())), "mla.position = RoPE"),
        (lambda m: c.replace(m, kda=c.replace(m.kda, output_gate=c.NoGate())), "kda.output_gate = NoGate"),
        (lambda m: c.replace(m, kda=c.replace(m.kda, forget_rank=7)), "kda.forget_rank = 7"),
        (lambda m: c.replace(m, mla=c.replace(m.mla, share=2)), "mla.share = 2 would become 1"),
    ],
)
def test_models_that_the_format_cannot_express_are_refused(small_k3, change, message):
    with pytest.raises(CheckpointError, match=f"cannot express.*{message}"):
        config.write(change(small_k3), dtype="float32", nested=True, packed=False)


def _set(path, value):
    """A change of one entry of a document; None removes it."""

    def change(data):
        *parents, last = path.split(".")
        for part in parents:
            data = data[part]
        data.pop(last, None)
        if value is not None:
            data[last] = value

    return change


ANY = [
    ("model_type", "llama", "model_type = 'llama'"),
    ("model_type", None, "lacks 'model_type'"),
    ("tie_word_embeddings", True, "tie_word_embeddings = True is not supported, only False"),
    ("dtype", "float16", "'float16'.* is not supported"),
    ("quantization_config", {"quant_method": "fp8"}, "quantization_config is not supported"),
    ("rope_scalings", None, None),
]
TEXT = [
    ("hidden_sise", 64, "unknown fields: hidden_sise; did you mean 'hidden_size'"),
    ("hidden_size", None, "lacks 'hidden_size'"),
    ("hidden_size", "64", "hidden_size = '64', but it must be of type int"),
    ("hidden_size", 64.5, "hidden_size = 64.5"),
    ("hidden_size", True, "hidden_size = True"),
    ("hidden_size", 0, "dim = 0"),
    ("hidden_act", "gelu", "hidden_act = 'gelu'"),
    ("num_key_value_heads", 1, "num_key_value_heads = 1"),
    ("num_expert_group", 8, "num_expert_group = 8 is not supported, only 1"),
    ("moe_renormalize", False, "moe_renormalize = False"),
    ("moe_renormalize", None, "lacks 'moe_renormalize'"),
    ("moe_router_activation_func", "softmax", "moe_router_activation_func = 'softmax'"),
    ("moe_layer_freq", 2, "moe_layer_freq = 2"),
    ("mla_use_nope", False, "mla_use_nope = False is not supported, only True: the released model has no position"),
    ("num_nextn_predict_layers", 1, "num_nextn_predict_layers = 1"),
    ("attention_bias", True, "attention_bias = True"),
    ("topk_method", "greedy", "topk_method = 'greedy'"),
    ("routed_scaling_factor", float("nan"), "routed_scaling_factor = nan, but it must be finite"),
    ("num_experts_per_token", 1000, "active = 1000"),
    ("num_hidden_layers", 7, r"must name each of the layers 1 to 7 once, but miss \[\], repeat \[\] and go beyond"),
    ("linear_attn_config.kda_layers", [1, 2], r"but miss \[3"),
    ("linear_attn_config.kda_layers", ["1"], "kda_layers = .* must list layers"),
    ("linear_attn_config.full_attn_layers", [1], r"repeat \[1\]"),
    ("linear_attn_config.num_head", 3, "linear_attn_config has unknown fields: num_head; did you mean 'num_heads'"),
    ("linear_attn_config.gate_lower_bound", 5.0, "lower_bound = 5.0"),
    ("linear_attn_config", None, "lacks 'linear_attn_config'"),
]
K3_ONLY = [
    ("activation_situ_beta", None, "lacks 'activation_situ_beta'"),
    ("latent_moe_use_norm", None, "routed_expert_hidden_size = 3584 and latent_moe_use_norm = None do not fit"),
    ("dtype", "float32", "the dtype is given as bfloat16 and as float32"),
    ("quantization_config.format", "int4", "quantization_config is not supported"),
    ("quantization_config.config_groups.group_0.weights.group_size", 16, "quantization_config is not supported"),
]
LINEAR_ONLY = [
    ("activation_situ_beta", 4.0, "activation_situ_.* hidden_act = 'silu' has no such numbers"),
    ("latent_moe_use_norm", True, "do not fit"),
    ("dtype", None, "lacks 'dtype'"),
]
CASES = [(form, path, value, message) for form in ("kimi_k3", "kimi_linear") for path, value, message in ANY]
CASES += [("kimi_linear", path, value, message) for path, value, message in TEXT + LINEAR_ONLY]
CASES += [("kimi_k3", f"text_config.{path}", value, message) for path, value, message in TEXT[:4] + K3_ONLY]
CASES += [("kimi_k3", "text_config", None, "lacks 'text_config'"), ("kimi_k3", "vision", {}, "unknown fields: vision")]


@pytest.mark.parametrize(("form", "path", "value", "message"), CASES)
def test_one_wrong_field_is_refused_by_name(documents, form, path, value, message):
    data = copy.deepcopy(documents[form])
    _set(path, value)(data)
    if message is None:  # removing what is absent changes nothing: the control
        config.read(data)
        return
    with pytest.raises(CheckpointError, match=message):
        config.read(data, "some/config.json")


def test_torch_dtype_is_the_old_name_of_dtype(documents):
    data = copy.deepcopy(documents["kimi_linear"])
    data["torch_dtype"] = data.pop("dtype")
    assert config.read(data) == config.read(documents["kimi_linear"])
