"""Attention residuals against their equations, written as lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import config as c
from k3jax import nn
from k3jax.model import attnres
from k3jax.model.attnres import Stream, add, closes_block, mix, open_block, settle, source_slots, start

LAYERS, SHAPE = 3, (2, 3, 8)
EPS = 1e-5
MIX = jax.jit(mix, static_argnums=0)


def _literal_mix(sources, norm, query):
    """Architecture of the released code: stack, normalize, score, softmax over depth, weighted sum of raw sources."""
    v = jnp.stack(sources)
    keys = v / jnp.sqrt((v**2).mean(-1, keepdims=True) + EPS)
    return jnp.einsum("sbt,sbtd->btd", jax.nn.softmax(keys @ (norm * query), axis=0), v)


def _literal_plain(x, weights, block):
    for w_mixer, w_ffn, *_ in weights:
        x = x + jnp.tanh(x @ w_mixer)
        x = x + jnp.tanh(x @ w_ffn)
    return x


def _literal_block(x, weights, block):
    blocks, partial = [], x
    for layer, (w_mixer, w_ffn, site_mixer, site_ffn) in enumerate(weights):
        h = _literal_mix([*blocks, partial], *site_mixer) if blocks else partial
        if layer % block == 0:
            blocks.append(partial)
            partial = None
        out = jnp.tanh(h @ w_mixer)
        partial = out if partial is None else partial + out
        h = _literal_mix([*blocks, partial], *site_ffn)
        partial = partial + jnp.tanh(h @ w_ffn)
    return _literal_mix([*blocks, partial], *weights[0][2])


def _literal_full(x, weights, block):
    outputs = [x]
    for w_mixer, w_ffn, site_mixer, site_ffn in weights:
        outputs.append(jnp.tanh(_literal_mix(outputs, *site_mixer) @ w_mixer))
        outputs.append(jnp.tanh(_literal_mix(outputs, *site_ffn) @ w_ffn))
    return _literal_mix(outputs, *weights[0][2])


def _mix_at(stream, site):
    norm, query = site
    return mix(EPS, stream, norm * query)


def _with_stream(residual, x, weights):
    """The same stack through Stream; whether a block starts is an array in the block form, as inside a scan."""
    plain, full = isinstance(residual, c.PlainResidual), isinstance(residual, c.FullAttnRes)
    stream = start(residual, LAYERS, x)
    for layer, (w_mixer, w_ffn, site_mixer, site_ffn) in enumerate(weights):
        close = closes_block(residual, layer)
        close = close if plain or full else jnp.array(close)
        stream = open_block(stream, close)
        h = stream.running if plain else _mix_at(stream, site_mixer)
        stream = add(stream, jnp.tanh(h @ w_mixer), close=close)
        h = stream.running if plain else _mix_at(stream, site_ffn)
        stream = settle(add(stream, jnp.tanh(h @ w_ffn), close=full))
    out = stream.running if plain else _mix_at(stream, weights[0][2])
    return out, stream.count


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _random_stack():
    D = SHAPE[-1]
    rng = np.random.default_rng(0)

    def site():
        return 1 + 0.3 * rng.standard_normal(D, np.float32), 2 * rng.standard_normal(D, np.float32)

    def layer():
        return (*rng.standard_normal((2, D, D), np.float32), site(), site())

    return rng.standard_normal(SHAPE, np.float32), [layer() for _ in range(LAYERS)]


CASES = [
    (c.PlainResidual(), _literal_plain, 0),
    (c.BlockAttnRes(1), _literal_block, 3),
    (c.BlockAttnRes(2), _literal_block, 2),
    (c.BlockAttnRes(12), _literal_block, 1),
    (c.FullAttnRes(), _literal_full, 6),
]


@pytest.mark.parametrize("residual, literal, sources", CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_values_and_gradients_equal_the_literal_equations(residual, literal, sources, assert_close):
    x, weights = _random_stack()
    cotangent = _normal(*SHAPE, seed=1)

    @jax.jit
    def both(x, weights):
        def grads(f):
            return jax.value_and_grad(lambda x, w: jnp.sum(cotangent * f(x, w)), argnums=(0, 1))(x, weights)

        got = grads(lambda x, w: _with_stream(residual, x, w)[0])
        return (
            got,
            grads(lambda x, w: literal(x, w, getattr(residual, "block", None))),
            _with_stream(residual, x, weights)[1],
        )

    got, want, count = both(x, weights)
    assert_close(got, want, 1e-4)
    assert count == sources == source_slots(residual, LAYERS)


def test_a_traced_close_equals_a_static_one():
    """Bit for bit, in value and gradient."""
    running, out, *sources = jnp.asarray(_normal(4, *SHAPE))
    stream = Stream(running, jnp.stack(sources), jnp.array(1))

    def closing(close):
        def both(stream, out):
            return add(open_block(stream._replace(count=jnp.array(1)), close), out, close=close)[:2]

        return both

    for close in (False, True):
        got, want = (jax.vjp(closing(flag), stream, out) for flag in (jnp.array(close), close))
        jax.tree.map(np.testing.assert_array_equal, got[0], want[0])
        cotangent = (3 * running, jnp.stack([out, running]))
        for a, b in zip(jax.tree.leaves(got[1](cotangent)), jax.tree.leaves(want[1](cotangent))):
            np.testing.assert_array_equal(a, b)


def test_blocks_counted_in_sublayers_would_differ():
    """Negative control: the attention residuals paper counts sub-layers, K3 decoder layers."""
    x, weights = _random_stack()
    got = jax.jit(lambda x, w: _with_stream(c.BlockAttnRes(1), x, w)[0])(x, weights)
    wrong = jax.jit(lambda x, w: _literal_block(x, w, 2))(x, weights)
    assert jnp.linalg.norm(got - wrong) > 0.05 * jnp.linalg.norm(wrong)


def test_k3_has_eight_stored_blocks_and_the_numbers_of_sources_of_the_report():
    k3 = c.BlockAttnRes(12)
    assert source_slots(k3, 93) == 8
    closed = 0
    for layer in range(93):
        if layer:
            assert closed + 1 == -(-layer // 12) + 1
        closed += closes_block(k3, layer)
        assert closed + 1 == layer // 12 + 2
    assert closed + 1 == 9


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_one_source_is_the_identity(size):
    x = size * _normal(*SHAPE)
    norm, query = 10 * _normal(2, SHAPE[-1], seed=1)

    @jax.jit
    def value_and_grads(x, norm, query):
        stream = start(c.BlockAttnRes(3), LAYERS, x)
        mixed, back = jax.vjp(lambda *site: _mix_at(stream, site), norm, query)
        return mixed, back(jnp.ones_like(mixed))

    mixed, grads = value_and_grads(x, norm, query)
    np.testing.assert_array_equal(mixed, x)
    assert not np.any(grads)


def test_a_zero_query_averages_the_filled_sources():
    sources = _normal(4, *SHAPE)
    stream = Stream(np.ones(SHAPE, np.float32), sources, np.int32(2))
    got = MIX(EPS, stream, np.zeros(SHAPE[-1], np.float32))
    np.testing.assert_allclose(got, (sources[0] + sources[1] + 1) / 3, rtol=1e-6, atol=1e-6)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(got, (sources.sum(0) + 1) / 5, rtol=1e-6, atol=1e-6)


def test_slots_that_are_not_filled_never_count():
    """Neither in value nor in gradient, whatever stands in them."""
    sources = _normal(3, *SHAPE)
    query = _normal(SHAPE[-1], seed=1)

    @jax.jit
    def run(rest, count):
        def total(rest):
            stream = Stream(sources[0], jnp.stack([sources[1], rest]), count)
            mixed = mix(EPS, stream, query)
            return mixed.sum(), mixed

        (_, mixed), grad = jax.value_and_grad(total, has_aux=True)(rest)
        return mixed, grad

    mixed, grad = run(sources[2], 1)
    np.testing.assert_array_equal(mixed, run(1e4 * sources[2], 1)[0])
    assert not np.any(grad)
    assert np.any(run(sources[2], 2)[1])


def test_large_scores_pick_one_source_and_keep_gradients_finite():
    sources = _normal(2, *SHAPE)
    query = 1e4 * _normal(SHAPE[-1], seed=1)
    stream = Stream(sources[0], sources[1:], np.int32(1))
    mixed, back = jax.vjp(jax.jit(lambda q: mix(EPS, stream, q)), query)
    assert np.all(np.minimum(abs(mixed - sources[0]), abs(mixed - sources[1])) < 1e-5)
    assert np.isfinite(back(mixed)[0]).all()


def test_bfloat16_stream_mixes_in_float32_in_both_directions():
    """The result and the gradients are one rounding away from float32 arithmetic on the same numbers."""
    running, *sources = _normal(6, *SHAPE).astype(jnp.bfloat16)
    u, cotangent = _normal(SHAPE[-1], seed=1), _normal(*SHAPE, seed=2).astype(jnp.bfloat16)

    @jax.jit
    def value_and_grads(running, sources, u, cotangent):
        mixed, back = jax.vjp(lambda r, s, u: mix(EPS, Stream(r, s, jnp.int32(5)), u), running, sources, u)
        return mixed, *back(cotangent)

    got = value_and_grads(running, np.stack(sources), u, cotangent)
    want = value_and_grads(*(x.astype(np.float32) for x in (running, np.stack(sources), u, cotangent)))
    assert [x.dtype for x in got] == [jnp.bfloat16] * 3 + [jnp.float32]
    for a, b in zip(got, want):
        np.testing.assert_allclose(a.astype(np.float32), b, rtol=2**-8, atol=1e-6)
    literal = jax.jit(_literal_mix)([x.astype(np.float32) for x in (*sources, running)], np.ones_like(u), u)
    np.testing.assert_allclose(want[0], literal, rtol=1e-5, atol=1e-6)
    assert "HIGHEST" in str(jax.make_jaxpr(value_and_grads)(running, np.stack(sources), u, cotangent))


def test_queries_start_at_zero_and_gains_at_one(tiny):
    site = nn.initialize(lambda: attnres.DepthMix(tiny), 0)
    assert not jnp.any(site.query[...]) and jnp.all(site.norm[...] == 1)
