"""Gated MLA: against its equations token by token, and its forms against each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import config as c
from k3jax.model import mla
from k3jax.model.mla import MLACache, MLALayer, attention, init_cache, rotate

B, T = 2, 9
SEGMENTS = np.array([[0] * 4 + [1] * 3 + [-1] * 2, [0] * 1 + [3] * 8], np.int32)
VARIANTS = {
    "k3": {},
    "kimi linear": dict(q_rank=None, output_gate=c.NoGate()),
    "rope": dict(position=c.RoPE(100.0)),
}


@pytest.fixture(scope="module", params=VARIANTS)
def layer(request, tiny, build):
    """(model, weights, run, extend), both jitted."""
    model = c.replace(tiny, mla=c.replace(tiny.mla, **VARIANTS[request.param]))
    weights, bind = build(lambda: MLALayer(model))
    run = jax.jit(lambda weights, x, segments: bind(weights)(model, x, segments)[:2])
    extend = jax.jit(lambda weights, x, cache, start: bind(weights).extend(model, x, cache, start))
    return model, weights, run, extend


@pytest.fixture(scope="module")
def x_BTD(tiny):
    return np.random.default_rng(0).standard_normal((B, T, tiny.dim), np.float32)


def _norm(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def _rotate(x, position, theta):
    """Pairs (2i, 2i+1) as complex numbers, turned by position * theta**(-i/n)."""
    n = x.shape[-1] // 2
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * position * theta ** (-np.arange(n) / n))
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def _literal(model, weights, x, segments):
    """K3 report, eq. 7, in float64, one token and one head at a time; and the largest logit that a real token sees."""
    spec = model.mla
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    out, largest = np.zeros_like(x, np.float64), np.full(spec.heads, -np.inf)
    for b, t in np.ndindex(x.shape[:2]):
        for h in range(spec.heads):
            q = (
                x[b, t] @ w["q"][:, h]
                if spec.q_rank is None
                else (_norm(x[b, t] @ w["q_down"], w["q_norm"]) @ w["q_up"][:, h])
            )
            logits, values = [], []
            for s in range(t + 1):
                if segments[b, s] != segments[b, t]:
                    continue
                compressed = x[b, s] @ w["kv_down"]
                latent, shared = _norm(compressed[: spec.kv_rank], w["kv_norm"]), compressed[spec.kv_rank :]
                query_shared = q[spec.nope_dim :]
                if isinstance(spec.position, c.RoPE):
                    shared = _rotate(shared, s, spec.position.theta)
                    query_shared = _rotate(query_shared, t, spec.position.theta)
                dot = q[: spec.nope_dim] @ (latent @ w["k_up"][:, h]) + query_shared @ shared
                logits.append(dot / np.sqrt(spec.nope_dim + spec.shared_dim))
                values.append(latent @ w["v_up"][:, h])
            p = np.exp(logits - np.max(logits))
            o = (p / p.sum()) @ np.array(values)
            if isinstance(spec.output_gate, c.FullRankGate):
                o /= 1 + np.exp(-(x[b, t] @ w["gate"][:, h]))
            out[b, t] += w["out"][:, h] @ o
            if segments[b, t] >= 0:
                largest[h] = max(largest[h], np.max(logits))
    return out, largest


def _real(x, segments=SEGMENTS):
    return np.asarray(x)[segments >= 0]


def test_equals_the_equations_within_documents(layer, x_BTD):
    model, weights, run, _ = layer
    out, max_logit = run(weights, x_BTD, SEGMENTS)
    want, largest = _literal(model, weights, x_BTD, SEGMENTS)
    np.testing.assert_allclose(_real(out), _real(want), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(max_logit, largest, rtol=1e-5)
    assert max_logit.dtype == jnp.float32 and np.isfinite(out).all()


def test_packed_documents_equal_separate_documents(layer, x_BTD):
    """With the negative control that a run which omits the documents fails."""
    _, weights, run, _ = layer
    packed, _ = run(weights, x_BTD, SEGMENTS)
    forgotten, _ = run(weights, x_BTD, np.zeros_like(SEGMENTS))
    for b, start, stop in [(0, 0, 4), (0, 4, 7), (1, 0, 1), (1, 1, 9)]:
        alone = np.zeros_like(x_BTD)
        alone[0, : stop - start] = x_BTD[b, start:stop]
        separate = run(weights, alone, np.zeros_like(SEGMENTS))[0][0, : stop - start]
        np.testing.assert_allclose(packed[b, start:stop], separate, rtol=1e-4, atol=1e-5)
        if start:
            assert np.linalg.norm(forgotten[b, start:stop] - separate) > 0.05 * np.linalg.norm(separate)


def test_what_stands_in_padding_changes_nothing(layer, x_BTD):
    _, weights, run, _ = layer
    loud = np.where(SEGMENTS[..., None] < 0, 50 * x_BTD + 3, x_BTD)
    (quiet, quiet_max), (out, max_logit) = run(weights, x_BTD, SEGMENTS), run(weights, loud, SEGMENTS)
    np.testing.assert_array_equal(_real(out), _real(quiet))
    np.testing.assert_array_equal(max_logit, quiet_max)
    out, max_logit = run(weights, x_BTD, np.full_like(SEGMENTS, -1))
    assert np.isfinite(out).all() and np.all(max_logit <= 0)


@pytest.mark.parametrize("pieces", [[9], [1] * 9, [4, 1, 3, 1]], ids=str)
def test_absorbed_and_expanded_continuations_equal_one_pass(layer, x_BTD, pieces):
    model, weights, run, extend = layer
    whole, _ = run(weights, x_BTD, None)
    cache, done, outs = init_cache(model, B, T + 2), 0, []
    for size in pieces:
        out, cache = extend(weights, x_BTD[:, done : done + size], cache, np.full(B, done, np.int32))
        done += size
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, axis=1), whole, rtol=1e-4, atol=1e-5)
    assert cache.latent.shape == (B, T + 2, model.mla.kv_rank)
    assert not np.any(cache.latent[:, T:])


def test_rows_of_different_lengths_continue_as_they_would_alone(layer, x_BTD):
    """Right padding of the first piece is overwritten by the second; past the cache's end tokens are dropped."""
    model, weights, run, extend = layer
    whole, _ = run(weights, x_BTD, None)
    lengths = np.array([2, 5], np.int32)
    junk = np.where(np.arange(5)[:, None] < lengths[:, None, None], x_BTD[:, :5], 100.0).astype(np.float32)
    cache = init_cache(model, B, 8)
    first, cache = extend(weights, junk, cache, np.zeros(B, np.int32))
    rest = np.stack([row[length : length + 4] for row, length in zip(x_BTD, lengths)])
    second, cache = extend(weights, rest, cache, lengths)
    for b, length in enumerate(lengths):
        joined = np.concatenate([first[b, :length], second[b]])
        valid = min(length + 4, 8)
        np.testing.assert_allclose(joined[:valid], whole[b, :valid], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [2, 4, 9])
