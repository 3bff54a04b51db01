"""The parts of a KDA layer around the recurrence, and the layer's two ways to run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import config as c
from k3jax import nn
from k3jax.model.kda import KDALayer, init_cache, last_inputs, short_conv
from pallas_kernels.kda import kda

B, T = 2, 11
SEGMENTS = np.array([[0] * 4 + [2] * 5 + [-1] * 2, [0] * 1 + [1] * 10], np.int32)
CONV = jax.jit(short_conv)
VARIANTS = {
    "k3": {},
    "kimi linear": dict(decay=c.SoftplusDecay(), output_gate=c.LowRankGate(3)),
    "no gate, no conv": dict(output_gate=c.NoGate(), conv=1),
}


@pytest.fixture(scope="module", params=VARIANTS)
def layer(request, tiny, build):
    """(model, weights, run, extend), both jitted."""
    model = c.replace(tiny, kda=c.replace(tiny.kda, **VARIANTS[request.param]))
    weights, bind = build(lambda: KDALayer(model))
    run = jax.jit(lambda weights, x, segments: bind(weights)(model, x, segments))
    extend = jax.jit(lambda weights, x, cache, lengths: bind(weights).extend(model, x, cache, lengths))
    return model, weights, run, extend


@pytest.fixture(scope="module")
def x_BTD(tiny):
    return np.random.default_rng(0).standard_normal((B, T, tiny.dim), np.float32)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _literal_conv(x, weight, segments, history):
    """Tap by tap: the last one multiplies the current token; other documents and what lies before count zero."""
    taps = weight.shape[0]
    before = np.concatenate([history, x], axis=1).astype(np.float64)
    y = np.zeros(x.shape)
    for b, t, j in np.ndindex(*x.shape[:2], taps):
        source = t - (taps - 1) + j
        document = segments[b, source] if source >= 0 else segments[b, 0]
        if document == segments[b, t]:
            y[b, t] += weight[j] * before[b, source + taps - 1]
    return y * _sigmoid(y)


@pytest.mark.parametrize("taps, time", [(4, T), (4, 1), (4, 3), (2, T), (1, 5)])
@pytest.mark.parametrize("with_history", [True, False])
def test_short_conv_equals_a_loop(taps, time, with_history):
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((B, time, 2, 3), np.float32), rng.standard_normal((taps, 2, 3), np.float32)
    history = rng.standard_normal((B, taps - 1, 2, 3), np.float32) * with_history
    segments = SEGMENTS[:, :time]
    got = CONV(x, weight, segments, history if with_history else None)
    want = _literal_conv(x, weight, segments, history)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    if taps == 4 and time == T:
        forgotten = CONV(x, weight, None, history)
        assert np.linalg.norm((forgotten - want)[0, 4:7]) > 0.1 * np.linalg.norm(want[0, 4:7])


def test_short_conv_is_float32_inside_whatever_the_input():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((B, T, 2, 3), np.float32).astype(jnp.bfloat16)
    weight = rng.standard_normal((4, 2, 3), np.float32)
    got = short_conv(x, weight, None)
    want = _literal_conv(x.astype(np.float32), weight, np.zeros((B, T)), np.zeros((B, 3, 2, 3)))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("lengths", [[0, 5], [1, 2], [3, 4]], ids=str)
def test_last_inputs_are_the_last_real_ones(lengths):
    rng = np.random.default_rng(0)
    x, history = rng.standard_normal((B, 5, 2, 3), np.float32), rng.standard_normal((B, 3, 2, 3), np.float32)
    got = last_inputs(x, history, np.array(lengths))
    for b, length in enumerate(lengths):
        np.testing.assert_array_equal(got[b], np.concatenate([history[b], x[b, :length]])[-3:])


def test_initial_decay_is_that_of_mamba_2(tiny):
    """A step size log-uniform in [1e-3, 1e-1]: with A = 1, K3's first log-decays are -5 (1 - exp(-step))."""
    model = c.replace(tiny, kda=c.replace(tiny.kda, heads=16, head_dim=64))
    module = nn.initialize(lambda: KDALayer(model), 0)
    step = np.logaddexp(0, np.asarray(module.dt_bias[...], np.float64))
    assert 0.99e-3 < step.min() < 1.2e-3 and 0.08 < step.max() < 0.101
    assert abs(np.log(step).mean() - np.log(1e-2)) < 0.1
    decay = -5 * _sigmoid(np.asarray(module.dt_bias[...], np.float64))
    np.testing.assert_allclose(decay, -5 * (1 - np.exp(-step)), rtol=1e-6)
    assert not np.any(module.A_log[...])


