"""Attention residuals against their equations, written as lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import config as c
from k3jax.model import attnres
from k3jax.model.attnres import Stream, add, closes_block, mix, source_slots, start

LAYERS, SHAPE = 3, (2, 3, 8)
EPS = 1e-5


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


def _with_stream(residual, x, weights):
    """The same stack through Stream; whether a block starts is an array in the block form, as inside a scan."""
    plain, full = isinstance(residual, c.PlainResidual), isinstance(residual, c.FullAttnRes)
    stream = start(residual, LAYERS, x)
    for layer, (w_mixer, w_ffn, site_mixer, site_ffn) in enumerate(weights):
        h = stream.running if plain else mix(stream, *site_mixer, EPS)
        close = closes_block(residual, layer)
        stream = add(stream, jnp.tanh(h @ w_mixer), close=close if plain or full else jnp.array(close))
        h = stream.running if plain else mix(stream, *site_ffn, EPS)
        stream = add(stream, jnp.tanh(h @ w_ffn), close=full)
    out = stream.running if plain else mix(stream, *weights[0][2], EPS)
    return out, stream.count


def _random_stack(key):
    def site(key):
        norm, query = jax.random.normal(key, (2, SHAPE[-1]))
        return 1 + 0.3 * norm, 2 * query

    def layer(key):
        k = jax.random.split(key, 4)
        matrices = jax.random.normal(key, (2, SHAPE[-1], SHAPE[-1]))
        return (*matrices, site(k[2]), site(k[3]))

    key_x, *keys = jax.random.split(key, LAYERS + 1)
    return jax.random.normal(key_x, SHAPE), [layer(k) for k in keys]


CASES = [
    (c.PlainResidual(), _literal_plain, 0),
    (c.BlockAttnRes(1), _literal_block, 3),
    (c.BlockAttnRes(2), _literal_block, 2),
    (c.BlockAttnRes(12), _literal_block, 1),
    (c.FullAttnRes(), _literal_full, 6),
]


@pytest.mark.parametrize("residual, literal, sources", CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_values_and_gradients_equal_the_literal_equations(residual, literal, sources, key, assert_close):
    x, weights = _random_stack(key)
    cotangent = jax.random.normal(jax.random.key(1), SHAPE)

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


def test_a_traced_close_equals_a_static_one(key):
    """Bit for bit, in value and gradient."""
    running, out, *sources = jax.random.normal(key, (4, *SHAPE))
    stream = Stream(running, jnp.stack(sources), jnp.array(1))
    for close in (False, True):
        got, want = (
            jax.vjp(lambda s, o, flag=flag: add(s._replace(count=stream.count), o, close=flag)[:2], stream, out)
            for flag in (jnp.array(close), close)
        )
        jax.tree.map(np.testing.assert_array_equal, got[0], want[0])
        cotangent = (3 * running, jnp.stack([out, running]))
        for a, b in zip(jax.tree.leaves(got[1](cotangent)), jax.tree.leaves(want[1](cotangent))):
            np.testing.assert_array_equal(a, b)


def test_blocks_counted_in_sublayers_would_differ(key):
    """Negative control: the attention residuals paper counts sub-layers, K3 decoder layers."""
    x, weights = _random_stack(key)
    got = _with_stream(c.BlockAttnRes(1), x, weights)[0]
    wrong = _literal_block(x, weights, 2)
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
def test_one_source_is_the_identity(size, key):
    x = size * jax.random.normal(key, SHAPE)
    norm, query = 10 * jax.random.normal(key, (2, SHAPE[-1]))
    stream = start(c.BlockAttnRes(3), LAYERS, x)
    np.testing.assert_array_equal(mix(stream, norm, query, EPS), x)
    grads = jax.grad(lambda n, q: mix(stream, n, q, EPS).sum(), argnums=(0, 1))(norm, query)
    assert not jnp.any(jnp.stack(grads))


def test_a_zero_query_averages_the_filled_sources(key):
    sources = jax.random.normal(key, (4, *SHAPE))
    stream = Stream(jnp.ones(SHAPE), sources, jnp.array(2))
    got = mix(stream, jnp.ones(SHAPE[-1]), jnp.zeros(SHAPE[-1]), EPS)
    np.testing.assert_allclose(got, (sources[0] + sources[1] + 1) / 3, rtol=1e-6, atol=1e-6)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(got, (sources.sum(0) + 1) / 5, rtol=1e-6, atol=1e-6)


def test_slots_that_are_not_filled_never_count(key):
    """Neither in value nor in gradient, whatever stands in them."""
    sources = jax.random.normal(key, (3, *SHAPE))
    norm, query = jax.random.normal(key, (2, SHAPE[-1]))

    def run(rest, count):
        stream = Stream(sources[0], jnp.stack([sources[1], rest]), jnp.array(count))
        return mix(stream, norm, query, EPS)

    np.testing.assert_array_equal(run(sources[2], 1), run(1e4 * sources[2], 1))
    assert not jnp.any(jax.grad(lambda rest: run(rest, 1).sum())(sources[2]))
    assert jnp.any(jax.grad(lambda rest: run(rest, 2).sum())(sources[2]))


def test_large_scores_pick_one_source(key):
    sources = jax.random.normal(key, (2, *SHAPE))
    stream = Stream(sources[0], sources[1:], jnp.array(1))
    query = 1e4 * jax.random.normal(key, SHAPE[-1:])
    mixed, grad = jax.value_and_grad(lambda q: mix(stream, jnp.ones(SHAPE[-1]), q, EPS).sum())(query)
    assert jnp.isfinite(mixed) and jnp.isfinite(grad).all()


def test_bfloat16_stream_mixes_in_float32(key):
    sources = jax.random.normal(key, (6, *SHAPE), jnp.bfloat16)
    norm, query = jax.random.normal(key, (2, SHAPE[-1]))
    got = mix(Stream(sources[0], sources[1:], jnp.array(5)), norm, query, EPS)
    wide = [s.astype(jnp.float32) for s in (*sources[1:], sources[0])]
    want = _literal_mix(wide, norm, query)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2**-8)


def test_queries_start_at_zero_and_gains_at_one(tiny, key):
    site = attnres.DepthMix(tiny, key)
    assert not jnp.any(site.query[...]) and jnp.all(site.norm[...] == 1)
