"""The largest product of the gated activations against one computed by hand."""

import jax
import numpy as np
import pytest

from k3jax import config as c
from k3jax import diagnose, nn, presets
from k3jax.data import Batch
from k3jax.model import embedding, layout, weights
from k3jax.model.transformer import by_layer

LENGTH, PADDING = 16, 12


@pytest.fixture(scope="module")
def model(micro_model):
    """A dense layer under KDA, and one of experts under MLA."""
    return c.replace(micro_model, layers=2, full_attention=(2,), dense_layers=1, residual=c.PlainResidual())


@pytest.fixture(scope="module")
def batch():
    tokens = np.random.default_rng(0).integers(0, 258, (2, LENGTH)).astype(np.int32)
    segments = np.zeros((2, LENGTH), np.int32)
    segments[1, LENGTH - PADDING :] = -1
    return Batch(tokens, tokens, segments, np.ones((2, LENGTH), np.float32))


def read_by_feed_forward(model, made, batch):
    """What the feed-forward part of each layer reads, [N, D] each."""

    def run(made):
        net = weights.bind(model, made)
        x, found = embedding.lookup(net.embed[...], batch.tokens_BT, model.dtype), []
        for layer in by_layer(layout.plan(model.kinds), [list(segment) for segment in net.segments]):
            y = layer.mixer(model, nn.rms_norm(x, layer.mixer_norm[...], model.eps), batch.segments_BT)
            x += y[0] if isinstance(y, tuple) else y
            found.append(nn.rms_norm(x, layer.ffn_norm[...], model.eps))
            if len(found) < model.layers:
                x += layer.ffn(model, found[-1])
        return found

    return [np.asarray(x).reshape(-1, model.dim) for x in jax.jit(run)(made)]


def situ(x, gate, up, activation):
    g, u, b1, b2 = x @ gate, x @ up, activation.beta, activation.linear_beta
    return b1 * np.tanh(g / b1) / (1 + np.exp(-g)) * b2 * np.tanh(u / b2)


def test_the_largest_product_of_dense_shared_and_routed_parts(model, batch):
    """An expert that no token goes to has gates a thousand times as large, and tokens of padding count nowhere."""
    made = weights.init(model, 0)
    slots = list(layout.slots(layout.plan(model.kinds)))
    experts, router = (tree["segments"][slots[1].segment][slots[1].run]["ffn"] for tree in made)
    experts["gate"] = experts["gate"].at[..., 3, :, :].multiply(1000.0)
    router["bias"] = router["bias"].at[..., 3].set(-10.0)
    dense, moe = read_by_feed_forward(model, made, batch)
    counted = batch.segments_BT.reshape(-1) >= 0

    def of(number, name):
        slot = slots[number]
        tree = made.params["segments"][slot.segment][slot.run]["ffn"]
        for key in name.split("."):
            tree = tree[key]
        return np.asarray(tree[slot.repeat, slot.index], np.float64)

    first = np.abs(situ(dense, of(0, "gate"), of(0, "up"), model.activation))
    scores = 1 / (1 + np.exp(-(moe @ of(1, "router")))) + np.array([0, 0, 0, -10.0])
    z, routed, unchosen = moe @ of(1, "latent_down"), 0.0, 0.0
    for n in range(len(moe)):
        order = np.argsort(-scores[n])
        for place, e in enumerate(order):
            largest = np.abs(situ(z[n], of(1, "gate")[e], of(1, "up")[e], model.activation)).max()
            if counted[n] and place < model.moe.active:
                routed = max(routed, largest)
            unchosen = max(unchosen, largest)
    shared = np.abs(situ(moe, of(1, "shared.gate"), of(1, "shared.up"), model.activation))[counted].max()
    expected = [first[counted].max(), max(routed, shared)]
    config = c.replace(presets.tiny(), model=model)
    np.testing.assert_allclose(diagnose.activation_maxima(config, made, batch), expected, rtol=1e-4)
    assert unchosen > 2 * expected[1]


def test_layers_that_are_gone_through_twice_count_both_times(model, batch):
    """Another time can only add a larger product."""
    dense = c.replace(model, layers=1, full_attention=(), dense_layers=1)
    made = weights.init(dense, 0)
    config = c.replace(presets.tiny(), model=dense)
    once = diagnose.activation_maxima(config, made, batch)
    twice = diagnose.activation_maxima(c.replace(config, model=c.replace(dense, loops=2)), made, batch)
    assert len(once) == len(twice) == 1 and twice[0] >= once[0]
