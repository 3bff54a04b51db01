"""The fused TPU kernels of the short convolution and the depth mixture, interpreted, against the plain forms of the
model; and which of the two the model takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from kda_cases import QUICK

from k3jax.model import attnres, kda
from pallas_kernels import depth_mix, testing
from pallas_kernels import short_conv as conv_kernel
from pallas_kernels.short_conv import short_conv

BARS = {jnp.float32: 1e-5, jnp.bfloat16: 5e-3}
# Memory starts as NaN, transfers happen when they are waited for, and a race raises.
SIMULATED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", dma_execution_mode="on_wait")
EPS = 1e-5


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 tokens and one head of the convolution, two tokens or columns per turn of a loop: programs that
    compile fast."""
    monkeypatch.setattr(conv_kernel, "BLOCK", 16)
    monkeypatch.setattr(conv_kernel, "GROUPS", (2, 1))
    monkeypatch.setattr(conv_kernel, "UNROLL", 2)
    monkeypatch.setattr(depth_mix, "FORWARD_COLUMNS", 1)
    monkeypatch.setattr(depth_mix, "BACKWARD_COLUMNS", 1)


def conv_case(dtype):
    """Two rows over three blocks of tokens; documents of one token, across the blocks, and padding."""
    rng = np.random.default_rng(0)
    B, T, H, K, J = 2, 44, 3, 8, 4
    x, dy = (jnp.asarray(rng.standard_normal((B, T, H, K)), dtype) for _ in range(2))
    weight = jnp.asarray(rng.standard_normal((J, H, K)), jnp.float32)
    packed = np.stack([testing.packed_segment_ids(n, padding_after=T - sum(n)) for n in ((1, 1, 13, 20), (30, 14))])
    return x, weight, dy, jnp.asarray(packed)


def conv_gradients(run, x, weight, dy, ids):
    y, pull = jax.vjp(lambda x, w: run(x, w, ids), x, weight)
    return dict(zip(("y", "x", "weight"), (y, *pull(dy))))


@pytest.mark.parametrize("dtype", BARS)
def test_short_conv(dtype, small_blocks):
    x, weight, dy, packed = conv_case(dtype)
    run = functools.partial(short_conv, interpret=True)
    fused = jax.jit(lambda ids: conv_gradients(run, x, weight, dy, ids), compiler_options=QUICK)
    plain = jax.jit(lambda ids: conv_gradients(kda.short_conv, x, weight, dy, ids))
    for ids in (packed, jnp.zeros(packed.shape, jnp.int32)):
        testing.assert_close(fused(ids), plain(ids), BARS[dtype])
    assert testing.relative_error(fused(ids)["y"], plain(packed)["y"]) > 1e-2


def test_memory_of_the_convolution_is_clean(small_blocks):
    case = conv_case(jnp.float32)
    simulated = jax.jit(lambda: conv_gradients(functools.partial(short_conv, interpret=SIMULATED), *case))()
    testing.assert_close(simulated, jax.jit(lambda: conv_gradients(kda.short_conv, *case))(), 1e-5)


@pytest.mark.parametrize("shape, taps", (((1, 4, 20, 8), 4), ((1, 4, 2, 8), 1), ((1, 4, 2, 8), 10)))
def test_short_conv_refuses(shape, taps):
    with pytest.raises(ValueError, match=f"got {taps} and {shape[2]}"):
        short_conv(jnp.ones(shape), jnp.ones((taps, *shape[2:])))


def mix_case(dtype):
    rng = np.random.default_rng(1)
    S, B, T, D = 3, 2, 32, 256
    running, dh = (jnp.asarray(rng.standard_normal((B, T, D)), dtype) for _ in range(2))
    sources = jnp.asarray(rng.standard_normal((S, B, T, D)), dtype)
    return running, sources, jnp.asarray(0.2 * rng.standard_normal(D), jnp.float32), dh


def mix_fused(interpret, running, sources, count, u, dh):
    arrays, how = (running, sources, count, u), dict(eps=EPS, interpret=interpret)
    gradients = depth_mix.backward(*arrays, dh, **how)
    return dict(zip(("h", "running", "sources", "u"), (depth_mix.forward(*arrays, **how), *gradients)))


def mix_plain(running, sources, count, u, dh):
    run = lambda *x: attnres.mix(EPS, attnres.Stream(*x[:2], count), x[2])  # noqa: E731
    h, pull = jax.vjp(run, running, sources, u)
    return dict(zip(("h", "running", "sources", "u"), (h, *pull(dh))))


@pytest.mark.parametrize("dtype, block", ((jnp.float32, depth_mix.BLOCK_BYTES), (jnp.bfloat16, 4 * 32 * 256 * 2)))
def test_depth_mix(dtype, block, monkeypatch, small_blocks):
    """One block of four groups of tokens, and two blocks of two; slots that are not filled weigh nothing."""
    monkeypatch.setattr(depth_mix, "BLOCK_BYTES", block)
    running, sources, u, dh = mix_case(dtype)
    fused = jax.jit(functools.partial(mix_fused, True), compiler_options=QUICK)
    for count in (3, 2, 0):
        case = running, sources, jnp.int32(count), u, dh
        testing.assert_close(fused(*case), jax.jit(mix_plain)(*case), BARS[dtype])
    dirty = fused(running, sources.at[2].set(1e4), jnp.int32(2), u, dh)
    np.testing.assert_array_equal(dirty["h"], fused(running, sources, jnp.int32(2), u, dh)["h"])
    assert not np.any(dirty["sources"][2])
    assert testing.relative_error(fused(running, sources, jnp.int32(3), u, dh)["h"], dirty["h"]) > 1e-2