def test_layer_is_projections_conv_recurrence_and_gated_norm(layer, x_BTD):
    model, weights, run, _ = layer
    spec, w = model.kda, {name: np.asarray(value, np.float64) for name, value in weights.items()}
    history = np.zeros((B, spec.conv - 1, spec.heads, spec.head_dim))
    q, k, v = (
        _literal_conv(np.einsum("btd,dhk->bthk", x_BTD, w[name]), w[f"{name}_conv"], SEGMENTS, history)
        for name in "qkv"
    )
    forget = np.einsum("btd,dr,rhk->bthk", x_BTD, w["forget_in"], w["forget_out"])
    bound = -5.0 if isinstance(spec.decay, c.BoundedDecay) else None
    recurrence = jax.jit(lambda *x, **gates: kda(*x, **gates, lower_bound=bound, segment_ids=SEGMENTS)[0])
    inputs = (x.astype(np.float32) for x in (q, k, v, forget, np.einsum("btd,dh->bth", x_BTD, w["beta"])))
    o = np.asarray(recurrence(*inputs, A_log=weights["A_log"], dt_bias=weights["dt_bias"]), np.float64)
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + model.eps) * w["out_norm"]
    match spec.output_gate:
        case c.FullRankGate():
            o *= _sigmoid(np.einsum("btd,dhv->bthv", x_BTD, w["gate"]))
        case c.LowRankGate():
            o *= _sigmoid(np.einsum("btd,dr,rhv->bthv", x_BTD, w["gate_in"], w["gate_out"]))
    want = np.einsum("bthv,dhv->btd", o, w["out"])
    real = SEGMENTS >= 0
    np.testing.assert_allclose(np.asarray(run(weights, x_BTD, SEGMENTS))[real], want[real], rtol=1e-3, atol=1e-4)


def test_packed_documents_equal_separate_documents(layer, x_BTD):
    """With the negative control that a run which omits the documents fails."""
    _, weights, run, _ = layer
    packed, forgotten = run(weights, x_BTD, SEGMENTS), run(weights, x_BTD, np.zeros_like(SEGMENTS))
    for b, start, stop in [(0, 0, 4), (0, 4, 9), (1, 0, 1), (1, 1, 11)]:
        alone = np.zeros_like(x_BTD)
        alone[0, : stop - start] = x_BTD[b, start:stop]
        separate = run(weights, alone, np.zeros_like(SEGMENTS))[0, : stop - start]
        np.testing.assert_allclose(packed[b, start:stop], separate, rtol=1e-3, atol=1e-5)
        if start:
            assert np.linalg.norm(forgotten[b, start:stop] - separate) > 0.02 * np.linalg.norm(separate)


@pytest.mark.parametrize("pieces", [[1] * 11, [5, 1, 5]], ids=str)
def test_continuing_in_pieces_equals_one_pass(layer, x_BTD, pieces):
    """Every piece is padded on the right with large numbers, by another amount in every row."""
    model, weights, run, extend = layer
    whole = run(weights, x_BTD, np.zeros_like(SEGMENTS))
    cache, outs = init_cache(model, B), []
    start = np.zeros(B, int)
    for size in pieces:
        lengths = np.array([size, max(size - 1, 0)])
        piece = np.full((B, size, model.dim), 30.0, np.float32)
        for b in range(B):
            piece[b, : lengths[b]] = x_BTD[b, start[b] : start[b] + lengths[b]]
        out, cache = extend(weights, piece, cache, lengths)
        outs.append([out[b, : lengths[b]] for b in range(B)])
        start += lengths
    for b in range(B):
        joined = np.concatenate([out[b] for out in outs])
        np.testing.assert_allclose(joined, whole[b, : start[b]], rtol=1e-3, atol=1e-5)
    assert cache.state.dtype == jnp.float32 and jax.tree.map(jnp.shape, cache) == jax.tree.map(
        jnp.shape, init_cache(model, B)
    )


def test_causal_by_gradients(tiny, build, x_BTD):
    """d out[t] / d x[s] is rounding noise exactly where s comes later or from another document, and nowhere else."""
    weights, bind = build(lambda: KDALayer(tiny))
    direction = np.random.default_rng(2).standard_normal(tiny.dim).astype(np.float32)

    @jax.jit
    def reach(x):
        return jax.jacrev(lambda x: jnp.einsum("btd,d->bt", bind(weights)(tiny, x, SEGMENTS), direction))(x)

    touched = np.abs(reach(x_BTD)).max(-1)
    touched = np.where(touched > 1e-6 * touched.max(), touched, 0)
    for b in range(B):
        assert not np.any(touched[b, :, 1 - b])
        same, real = SEGMENTS[b][:, None] == SEGMENTS[b][None], SEGMENTS[b] >= 0
        np.testing.assert_array_equal((touched[b, :, b] > 0)[real], np.tril(same)[real])


def test_bfloat16_is_close_to_float32_and_keeps_the_state_in_float32(tiny, build, x_BTD):
    weights, bind = build(lambda: KDALayer(tiny))
    narrow = c.replace(tiny, dtype="bfloat16")
    x16 = x_BTD.astype(jnp.bfloat16)
    want = jax.jit(lambda x: bind(weights)(tiny, x, SEGMENTS))(x16.astype(np.float32))
    got = jax.jit(lambda x: bind(weights)(narrow, x, SEGMENTS))(x16)
    assert got.dtype == jnp.bfloat16
    real = SEGMENTS >= 0
    assert np.linalg.norm((got - want)[real]) < 0.03 * np.linalg.norm(want[real])
    _, cache = jax.jit(lambda x, cache: bind(weights).extend(narrow, x, cache, np.array([1, 1])))(
        x16[:, :1], init_cache(narrow, B)
    )
    assert cache.state.dtype == jnp.float32 and {x.dtype for x in cache.conv} == {jnp.dtype(jnp.bfloat16)}