def test_blocks_of_queries_equal_one_block(block, x_BTD, monkeypatch, assert_close):
    """In value, largest logit (all of them negative here) and gradient; packed, with a partial last block."""
    rng = np.random.default_rng(1)
    q, k = abs(rng.standard_normal((2, B, T, 3, 5), np.float32))
    v, cotangent = rng.standard_normal((2, B, T, 3, 4), np.float32)
    position = np.arange(T)[None]

    def value_and_grads(q, k, v):
        def f(q, k, v):
            return attention(
                q,
                -k,
                v,
                scale=0.5,
                query_position=position,
                key_position=position,
                query_segment=SEGMENTS,
                key_segment=SEGMENTS,
            )

        out, back, max_logit = jax.vjp(f, q, k, v, has_aux=True)
        return out, max_logit, back(cotangent)

    want = jax.jit(value_and_grads)(q, k, v)
    assert np.all(want[1] < 0)
    monkeypatch.setattr(mla, "QUERY_BLOCK", block)
    assert_close(jax.jit(lambda *args: value_and_grads(*args))(q, k, v), want, 1e-6)


def test_causal_by_gradients(layer, x_BTD):
    """d out[t] / d x[s] is zero exactly where s comes later or from another document, and nowhere else."""
    model, weights, run, _ = layer
    direction = np.random.default_rng(2).standard_normal(model.dim).astype(np.float32)

    @jax.jit
    def reach(x):
        return jax.jacobian(lambda x: jnp.einsum("btd,d->bt", run(weights, x, SEGMENTS)[0], direction))(x)

    jacobian = np.asarray(reach(x_BTD))
    touched = np.abs(jacobian).max(-1)
    for b in range(B):
        assert not np.any(touched[b, :, 1 - b])
        same = SEGMENTS[b][:, None] == SEGMENTS[b][None]
        np.testing.assert_array_equal((touched[b, :, b] > 0)[SEGMENTS[b] >= 0], np.tril(same)[SEGMENTS[b] >= 0])


