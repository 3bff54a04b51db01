"""What layers keep for their backward pass: the intended tensors, in the intended place, with the same gradients."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import config as c
from k3jax.memory import kept, residuals
from k3jax.model import attnres, kda, mla, moe, weights
from k3jax.model.memory import dequantize, quantize
from k3jax.model.weights import Weights

B, T = 2, 10
SEGMENTS = np.array([[0] * 4 + [1] * 4 + [-1] * 2, [0] * 1 + [5] * 9], np.int32)
TOKENS = np.random.default_rng(0).permutation(29)[: B * T].reshape(B, T).astype(np.int32)
ALL = ("projected", "states", "attended", "mixer_out", "routing", "dispatch")


@pytest.fixture(scope="module")
def both(tiny) -> c.ModelConfig:
    """A KDA and an MLA layer, each with experts, and each its own depth block."""
    return c.replace(tiny, layers=2, full_attention=(2,), dense_layers=0, residual=c.BlockAttnRes(1), remat="full")


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("width", [1, 11, 127, 128, 129, 300])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_quantized_blocks_come_back_within_a_sixteenth(width, size):
    x = size * _normal(3, width)
    stored = quantize(jnp.asarray(x))
    assert stored.values.shape == x.shape and stored.values.dtype == jnp.float8_e4m3fn
    assert stored.scale.shape == (3, -(-width // 128)) and stored.scale.dtype == jnp.float32
    back = np.asarray(dequantize(stored))
    scale = np.repeat(stored.scale, 128, axis=1)[:, :width]
    assert np.all(abs(back - x) <= np.maximum(abs(x) / 16, scale * 2.0**-10) * (1 + 1e-5))
    assert np.linalg.norm(back - x) < 0.04 * np.linalg.norm(x)


def test_outliers_zeros_and_bfloat16_survive_storage():
    x = np.zeros((2, 400), np.float32)
    x[0, 5], x[0, 6], x[1, 399] = 1e5, 1.0, -3e38
    back = np.asarray(dequantize(quantize(jnp.asarray(x))))
    assert np.isfinite(back).all()
    np.testing.assert_allclose(back[0, 5], 1e5, rtol=1e-6)
    np.testing.assert_allclose(back[1, 399], -3e38, rtol=1e-6)
    assert not back[:, 128:384].any()
    narrow = jnp.asarray(_normal(2, 130)).astype(jnp.bfloat16)
    assert dequantize(quantize(narrow)).dtype == jnp.bfloat16
    assert not np.any(dequantize(quantize(jnp.full((3,), 1e-38))))


def test_what_is_not_finite_is_not_hidden_and_the_cast_alone_would_not_do():
    x = np.ones((2, 128), np.float32)
    x[0, 3] = np.inf
    back = np.asarray(dequantize(quantize(jnp.asarray(x))))
    assert np.isnan(back[0]).all() and np.all(back[1] == 1)
    assert np.isnan(jnp.float32(500).astype(jnp.float8_e4m3fn).astype(jnp.float32))


def _kept(model):
    return Counter((x.shape, x.dtype.name, x.memory_space == jax.memory.Space.Host) for x in residuals(model, B, T))


def _named(model) -> dict[str, list]:
    """The tensors of each name in ``both``, by hand."""
    spec, chunk = model.kda, 32
    heads, width = spec.heads, spec.head_dim
    token, state = (B, T, heads, width), (1, B, heads)
    float32 = {
        "projected": [token] * 4
        + [(B, T, heads), (B, T, model.mla.heads, model.mla.qk_dim), (B, T, model.mla.kv_rank)]
        + [(B, T, model.mla.shared_dim)],
        "states": [(*state, width, width), (*state, chunk, chunk)],
        "attended": [token, (B, T, model.mla.heads, model.mla.v_dim)],
        "mixer_out": [(B, T, model.dim)] * 2,
        "dispatch": [(B * T, model.moe.latent.dim)] * 2,
    }
    return {name: [(shape, "float32") for shape in shapes] for name, shapes in float32.items()} | {
        "routing": [((B * T, model.moe.active), "int32")] * 2
    }


def _as_stored(tensors, storage):
    """What stands in the device's and the host's memory for these tensors."""
    stored = Counter()
    for shape, dtype in tensors:
        host = storage.endswith("host") and dtype != "int32"
        if storage.startswith("fp8") and dtype != "int32":
            stored += Counter([(shape, "float8_e4m3fn", host), ((*shape[:-1], -(-shape[-1] // 128)), "float32", host)])
        else:
            stored[shape, dtype, host] += 1
    return stored


@pytest.mark.parametrize(
    "policy",
    [
        *(c.Save((name,)) for name in ALL),
        c.Save(storage="fp8"),
        c.Save(("attended", "mixer_out", "routing"), "fp8_host"),
        c.Save(ALL, "host"),
    ],
    ids=str,
)
def test_a_policy_keeps_the_named_tensors_and_no_others(both, policy):
    more = _kept(c.replace(both, remat=policy)) - _kept(both)
    named = _named(both)
    assert more == _as_stored([tensor for name in policy.names for tensor in named[name]], policy.storage)


def test_the_input_of_a_layer_moves_to_the_host(both):
    before, after = _kept(both), _kept(c.replace(both, remat=c.Save(("layer_input",), "host")))
    stream = (B, T, both.dim), "float32"
    assert after - before == Counter({(*stream, True): 2})
    assert before - after == Counter({(*stream, False): 2})


def test_a_policy_without_marks_is_seen(both, monkeypatch):
    """Negative control: were the names lost on the way, the policy would keep nothing, and the check above fail."""
    for module in (kda, mla, moe):
        monkeypatch.setattr(module, "mark", lambda x, name: x)
    policy = c.Save(("attended", "dispatch"))
    assert not _kept(c.replace(both, remat=policy)) - _kept(both)


def test_bytes_per_token_come_from_shapes_alone(both):
    """Two layers of inputs and of named tensors; FP8 is a byte each and one scale per 128."""
    stream = 4 * both.dim

    def bytes_of(remat):
        return np.array(kept(c.replace(both, remat=remat), T))

    full = bytes_of("full")
    np.testing.assert_array_equal(bytes_of(c.Save(("layer_input",), "host")), [full[0] - 2 * stream, 2 * stream])
    fp8 = bytes_of(c.Save(("dispatch", "routing"), "fp8")) - full
    np.testing.assert_array_equal(fp8, [2 * (both.moe.latent.dim + 4 + 4 * both.moe.active), 0])


def _deep(model, layers, residual, remat="full"):
    """``layers`` equal layers, one body to compile."""
    return c.replace(
        model, layers=layers, full_attention=(), dense_layers=layers, residual=residual, dim=64, remat=remat
    )


@pytest.mark.parametrize("slots", [4, "two a layer"])
def test_depth_sources_are_kept_once_and_no_layer_keeps_more_than_a_plain_one(tiny, slots):
    """The buffer and the last running sum on top of what plain residuals keep, whatever the depth."""
    for layers in (8, 24):
        residual = c.FullAttnRes() if slots != 4 else c.BlockAttnRes(layers // 4)
        count = attnres.source_slots(residual, layers)
        deep = _deep(tiny, layers, residual)
        plain = _kept(_deep(tiny, layers, c.PlainResidual()))
        stream = (B, T, deep.dim)
        more = {shape: n for (shape, *_), n in (_kept(deep) - plain).items() if shape[-3:] == stream}
        assert more == {(count, *stream): 1, stream: 1}


@pytest.mark.parametrize("residual", [c.BlockAttnRes(6), c.FullAttnRes()], ids=str)
def test_no_policy_keeps_the_buffer_of_a_layer(tiny, residual):
    count = attnres.source_slots(residual, 24)
    for remat in ("none", c.Save(storage="fp8")):
        buffers = [shape for shape, *_ in _kept(_deep(tiny, 24, residual, remat)) if shape[-4:-3] == (count,)]
        assert buffers == [(count, B, T, 64)]


def _temporaries(model, tokens):
    """Bytes of temporaries of the compiled gradient."""

    def objective(params, router):
        return weights.bind(model, Weights(params, router))(model, tokens)[0].sum()

    shapes = weights.structure(model).shapes
    return jax.jit(jax.grad(objective)).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def test_the_compiled_program_needs_little_more_than_with_plain_residuals(tiny):
    """24 layers, 4 blocks: a few buffers of sources in all, where one a layer would be 96 streams."""
    tokens = np.zeros((2, 64), np.int32)
    stream = tokens.size * 64 * 4
    plain, block = (
        _temporaries(_deep(tiny, 24, residual), tokens) for residual in (c.PlainResidual(), c.BlockAttnRes(6))
    )
    assert block - plain < 5 * 4 * stream


@functools.cache
def _value_and_grad(model):
    """A function of weights, of a random projection of the hidden states: (value and hidden states, gradient)."""
    factors = _normal(B, T, model.dim, seed=3)

    @jax.jit
    def run(params, router):
        def objective(params):
            hidden, _ = weights.bind(model, Weights(params, router))(model, TOKENS, SEGMENTS)
            return (factors * hidden).sum(), hidden

        return jax.value_and_grad(objective, has_aux=True)(params)

    return run


def _difference(got, want):
    """Relative Frobenius norm over the whole tree."""
    got, want = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def test_policies_give_the_same_values_and_gradients(tiny, assert_close):
    """Values bit for bit; gradients to float32 rounding. With FP8 within 5 % for weights of an ordinary size, within
    25 % for those of this model, which are four times as large, and not to rounding: it is in use.

    The policies none and dots: tests/model/test_transformer.py.
    """
    model = c.replace(tiny, layers=2, full_attention=(), dense_layers=0, residual=c.BlockAttnRes(1), remat="full")
    host, fp8 = c.Save(("layer_input", *ALL), "host"), c.Save(storage="fp8_host")
    large, ordinary = weights.init(model, 0), weights.init(c.replace(model, init_std=0.05), 0)
    for weights_, policy, bound in ((large, host, None), (large, fp8, 0.25), (ordinary, fp8, 0.05)):
        values, grads = _value_and_grad(model)(*weights_)
        got, got_grads = _value_and_grad(c.replace(model, remat=policy))(*weights_)
        jax.tree.map(np.testing.assert_array_equal, got, values)
        if bound is None:
            assert_close(got_grads, grads, 1e-5)
        else:
            assert 1e-4 < _difference(got_grads, grads) < bound
