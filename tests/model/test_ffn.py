"""Gated activations and the dense feed-forward layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import config as c
from k3jax.model.ffn import GatedFFN, gated

GRID = np.meshgrid(np.linspace(-30, 30, 41), np.linspace(-80, 80, 41))


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize(
    "gate, up, want", [(1, 1, 0.7158178), (100, 100, 99.9329), (-1, 2, -0.5258289), (0, 5, 0), (5, 0, 0)]
)
def test_situ_of_k3_at_known_points(gate, up, want):
    np.testing.assert_allclose(gated(c.SiTU(), jnp.float32(gate), jnp.float32(up)), want, rtol=1e-6)


def test_situ_is_bounded_everywhere():
    extremes = jnp.array([-jnp.inf, -1e30, -1e3, -1.0, 0.0, 1.0, 1e3, 1e30, jnp.inf])
    value = gated(c.SiTU(), extremes[:, None], extremes[None])
    assert jnp.all(jnp.abs(value) <= 100) and value[-1, -1] == 100
    assert value[-1, 0] == -100 and jnp.all(value[0] == 0)
    assert jnp.max(jnp.abs(gated(c.SwiGLU(), extremes[1:-1, None], extremes[None, 1:-1]))) > 1e4


def test_situ_gradients_equal_the_closed_form_and_stay_finite():
    a, u = (jnp.asarray(x, jnp.float32) for x in GRID)
    grad = jax.vmap(jax.vmap(jax.grad(lambda a, u: gated(c.SiTU(3.0, 20.0), a, u), argnums=(0, 1))))
    got = grad(a, u)
    a64, u64 = GRID
    gate = 3 * np.tanh(a64 / 3) * _sigmoid(a64)
    d_gate = _sigmoid(a64) / np.cosh(a64 / 3) ** 2 + gate * (1 - _sigmoid(a64))
    np.testing.assert_allclose(got[0], d_gate * 20 * np.tanh(u64 / 20), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[1], gate / np.cosh(u64 / 20) ** 2, rtol=1e-4, atol=1e-5)
    huge = jnp.array([[-1e30, -1e4, 1e4, 1e30]])
    assert jnp.isfinite(jnp.stack(grad(huge, huge))).all()


def test_situ_is_swiglu_at_zero_and_for_wide_caps():
    a, u = (jnp.asarray(x, jnp.float32) for x in GRID)
    swiglu = gated(c.SwiGLU(), a, u)
    np.testing.assert_allclose(gated(c.SiTU(), a / 1e3, u / 1e3), gated(c.SwiGLU(), a / 1e3, u / 1e3), rtol=1e-4)
    np.testing.assert_allclose(gated(c.SiTU(1e4, 1e5), a, u), swiglu, rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(gated(c.SiTU(), a, u), swiglu, rtol=1e-4, atol=1e-4)


def test_bfloat16_is_one_rounding_of_the_float32_value():
    a, u = (jnp.asarray(x / 4, jnp.bfloat16) for x in GRID)
    got = gated(c.SiTU(), a, u)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, gated(c.SiTU(), a.astype(jnp.float32), u.astype(jnp.float32)).astype(got.dtype))


@pytest.mark.parametrize("activation", [c.SiTU(), c.SwiGLU()], ids=["situ", "swiglu"])
def test_layer_is_down_of_gated(tiny, activation, build):
    model = c.replace(tiny, activation=activation)
    weights, bind = build(lambda: GatedFFN(model, 10))
    x = np.random.default_rng(0).standard_normal((2, 3, model.dim), np.float32)
    h = gated(activation, x @ weights["gate"], x @ weights["up"])
    got = jax.jit(lambda weights, x: bind(weights)(model, x))(weights, x)
    np.testing.assert_allclose(got, h @ weights["down"].T, rtol=1e-4, atol=1e-4)
