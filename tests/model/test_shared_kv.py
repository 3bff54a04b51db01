"""MLA layers that read an earlier one's compressed keys and values: against the equations, continued, looped over, kept
and counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import accounting, memory
from k3jax import config as c
from k3jax.config_optim import Muon
from k3jax.describe import describe
from k3jax.model import ffn, weights
from k3jax.model.transformer import init_decode_state
from k3jax.model.weights import Weights
from k3jax.optim import qk_clip
from k3jax.presets import tiny as tiny_run

B, T = 2, 7
TOKENS = np.random.default_rng(0).permutation(29)[: B * T].reshape(B, T).astype(np.int32)
SEGMENTS = np.array([[0] * 3 + [1] * 2 + [-1] * 2, [0] * 1 + [5] * 6], np.int32)
FACTORS = np.random.default_rng(3).standard_normal((B, T, 24)).astype(np.float32)


@pytest.fixture(scope="module")
def pairs(tiny):
    """Four MLA layers, of which the second reads the first and the fourth the third, with rotary positions."""
    mla = c.replace(tiny.mla, share=2, position=c.RoPE(100.0))
    return c.replace(tiny, layers=4, full_attention=(1, 2, 3, 4), dense_layers=4, mla=mla, residual=c.PlainResidual())


@pytest.fixture(scope="module")
def around(tiny):
    """MLA, KDA, and MLA that reads the first layer across the KDA layer."""
    mla = c.replace(tiny.mla, share=2)
    return c.replace(tiny, full_attention=(1, 3), dense_layers=3, mla=mla, residual=c.PlainResidual())


def _norm(x, gain, eps=1e-6):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def _turn(x, theta):
    """Pairs of [B, T, ..., 2n] as complex numbers, turned by t * theta**(-i/n)."""
    n = x.shape[-1] // 2
    angle = np.arange(T)[:, None] * theta ** (-np.arange(n) / n)
    angle = angle.reshape(T, *(1,) * (x.ndim - 3), n)
    even, odd, cos, sin = x[..., 0::2], x[..., 1::2], np.cos(angle), np.sin(angle)
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)


def _attention(model, w, x, latent, shared):
    """Gated MLA (K3 report, eq. 7) of a layer's own queries to compressed keys and values, wherever they come from."""
    nope, theta = model.mla.nope_dim, model.mla.position.theta
    q = jnp.einsum("btr,rhk->bthk", _norm(x @ w["q_down"], w["q_norm"]), w["q_up"])
    logits = jnp.einsum("bthk,bshk->bhts", q[..., :nope], jnp.einsum("bsr,rhk->bshk", latent, w["k_up"]))
    logits += jnp.einsum("bthk,bsk->bhts", _turn(q[..., nope:], theta), shared)
    seen = (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & np.tri(T, dtype=bool)
    p = jax.nn.softmax(jnp.where(seen[:, None], logits / np.sqrt(model.mla.qk_dim), -jnp.inf), axis=-1)
    o = jnp.einsum("bhts,bshv->bthv", p, jnp.einsum("bsr,rhv->bshv", latent, w["v_up"]))
    return jnp.einsum("bthv,dhv->btd", o * jax.nn.sigmoid(jnp.einsum("btd,dhv->bthv", x, w["gate"])), w["out"])


def _reference(model, params):
    """The whole model of ``pairs``, a layer at a time."""
    x = params["embed"][TOKENS]
    for layer in range(4):
        w = jax.tree.map(lambda stack, repeat=layer // 2: stack[repeat, 0], params["segments"][0][layer % 2])
        h = _norm(x, w["mixer_norm"], model.eps)
        if layer % 2 == 0:
            latent, shared = jnp.split(h @ w["mixer"]["kv_down"], [model.mla.kv_rank], axis=-1)
            latent, shared = _norm(latent, w["mixer"]["kv_norm"]), _turn(shared, model.mla.position.theta)
        x = x + _attention(model, w["mixer"], h, latent, shared)
        h = _norm(x, w["ffn_norm"], model.eps)
        x = x + ffn.gated(model.activation, h @ w["ffn"]["gate"], h @ w["ffn"]["up"]) @ w["ffn"]["down"].T
    return _norm(x, params["norm"], model.eps)


def _objective(hidden):
    return (jnp.where(SEGMENTS[..., None] < 0, 0, FACTORS) * hidden.astype(jnp.float32)).sum()


def _value_and_grad(model, given):
    def objective(params):
        return _objective(weights.bind(model, Weights(params, given.router))(model, TOKENS, SEGMENTS)[0])

    return jax.jit(jax.value_and_grad(objective))(given.params)


def test_equals_the_equations_in_value_and_gradient(pairs, shaken, assert_close):
    given = shaken(weights.init(pairs, 0))
    want = jax.jit(jax.value_and_grad(lambda params: _objective(_reference(pairs, params))))(given.params)
    assert_close(_value_and_grad(pairs, given), want, 1e-4)


def test_keys_learn_from_the_layers_that_borrow_them(pairs, shaken):
    """Also where the layer that makes them does nothing with them itself."""
    given = shaken(weights.init(pairs, 0))
    lender = given.params["segments"][0][0]
    lender["mixer"]["out"] = jnp.zeros_like(lender["mixer"]["out"])
    _, grads = _value_and_grad(pairs, given)
    mixer = grads["segments"][0][0]["mixer"]
    assert not np.any(mixer["k_up"]) and not np.any(mixer["q_up"])
    assert np.all(np.abs(mixer["kv_down"]).max(axis=(1, 2, 3)) > 0) and np.all(mixer["kv_norm"])


def test_own_keys_from_the_same_weights_are_something_else(pairs, shaken):
    """Negative control: a layer that compresses its own input with the weights of the one before."""
    own = c.replace(pairs, mla=c.replace(pairs.mla, share=1))
    given = shaken(weights.init(pairs, 0))
    lender, borrower = (given.params["segments"][0][run] for run in (0, 1))
    names = ("kv_down", "kv_norm")
    full = borrower | {"mixer": borrower["mixer"] | {name: lender["mixer"][name] for name in names}}
    stacked = jax.tree.map(lambda *layers: jnp.stack(layers, 1).reshape(1, 4, *layers[0].shape[2:]), lender, full)
    separate = Weights({**given.params, "segments": {0: {0: stacked}}}, given.router)
    hidden, other = (
        np.asarray(jax.jit(lambda w, m=model: weights.bind(m, w)(m, TOKENS, SEGMENTS)[0])(w))[SEGMENTS >= 0]
        for model, w in ((pairs, given), (own, separate))
    )
    assert np.linalg.norm(hidden - other) > 0.05 * np.linalg.norm(hidden)


def test_a_loop_starts_anew_and_is_continued(around, shaken):
    """Two passes equal the layers written out, and prefill and decoding equal both."""
    short = c.replace(around, loops=2)
    long = c.replace(around, layers=6, full_attention=(1, 3, 4, 6), dense_layers=6)
    given = shaken(weights.init(short, 0))
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), given.params["segments"])
    want = jax.jit(lambda w: weights.bind(long, w)(long, TOKENS)[0])(Weights({**given.params, "segments": twice}, {}))
    hidden = jax.jit(lambda w: weights.bind(short, w)(short, TOKENS)[0])(given)
    np.testing.assert_allclose(hidden, want, rtol=1e-4, atol=1e-4)
    extend = jax.jit(lambda tokens, state: weights.bind(short, given).extend(short, tokens, state))
    state, outs = init_decode_state(short, B, T + 1), []
    for start, stop in ((0, 4), *((t, t + 1) for t in range(4, T))):
        out, state = extend(TOKENS[:, start:stop], state)
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, axis=1), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("policy", ["full", c.Save()], ids=["full", "Save"])
def test_rematerialization_keeps_gradients(around, shaken, assert_close, policy):
    """With depth sources; and every layer that borrows keeps what it was lent, no other does."""
    model = c.replace(around, residual=c.BlockAttnRes(1))
    given = shaken(weights.init(model, 0))
    kept = c.replace(model, remat=policy)
    assert_close(_value_and_grad(kept, given), _value_and_grad(model, given), 1e-5)
    own = c.replace(kept, mla=c.replace(model.mla, share=1))
    assert memory.kept(kept, T)[0] - memory.kept(own, T)[0] == model.mla.cache_dim * 4