def test_memory_of_the_depth_mixture_is_clean(monkeypatch, small_blocks):
    monkeypatch.setattr(depth_mix, "BLOCK_BYTES", 4 * 32 * 256 * 4)
    running, sources, u, dh = mix_case(jnp.float32)
    case = running, sources, jnp.int32(2), u, dh
    simulated = jax.jit(functools.partial(mix_fused, SIMULATED))(*case)
    testing.assert_close(simulated, jax.jit(mix_plain)(*case), 1e-5)


def test_depth_mix_refuses():
    running, sources, u, _ = mix_case(jnp.float32)
    for changed, message in (
        ((running[..., :100], sources[..., :100], 1, u[:100]), "not 3, 64 and 100"),
        ((running[:1], sources, 1, u), r"got float32\(1, 32, 256\), float32\(3, 2, 32, 256\)"),
        ((running.astype(jnp.bfloat16), sources, 1, u), r"got bfloat16\(2, 32, 256\)"),
    ):
        with pytest.raises(ValueError, match=message):
            depth_mix.forward(*changed, eps=EPS)


def programs():
    """The model's functions with their gradients at sizes that the kernels take, as text."""
    wide = lambda *shape: jnp.zeros(shape, jnp.bfloat16)  # noqa: E731
    ids = jnp.zeros((1, 128), jnp.int32)
    conv = lambda x, w: conv_gradients(kda.short_conv, x, w, x, ids)  # noqa: E731
    mix = lambda x, s: mix_plain(x, s, jnp.int32(1), jnp.zeros(128), x)  # noqa: E731
    yield str(jax.make_jaxpr(conv)(wide(1, 128, 2, 128), jnp.zeros((4, 2, 128)))), "short_conv"
    yield str(jax.make_jaxpr(mix)(wide(1, 16, 128), wide(2, 1, 16, 128))), "depth_mix"


@pytest.mark.parametrize("platform, kind", (("tpu", "TPU v5"), ("cpu", "cpu"), (None, None)))
def test_the_model_follows_the_target(platform, kind):
    """By the mesh in scope; without one, the program holds both and lowering picks."""
    device = platform and jax.sharding.AbstractDevice(kind, None, platform)
    mesh = jax.sharding.AbstractMesh((1,), ("data",), (jax.sharding.AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh if platform else jax.sharding.AbstractMesh((), ())):
        for program, name in programs():
            assert (f"name={name}" in program and f"name={name}_backward" in program) == (platform != "cpu")
            assert ("platform_index" in program) == (platform is None)


def test_the_model_leaves_arrays_that_the_compiler_splits_to_the_compiler():
    device = jax.sharding.AbstractDevice("TPU v5", None, "tpu")
    x, s = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 128, 2, 128), (2, 1, 128, 256)))
    taps = jax.ShapeDtypeStruct((4, 2, 128), jnp.float32)
    for devices, name in ((4, "xla"), (1, "mosaic_tpu")):
        axes = (devices,), ("data",), (jax.sharding.AxisType.Auto,)
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(*axes, abstract_device=device)):
            choices = attnres.describe(s, platform="tpu"), kda.describe_short_conv(x, taps, platform="tpu")
        assert {choice.implementation for choice in choices} == {name}
        assert all(("('data',)" in choice.reason) == (devices > 1) for choice in choices)


@pytest.mark.parametrize(
    "shape, dtype, reason",
    (
        ((2, 1, 128, 100), jnp.bfloat16, "not 2, 128 and 100"),
        ((2, 1, 3, 128), jnp.bfloat16, "not 2, 3 and 128"),
        ((17, 1, 16, 128), jnp.bfloat16, "not 17, 16 and 128"),
        ((2, 1, 16, 128), jnp.float16, "not float16"),
    ),
)
def test_the_reason_for_the_plain_depth_mixture(shape, dtype, reason):
    choice = attnres.describe(jax.ShapeDtypeStruct(shape, dtype), platform="tpu")
    assert choice.implementation == "xla" and reason in choice.reason


@pytest.mark.parametrize(
    "shape, dtype, reason",
    (
        ((1, 128, 2, 64), jnp.bfloat16, "not 4, 128, 64 and 2"),
        ((1, 100, 2, 128), jnp.bfloat16, "not 4, 100, 128 and 2"),
        ((1, 128, 20, 128), jnp.bfloat16, "not 4, 128, 128 and 20"),
        ((1, 128, 2, 128), jnp.float64, "not float64"),
    ),
)
def test_the_reason_for_the_plain_convolution(shape, dtype, reason):
    x, taps = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((4, *shape[2:]), jnp.float32)
    choice = kda.describe_short_conv(x, taps, platform="tpu")
    assert choice.implementation == "xla" and reason in choice.reason
