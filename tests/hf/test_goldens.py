"""The whole model against the released code: values, gradients and greedy decoding on three released-format folders.

The reference's own rounding noise is 3e-5 on logits; no router is nearer than 1e-4 to a tie.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from k3jax.hf import load_hf, open_checkpoint
from k3jax.hf.save import released_tensors
from k3jax.model import layout, weights
from k3jax.model.transformer import by_layer
from k3jax.model.weights import Weights
from k3jax.sampling import Sampling, stream

# Folders of one shape stand together: they share compiled functions, and so a worker of the tests should run them.
FAMILIES = (("k3_tiny", "k3_tiny_mxfp4"), ("kimi_linear_tiny",))
# Gradients that are zero because nothing reads the weight: the first layer has one source to mix.
DEAD = {f"model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")}
# Moved by balancing and not by a gradient.
UNTRAINED = "block_sparse_moe.gate.e_score_correction_bias"


@partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def evaluate(model, params, router, ids_BT):
    """Loss, logits, hidden states of every layer, and the gradients of the loss."""

    def loss(params):
        net = weights.bind(model, Weights(params, router))
        hidden, reports = net(model, ids_BT, capture=True)
        logits = net.logits(hidden)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids_BT[:, 1:, None], axis=-1)
        layers = by_layer(layout.plan(model.kinds), [[run.hidden for run in segment] for segment in reports])
        return -chosen.mean(), (logits, layers)

    (value, (logits, layers)), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return value, logits, jnp.stack(layers), gradients


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[0])
def test_values_and_gradients(goldens, family):
    for name in family:
        expected = np.load(goldens / name / "expected.npz")
        model, params, router = load_hf(goldens / name)
        value, logits, hidden, gradients = evaluate(model, params, router, expected["input_ids"])
        assert np.abs(logits - expected["logits"]).max() <= 2e-4
        assert abs(value - expected["loss"]) <= 1e-5
        for layer, (ours, theirs) in enumerate(zip(hidden, expected["hidden"], strict=True)):
            assert np.abs(ours - theirs).max() <= 5e-4, layer
        if (goldens / name / "grads.safetensors").exists():
            check_gradients(goldens / name, model, gradients, router)
    params["segments"][0][0]["mixer"]["A_log"] *= 1.01
    assert np.abs(evaluate(model, params, router, expected["input_ids"])[1] - logits).max() > 2e-4


def check_gradients(folder, model, gradients, router):
    theirs = safetensors.numpy.load_file(folder / "grads.safetensors")
    prefix = open_checkpoint(folder).release.prefix
    error = total = 0.0
    for tensor, ours in released_tensors(model, gradients, router):
        if tensor.name in DEAD:
            assert not ours.any()
        elif not tensor.name.endswith(UNTRAINED):
            golden = theirs.pop(prefix + tensor.name)
            assert ours.shape == golden.shape
            difference, norm = (np.linalg.norm(x.astype(np.float64)) for x in (ours - golden, golden))
            assert difference <= 1e-3 * norm, tensor.name
            error, total = error + difference**2, total + norm**2
    assert not theirs
    assert error**0.5 <= 2e-4 * total**0.5


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[0])
def test_greedy_decoding_through_the_cache(goldens, family):
    for name in family:
        expected = np.load(goldens / name / "expected.npz")
        model, params, router = load_hf(goldens / name)
        count = len(expected["greedy_ids"])
        steps = list(
            stream(model, Weights(params, router), expected["input_ids"][:1], max_new=count, sampling=Sampling(0.0))
        )
        assert [int(tokens[0]) for tokens, _ in steps] == expected["greedy_ids"].tolist()
        logits = np.stack([logits[0] for _, logits in steps])
        assert np.abs(logits - expected["greedy_logits"]).max() <= 5e-4
