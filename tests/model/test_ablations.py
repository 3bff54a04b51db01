"""Variants of the parts of the model: each against its equation, or against the part that it is a special case of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import accounting, linear_attention, observe
from k3jax import config as c
from k3jax.linear_attention import linear_attention_reference
from k3jax.model import attnres, ffn, layout, weights
from k3jax.model.kda import KDALayer, init_cache
from k3jax.model.transformer import init_decode_state

B, T, H, K, V = 2, 11, 2, 8, 6
SEGMENTS = np.array([[0] * 4 + [2] * 5 + [-1] * 2, [0] * 1 + [1] * 10], np.int32)


def _inputs(scale: float = 1.0):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, B, T, H, K), np.float32)
    v, beta = rng.standard_normal((B, T, H, V), np.float32), rng.standard_normal((B, T, H), np.float32)
    gate = scale * rng.standard_normal((B, T, H, 1), np.float32)
    state = rng.standard_normal((B, H, K, V), np.float32)
    return (q, k, v, gate, beta), dict(A_log=np.zeros(H, np.float32), dt_bias=np.zeros((H, K), np.float32)), state


@pytest.mark.parametrize("scale, bound", [(1.0, -5.0), (5.0, None)])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one document", "packed"])
def test_chunks_of_linear_attention_equal_the_recurrence(scale, bound, segments, monkeypatch):
    """Values, final state and gradients, over chunks that end inside of documents."""
    monkeypatch.setattr(linear_attention, "CHUNK", 4)
    arrays, gates, state = _inputs(scale)

    def results(fn):
        def outputs(q, k, v, gate, beta):
            gate = jnp.broadcast_to(gate, q.shape)
            return fn(q, k, v, gate, beta, **gates, lower_bound=bound, segment_ids=segments, initial_state=state)

        out, pull = jax.vjp(outputs, *arrays)
        return out, pull(jax.tree.map(jnp.cos, out))

    got = jax.jit(lambda: results(linear_attention.linear_attention))()
    want = jax.jit(lambda: results(linear_attention_reference))()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def test_linear_attention_would_notice_forgotten_documents():
    (q, k, v, gate, beta), gates, _ = _inputs()
    packed, whole = (
        linear_attention_reference(
            q, k, v, np.broadcast_to(gate, q.shape), beta, **gates, lower_bound=-0.2, segment_ids=ids
        )[0]
        for ids in (SEGMENTS, None)
    )
    assert np.linalg.norm((packed - whole)[0, 4:9]) > 0.1 * np.linalg.norm(packed[0, 4:9])


@pytest.fixture(scope="module")
def x_BTD(tiny):
    return np.random.default_rng(0).standard_normal((B, T, tiny.dim), np.float32)


def _with(model, **changes):
    return c.replace(model, kda=c.replace(model.kda, **changes))


def _apply(model, bind, given, x):
    return np.asarray(bind(given)(model, x, SEGMENTS))[SEGMENTS >= 0]


def test_decay_by_head_is_kda_with_equal_channels(tiny, build, x_BTD):
    model = _with(tiny, decay=c.HeadDecay())
    given, bind = build(lambda: KDALayer(model))
    heads, width = model.kda.heads, model.kda.head_dim
    rank = model.kda.forget_rank
    wide = dict(given)
    forget, bias = wide.pop("forget"), wide["dt_bias"]
    wide["forget_in"] = np.pad(forget, ((0, 0), (0, rank - heads)))
    wide["forget_out"] = np.broadcast_to(np.eye(rank, heads)[..., None], (rank, heads, width)).astype(np.float32)
    wide["dt_bias"] = np.broadcast_to(bias[:, None], (heads, width))
    _, bind_wide = build(lambda: KDALayer(tiny))
    np.testing.assert_allclose(
        _apply(model, bind, given, x_BTD), _apply(tiny, bind_wide, wide, x_BTD), rtol=1e-4, atol=1e-5
    )


def test_no_decay_is_kda_with_gates_that_are_closed(tiny, build, x_BTD):
    model = _with(tiny, decay=c.NoDecay())
    given, bind = build(lambda: KDALayer(model))
    full, bind_full = build(lambda: KDALayer(tiny))
    closed = {**full, **given, "A_log": 0 * full["A_log"], "dt_bias": 0 * full["dt_bias"] - 1e3}
    got = _apply(model, bind, given, x_BTD)
    np.testing.assert_allclose(got, _apply(tiny, bind_full, closed, x_BTD), rtol=1e-5, atol=1e-6)
    opened = {**closed, "dt_bias": 0 * full["dt_bias"]}
    assert np.linalg.norm(got - _apply(tiny, bind_full, opened, x_BTD)) > 0.02 * np.linalg.norm(got)


@pytest.mark.parametrize(
    "changes", [dict(decay=c.HeadDecay(), rule=c.AdditiveRule()), dict(decay=c.NoDecay())], ids=str
)
def test_ancestors_continue_in_pieces(tiny, build, x_BTD, changes):
    model = _with(tiny, **changes)
    given, bind = build(lambda: KDALayer(model))
    whole, cache, outs = bind(given)(model, x_BTD, None), init_cache(model, B), []
    for start, stop in ((0, 5), (5, 6), (6, T)):
        out, cache = bind(given).extend(model, x_BTD[:, start:stop], cache, np.full(B, stop - start))
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, axis=1), whole, rtol=1e-3, atol=1e-5)


def test_the_additive_rule_takes_no_decay_by_channel(tiny):
    with pytest.raises(c.ConfigError, match=r"AdditiveRule\(\) takes a HeadDecay or NoDecay"):
        _with(tiny, rule=c.AdditiveRule())


def test_swish_gate(tiny, build, x_BTD):
    swish = _with(tiny, output_gate=c.SwishGate())
    given, bind = build(lambda: KDALayer(tiny))
    o = np.random.default_rng(1).standard_normal((B, T, tiny.kda.heads, tiny.kda.head_dim), np.float32)
    sigmoid, silu = (np.asarray(bind(given)._gated_norm(model, o, x_BTD)) for model in (tiny, swish))
    gate = np.einsum("btd,dhv->bthv", x_BTD, given["gate"])
    np.testing.assert_allclose(silu, sigmoid * gate, rtol=1e-4, atol=1e-5)


def test_clamped_swiglu_is_swiglu_inside_of_its_limit():
    gate, up = np.meshgrid(np.linspace(-30, 30, 25), np.linspace(-30, 30, 25))
    clamped = ffn.gated(c.ClampedSwiGLU(7.0), gate, up)
    inner = np.minimum(gate, 7.0)
    want = inner / (1 + np.exp(-inner)) * np.clip(up, -7, 7)
    np.testing.assert_allclose(clamped, want, rtol=1e-5, atol=1e-6)
    assert np.abs(clamped).max() <= 49 < np.abs(ffn.gated(c.SwiGLU(), gate, up)).max()


def test_depth_mixture_without_a_norm_of_its_keys():
    """Against the softmax of plain products, and its gradients; empty slots do not count."""
    rng = np.random.default_rng(0)
    sources, running = rng.standard_normal((3, 2, 5, 4), np.float32), rng.standard_normal((2, 5, 4), np.float32)
    u, cotangent = rng.standard_normal(4).astype(np.float32), rng.standard_normal((2, 5, 4), np.float32)

    def plain(sources, running, u):
        v = jnp.concatenate([sources[:2], running[None]])
        return jnp.einsum("sbt,sbtd->btd", jax.nn.softmax(jnp.einsum("sbtd,d->sbt", v, u), axis=0), v)

    def ours(sources, running, u):
        return attnres.mix(None, attnres.Stream(running, sources, jnp.int32(2)), u)

    for fn in (plain, ours):
        out, pull = jax.vjp(fn, sources, running, u)
        if fn is plain:
            want = out, pull(cotangent)
    for a, b in zip(jax.tree.leaves((out, pull(cotangent))), jax.tree.leaves(want)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_queries_start_as_asked(tiny):
    residual = c.BlockAttnRes(2, keys=c.NoKeyNorm(), query=c.RandomQuery(0.3))
    params = weights.init(c.replace(tiny, residual=residual), 0).params
    assert "norm" not in params["mix"] and 0.1 < np.std(params["mix"]["query"]) < 0.5
    assert not np.any(weights.init(tiny, 0).params["mix"]["query"])


@pytest.fixture(scope="module")
def looped(tiny):
    """A model of two layers gone through twice, and the one of four layers that it stands for."""
    short = c.replace(tiny, layers=2, full_attention=(2,), dense_layers=2, residual=c.PlainResidual(), loops=2)
    return short, c.replace(short, layers=4, full_attention=(2, 4), dense_layers=4, loops=1)


def test_a_loop_equals_a_model_with_its_layers_repeated(looped):
    """Hidden states, operations, and decoding; reports are added up over the passes."""
    short, long = looped
    given = weights.init(short, 0)
    assert [segment.repeats for segment in layout.plan(long.kinds)] == [2]
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), given.params["segments"])
    same = weights.Weights({**given.params, "segments": twice}, {})
    tokens = np.random.default_rng(0).integers(0, short.vocab, (2, 7))
    hidden, reports = weights.bind(short, given)(short, tokens)
    want, _ = weights.bind(long, same)(long, tokens)
    np.testing.assert_allclose(hidden, want, rtol=1e-4, atol=1e-5)
    assert accounting.flops_per_token(short, 64).forward == accounting.flops_per_token(long, 64).forward
    merged = observe.over_loops(reports)
    mla = [report for segment in merged for report in segment if report.max_logit is not None]
    assert mla[0].max_logit.shape[-1] == short.mla.heads
    state, outs = init_decode_state(short, 2, 7), []
    for piece in (tokens[:, :4], tokens[:, 4:5], tokens[:, 5:]):
        out, state = weights.bind(short, given).extend(short, piece, state)
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, axis=1), want, rtol=1e-3, atol=1e-5)


def test_only_a_plain_residual_is_looped_over(tiny):
    with pytest.raises(c.ConfigError, match="loops = 3 with BlockAttnRes"):
        c.replace(tiny, loops=3)
