"""The chunked loss against all logits at once: values, every gradient, dtypes, memory, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.loss import chunked_cross_entropy, cross_entropy


def _inputs(batch, length, width, vocabulary, *, scale=1.0, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(scale * rng.normal(size=(batch, length, width)), dtype)
    head = jnp.asarray(rng.normal(size=(width, vocabulary)) / np.sqrt(width), jnp.float32)
    targets = jnp.asarray(rng.integers(0, vocabulary, (batch, length)), jnp.int32)
    weights = jnp.asarray(rng.uniform(size=(batch, length)) * (np.arange(length) % 3 != 1), jnp.float32)
    return hidden, head, targets, weights


def _both(inputs, chunk, z_loss):
    hidden, head, targets, weights = inputs

    def run(function, **more):
        def loss(hidden, head, weights):
            return function(hidden, head, targets, weights, z_loss=z_loss, **more)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(hidden, head, weights)

    return run(chunked_cross_entropy, chunk=chunk), run(cross_entropy)


def _assert_close(got, want, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= tolerance * (np.linalg.norm(b) + 1e-12)


@pytest.mark.parametrize(
    "length, chunk, scale, z_loss, tolerance",
    [
        (12, 4, 1.0, 0.0, 1e-6),
        (13, 4, 1.0, 1e-2, 1e-6),
        (7, 64, 1e-3, 1e-4, 1e-6),
        (1, 1, 1.0, 0.0, 1e-6),
        (13, 5, 60.0, 1e-4, 1e-5),  # logits near 200, where one float32 rounding is 1.5e-5
    ],
)
def test_values_and_gradients_equal_the_plain_loss(length, chunk, scale, z_loss, tolerance):
    got, want = _both(_inputs(2, length, 16, 37, scale=scale), chunk, z_loss)
    _assert_close(got, want, tolerance)


def test_a_loss_that_forgets_the_padding_of_the_last_chunk_would_differ():
    """Negative control: 13 positions in chunks of 4 are padded with 3; counted, they would change loss and gradient."""
    hidden, head, targets, weights = _inputs(2, 13, 16, 37)
    padded = [jnp.pad(x, [(0, 0), (0, 3)] + [(0, 0)] * (x.ndim - 2)) for x in (hidden, targets)]
    counted = jnp.pad(weights, [(0, 0), (0, 3)], constant_values=1.0)
    (wrong, _), (right, _) = (
        chunked_cross_entropy(padded[0], head, padded[1], counted, chunk=4),
        chunked_cross_entropy(hidden, head, targets, weights, chunk=4),
    )
    assert abs(wrong - right) > 1.0


def test_bfloat16_hidden_accumulates_the_head_gradient_in_float32():
    """Against float32 on the same bfloat16 numbers; many chunks, so a bfloat16 accumulator would drift."""
    inputs = _inputs(2, 1024, 16, 33, dtype=jnp.bfloat16)
    head16 = inputs[1].astype(jnp.bfloat16)
    exact = (inputs[0].astype(jnp.float32), head16.astype(jnp.float32), *inputs[2:])
    ((loss, _), (d_hidden, d_head, _)), _ = _both((inputs[0], inputs[1], *inputs[2:]), 4, 0.0)
    _, ((want_loss, _), (want_hidden, want_head, _)) = _both(exact, 4, 0.0)
    assert loss.dtype == jnp.float32 and d_hidden.dtype == jnp.bfloat16 and d_head.dtype == jnp.float32
    _assert_close(loss, want_loss, 1e-5)
    _assert_close(d_hidden, want_hidden, 5e-3)
    _assert_close(d_head, want_head, 3e-3)

    piece_grad = jax.jit(jax.grad(lambda head, piece: cross_entropy(piece[0], head, *piece[1:])[0]))
    drift = np.zeros(want_head.shape, jnp.bfloat16)
    for start in range(0, 1024, 4):
        piece = [x[:, start : start + 4] for x in (exact[0], *exact[2:])]
        drift += np.asarray(piece_grad(exact[1], piece)).astype(jnp.bfloat16)
    with pytest.raises(AssertionError):
        _assert_close(drift, want_head, 3e-3)


def test_statistics():
    hidden, head, targets, weights = _inputs(2, 9, 16, 37)
    loss, stats = chunked_cross_entropy(hidden, head, targets, weights, chunk=2, z_loss=0.5)
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
    lse = np.log(np.exp(logits).sum(-1))
    nats = lse - np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]
    weights = np.asarray(weights, np.float64)
    np.testing.assert_allclose(stats.nats, (weights * nats).sum(), rtol=1e-5)
    np.testing.assert_allclose(stats.weight, weights.sum(), rtol=1e-6)
    np.testing.assert_allclose(stats.correct, (weights * (logits.argmax(-1) == targets)).sum(), rtol=1e-6)
    np.testing.assert_allclose(loss, (weights * (nats + 0.5 * lse**2)).sum(), rtol=1e-5)
    np.testing.assert_allclose(loss, stats.nats + 0.5 * stats.z_square, rtol=1e-6)


def test_compiled_memory_stays_far_below_the_logits():
    batch, length, width, vocabulary = 2, 2048, 32, 2048
    hidden, head, targets, weights = _inputs(batch, length, width, vocabulary)
    logits_bytes = batch * length * vocabulary * 4

    def temporary(function, **more):
        def loss(hidden, head):
            return function(hidden, head, targets, weights, **more)[0]

        return (
            jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, head).compile().memory_analysis().temp_size_in_bytes
        )

    assert temporary(cross_entropy) > logits_bytes
    assert temporary(chunked_cross_entropy, chunk=64) < logits_bytes / 6


def test_bad_input_is_named():
    hidden, head, targets, weights = _inputs(2, 5, 8, 11)
    with pytest.raises(ValueError, match=r"hidden \(2, 5, 8\), head \(11, 8\)"):
        chunked_cross_entropy(hidden, head.T, targets, weights, chunk=4)
    with pytest.raises(ValueError, match=r"targets and weights of shape \(2, 5\)"):
        chunked_cross_entropy(hidden, head, targets[:, 1:], weights, chunk=4)
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        chunked_cross_entropy(hidden, head, targets, weights, chunk=0)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        chunked_cross_entropy(hidden, head, targets, weights, chunk=4, z_loss=-1.0)