def test_what_sharing_saves(pairs):
    """Compression weights, their operations, and cache, of every second layer; all else is there, and has its role."""
    own, spec = c.replace(pairs, mla=c.replace(pairs.mla, share=1)), pairs.mla
    assert [kind.borrows for kind in pairs.kinds] == [False, True, False, True]
    lender, borrower = (set(weights.structure(pairs).meta["segments"][0][run]["mixer"]) for run in (0, 1))
    assert lender - borrower == {"kv_down", "kv_norm"} and borrower < lender
    matrix = pairs.dim * spec.cache_dim
    counts, full = accounting.count_parameters(pairs), accounting.count_parameters(own)
    assert full.total - counts.total == full.active - counts.active == 2 * (matrix + spec.kv_rank)
    flops, whole = (accounting.flops_per_token(model, 64).parts for model in (pairs, own))
    assert whole["weights"] - flops["weights"] == 2 * 2 * matrix and whole["MLA"] == flops["MLA"]
    assert accounting.cache_bytes(pairs).mla_per_token == 2 * spec.cache_dim * 4
    assert accounting.cache_bytes(own).mla_per_token == 4 * spec.cache_dim * 4
    clipped = qk_clip(weights.init(pairs, 0).params["segments"][0][1]["mixer"], jnp.full((2, 1, 3), 9.0), threshold=3.0)
    assert set(clipped) == borrower
    run = c.replace(tiny_run(), model=c.replace(pairs, vocab=tiny_run().model.vocab))
    assert isinstance(run.optimizer.matrices, Muon)
    assert "2 MLA layers read the compressed keys and values of an earlier one" in describe(run)


@pytest.mark.parametrize("layers, share, borrows", [((2, 3), 3, (False, True)), ((1, 2, 3), 2, (False, True, False))])
def test_groups_begin_with_the_first_mla_layer(tiny, layers, share, borrows):
    model = c.replace(tiny, full_attention=layers, mla=c.replace(tiny.mla, share=share))
    assert tuple(kind.borrows for kind in model.kinds if kind.mixer == "mla") == borrows
    assert not any(kind.borrows for kind in model.kinds if kind.mixer == "kda")


def test_sharing_takes_two(tiny):
    with pytest.raises(c.ConfigError, match=r"MLA\.share = 2, but .*full_attention = \(3,\) has no two layers"):
        c.replace(tiny, full_attention=(3,), mla=c.replace(tiny.mla, share=2))
    with pytest.raises(c.ConfigError, match=r"MLA\.share = 0, but it must be at least 1"):
        c.replace(tiny.mla, share=0)