def test_only_rope_sees_the_order_of_earlier_tokens(layer, x_BTD):
    model, weights, run, _ = layer
    swapped = x_BTD[:, [2, 1, 0, *range(3, T)]]
    out, _ = run(weights, x_BTD, None)
    other, _ = run(weights, swapped, None)
    difference = np.linalg.norm(out[:, 3:] - other[:, 3:]) / np.linalg.norm(out[:, 3:])
    assert (difference > 1e-2) if isinstance(model.mla.position, c.RoPE) else (difference < 1e-5)


def test_rotation_is_relative_and_keeps_length():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 5, 2, 6), np.float32)
    position = np.array([[0, 1, 5, 40, 300]])
    np.testing.assert_allclose(rotate(q, position, 1e4), _rotate(q, position[..., None, None], 1e4), atol=1e-4)
    np.testing.assert_array_equal(rotate(q, position, 1e4)[:, 0], q[:, 0])

    def dots(shift):
        return np.einsum("bthk,bshk->bhts", *(rotate(x, position + shift, 1e4) for x in (q, k)))

    np.testing.assert_allclose(dots(0), dots(77), rtol=1e-4, atol=1e-4)


def test_bfloat16_keeps_the_attention_output_in_float32(tiny, build, x_BTD):
    """Close to float32 in training and in decoding, and the gate acts before the one rounding."""
    weights, bind = build(lambda: MLALayer(tiny))
    narrow = c.replace(tiny, dtype="bfloat16")
    x16 = x_BTD.astype(jnp.bfloat16)
    want, _ = jax.jit(lambda x: bind(weights)(tiny, x, None)[:2])(x16.astype(np.float32))
    got, max_logit = jax.jit(lambda x: bind(weights)(narrow, x, None)[:2])(x16)
    assert got.dtype == jnp.bfloat16 and max_logit.dtype == jnp.float32
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)
    q = jnp.ones((1, 2, 1, 4), jnp.bfloat16)
    o, _ = attention(q, q, q, scale=1.0, query_position=jnp.arange(2)[None], key_position=jnp.arange(2)[None])
    assert o.dtype == jnp.float32
    cache, outs = init_cache(narrow, B, T), []
    assert isinstance(cache, MLACache) and cache.latent.dtype == jnp.bfloat16
    step = jax.jit(lambda x, cache, start: bind(weights).extend(narrow, x, cache, start))
    for t in range(T):
        out, cache = step(x16[:, t : t + 1], cache, np.full(B, t, np.int32))
        outs.append(out)
    decoded = np.concatenate(outs, axis=1).astype(np.float32)
    assert np.linalg.norm(decoded - want) < 0.02 * np.linalg.norm(want)
