"""QK-Clip: heads above the threshold come down to it, all others keep their bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.optim import qk_clip

B, T, R, H, NOPE, ROPE = 2, 9, 12, 4, 8, 3
LEAD = (2, 3)


def make_layer(q_name="q_up"):
    shapes = {q_name: (R, H, NOPE + ROPE), "k_up": (R, H, NOPE), "v_up": (R, H, 5), "kv_down": (R, R + ROPE)}
    rng = np.random.default_rng(0)
    layer = {name: rng.normal(size=LEAD + shape).astype("float32") for name, shape in shapes.items()}
    layer[q_name] *= np.array([0.1, 1.0, 3.0, 30.0], "float32")[:, None]
    return jax.tree.map(jnp.asarray, layer)


@functools.partial(jax.jit, static_argnames="q_name")
def max_logits(layer, q_name, x_BTR, shared_BTK):
    """Largest causal logit per head, with the key's shared channels taken from a fixed array."""
    q = jnp.einsum("btr,...rhk->...bthk", x_BTR, layer[q_name])
    k = jnp.einsum("btr,...rhk->...bthk", x_BTR, layer["k_up"])
    shared = jnp.broadcast_to(shared_BTK[:, :, None], (*k.shape[:-1], ROPE))
    logits = jnp.einsum("...bthk,...bshk->...bhts", q, jnp.concatenate([k, shared], -1))
    return jnp.where(jnp.tri(T, dtype=bool), logits, -jnp.inf).max((-1, -2)).max(-2)


@pytest.mark.parametrize("q_name", ["q_up", "q"])
def test_logits_come_down_to_the_threshold(q_name):
    layer = make_layer(q_name)
    rng = np.random.default_rng(1)
    x, shared = (rng.normal(size=(B, T, width)).astype("float32") for width in (R, ROPE))
    s = max_logits(layer, q_name, x, shared)
    tau = float(np.sort(s, axis=None)[s.size // 2])
    clipped = qk_clip(layer, s, threshold=tau)
    after = max_logits(clipped, q_name, x, shared)

    above = np.asarray(s) > tau
    assert 0 < above.sum() < above.size
    assert np.max(after) <= tau * (1 + 1e-3)
    np.testing.assert_allclose(np.asarray(after)[above], tau, rtol=1e-3)
    for name in (q_name, "k_up"):
        kept = (np.asarray(clipped[name]) == np.asarray(layer[name])).all((-1, -3))
        np.testing.assert_array_equal(kept, ~above)
    assert all(clipped[name] is layer[name] for name in ("v_up", "kv_down"))

    half = {**layer, q_name: clipped[q_name]}
    assert np.max(max_logits(half, q_name, x, shared)) > tau * (1 + 1e-3), "clipping q alone must not suffice"


def test_scales():
    layer = make_layer()
    s = jnp.full((*LEAD, H), 25.0)
    clipped = qk_clip(layer, s, threshold=4.0)
    np.testing.assert_allclose(clipped["k_up"], 0.4 * layer["k_up"], rtol=1e-6)
    np.testing.assert_allclose(clipped["q_up"][..., :NOPE], 0.4 * layer["q_up"][..., :NOPE], rtol=1e-6)
    np.testing.assert_allclose(clipped["q_up"][..., NOPE:], 0.16 * layer["q_up"][..., NOPE:], rtol=1e-6)


@pytest.mark.parametrize("s", [0.0, -7.0, 100.0, -np.inf, np.inf, np.nan])
def test_heads_without_a_usable_maximum_keep_their_bits(s):
    layer = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_layer())
    clipped = qk_clip(layer, jnp.full((*LEAD, H), s), threshold=100.0)
    for name, x in layer.items():
        assert clipped[name].dtype == x.dtype
        np.testing.assert_array_equal(clipped[name], x)


def test_refuses_what_is_not_mla():
    layer = make_layer()
    with pytest.raises(ValueError, match="MLA layer"):
        qk_clip({"q": layer["q_up"], "k": layer["k_up"]}, jnp.ones((*LEAD, H)), threshold=1.0)
    with pytest.raises(ValueError, match="max_logits"):
        qk_clip(layer, jnp.ones((*LEAD, H + 1)), threshold=1.0)
