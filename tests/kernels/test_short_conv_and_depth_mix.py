"""The fused TPU kernels of the short convolution and the depth mixture, interpreted, against those of the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_cases import QUICK

from k3jax.model import attnres, kda
from pallas_kernels import testing
from pallas_kernels.depth_mix import depth_mix
from pallas_kernels.short_conv import short_conv

BARS = {jnp.float32: 1e-5, jnp.bfloat16: 5e-3}


@pytest.mark.parametrize("dtype", BARS)
def test_short_conv(dtype):
    """Two rows over two blocks of tokens; documents of one token, across the blocks, and padding."""
    rng = np.random.default_rng(0)
    B, T, H, K, J = 2, 150, 2, 8, 4
    x, dy = (jnp.asarray(rng.standard_normal((B, T, H, K)), dtype) for _ in range(2))
    weight = jnp.asarray(rng.standard_normal((J, H, K)), jnp.float32)
    packed = np.stack([testing.packed_segment_ids(n, padding_after=150 - sum(n)) for n in ((1, 1, 125, 20), (130, 20))])

    def both(run, ids):
        y, pull = jax.vjp(lambda x, w: run(x, w, ids), x, weight)
        return dict(zip(("y", "x", "weight"), (y, *pull(dy))))

    fused = jax.jit(lambda ids: both(lambda *a: short_conv(*a, interpret=True), ids), compiler_options=QUICK)
    plain = jax.jit(lambda ids: both(kda.short_conv, ids))
    for ids in (jnp.asarray(packed), jnp.zeros((B, T), jnp.int32)):
        testing.assert_close(fused(ids), plain(ids), BARS[dtype])
    assert testing.relative_error(fused(ids)["y"], plain(jnp.asarray(packed))["y"]) > 1e-2
    with pytest.raises(ValueError, match="got 4 and 20"):
        short_conv(jnp.ones((1, 4, 20, 8)), jnp.ones((4, 20, 8)))


@pytest.mark.parametrize("dtype", BARS)
def test_depth_mix(dtype):
    """Slots that are not filled hold NaN and weigh nothing; a length that is no multiple of the block."""
    rng = np.random.default_rng(1)
    S, B, T, D, eps = 3, 2, 11, 256, 1e-5
    running, dh = (jnp.asarray(rng.standard_normal((B, T, D)), dtype) for _ in range(2))
    sources = jnp.asarray(rng.standard_normal((S, B, T, D)), dtype)
    u = jnp.asarray(0.2 * rng.standard_normal(D), jnp.float32)

    def both(run, count, sources):
        h, pull = jax.vjp(lambda *a: run(*a, count), running, sources, u)
        return dict(zip(("h", "running", "sources", "u"), (h, *pull(dh))))

    def model(running, sources, u, count):
        return attnres.mix(eps, attnres.Stream(running, sources, count), u)

    def kernel(running, sources, u, count):
        return depth_mix(running, sources, count, u, eps=eps, interpret=True)

    fused = jax.jit(lambda count, x: both(kernel, count, x), compiler_options=QUICK)
    for count in (S, 2, 0):
        count = jnp.int32(count)
        expected = jax.jit(lambda count: both(model, count, sources))(count)
        testing.assert_close(fused(count, sources), expected, BARS[dtype])
    dirty = fused(jnp.int32(2), sources.at[2].set(jnp.nan))
    np.testing.assert_array_equal(dirty["h"], fused(jnp.int32(2), sources)["h"])
    assert not np.any(dirty["sources"][2])
    with pytest.raises(ValueError, match="128 n"):
        depth_mix(running[..., :100], sources[..., :100], 1, u[:100], eps=eps)
