"""The whole model: scans, packing, causality, decoding, rematerialization, dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import config as c
from k3jax.model import layout, weights
from k3jax.model.transformer import by_layer, init_decode_state
from k3jax.model.weights import Weights

B, T = 2, 10
SEGMENTS = np.array([[0] * 4 + [1] * 4 + [-1] * 2, [0] * 1 + [5] * 9], np.int32)
TOKENS = np.random.default_rng(0).permutation(29)[: B * T].reshape(B, T).astype(np.int32)

VARIANTS = {
    "k3": dict(layers=5, dense_layers=0, full_attention=(2, 4, 5), residual=c.BlockAttnRes(2)),
    "kimi linear": dict(
        residual=c.PlainResidual(),
        activation=c.SwiGLU(),
        kda=c.KDA(2, 8, 5, decay=c.SoftplusDecay(), output_gate=c.LowRankGate(3)),
        mla=c.MLA(3, None, 10, 6, 4, 7, output_gate=c.NoGate()),
        moe=c.MoE(6, 2, 9, 1, scale=2.446),
    ),
    "full attention residuals, dense": dict(residual=c.FullAttnRes(), dense_layers=3),
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request, tiny, shaken):
    """(model, weights, forward, extend); forward gives final hidden states and reports by layer, both jitted."""
    model = c.replace(tiny, **VARIANTS[request.param])
    weights_ = shaken(weights.init(model, 0))

    @jax.jit
    def forward(weights_, tokens, segments):
        hidden, reports = weights.bind(model, weights_)(model, tokens, segments, observe=True)
        return hidden, by_layer(layout.plan(model.kinds), reports)

    @jax.jit
    def extend(weights_, tokens, state, lengths):
        return weights.bind(model, weights_).extend(model, tokens, state, lengths)

    return model, weights_, forward, extend


def _value_and_grad(model, tokens, segments=None, plan=None):
    """Of a random projection of the final hidden states; ((value, (hidden, reports by layer)), gradient)."""
    factors = np.random.default_rng(3).standard_normal((*tokens.shape, model.dim)).astype(np.float32)
    planned = layout.plan(model.kinds) if plan is None else plan

    def objective(params, router):
        net = weights.bind(model, Weights(params, router), plan)
        hidden, reports = net(model, tokens, segments, observe=True, capture=True, segments=plan)
        return (factors * hidden.astype(jnp.float32)).sum(), (hidden, by_layer(planned, reports))

    return jax.jit(jax.value_and_grad(objective, has_aux=True))


def _unrolled(tree, segments):
    """The same weights with a segment for every layer."""
    moved = {}
    for layer, slot in enumerate(layout.slots(segments)):
        stack = tree["segments"].get(slot.segment, {}).get(slot.run)
        if stack is not None:
            moved[layer] = {0: jax.tree.map(lambda x, s=slot: x[s.repeat, s.index][None, None], stack)}
    return tree | {"segments": moved}


def test_scanned_equals_unrolled_in_value_reports_and_gradient(tiny, shaken, assert_close):
    """Six layers: a run of two inside a repeated segment, a doubled last MLA, a partial last depth block."""
    model = c.replace(tiny, layers=6, dense_layers=6, full_attention=(2, 3, 5, 6), residual=c.BlockAttnRes(4))
    scanned, unrolled = layout.plan(model.kinds), layout.unrolled(model.kinds)
    assert [(s.repeats, [run.count for run in s.runs]) for s in scanned] == [(2, [1, 2])]
    params, router = shaken(weights.init(model, 0))
    tokens = TOKENS[:, :4]
    (value, aux), grads = _value_and_grad(model, tokens)(params, router)
    moved = _unrolled(params, scanned)
    (want_value, want_aux), want_grads = _value_and_grad(model, tokens, plan=unrolled)(moved, router)
    assert_close((value, aux), (want_value, want_aux), 2e-5)
    assert_close(_unrolled(grads, scanned), want_grads, 1e-4)
    unused = {path for path, grad in jax.tree_util.tree_leaves_with_path(want_grads) if not np.any(grad)}
    first = ("segments", 0, 0, "mixer_mix")  # the first mixture has one source: the identity
    expected = {("head",), (*first, "norm"), (*first, "query")}
    assert {tuple(key.key for key in path) for path in unused} == expected


def test_router_biases_and_reports_keep_their_layers_in_a_scan(tiny, shaken, assert_close):
    model = c.replace(tiny, dense_layers=0, full_attention=(1, 2, 3), residual=c.PlainResidual())
    scanned, unrolled = layout.plan(model.kinds), layout.unrolled(model.kinds)
    params, router = shaken(weights.init(model, 0))

    def forward(params, router, plan):
        net = weights.bind(model, Weights(params, router), plan)
        hidden, reports = net(model, TOKENS, SEGMENTS, observe=True, segments=plan)
        return hidden, by_layer(plan, reports)

    got, want = jax.jit(
        lambda: (
            forward(params, router, scanned),
            forward(_unrolled(params, scanned), _unrolled(router, scanned), unrolled),
        )
    )()
    assert_close(got, want, 1e-5)
    assert len({tuple(report.balance.load.tolist()) for report in got[1]}) == 3


def _documents():
    for b, row in enumerate(SEGMENTS):
        for document in sorted({*row.tolist()} - {-1}):
            yield b, *(np.flatnonzero(row == document)[[0, -1]] + [0, 1])


def test_packed_documents_equal_separate_documents(variant):
    """With the negative control that a run which omits the documents fails."""
    _, weights_, forward, _ = variant
    packed, forgotten = (forward(weights_, TOKENS, s)[0] for s in (SEGMENTS, np.zeros_like(SEGMENTS)))
    for b, start, stop in _documents():
        alone = np.zeros_like(TOKENS)
        alone[0, : stop - start] = TOKENS[b, start:stop]
        separate = forward(weights_, alone, np.zeros_like(SEGMENTS))[0][0, : stop - start]
        np.testing.assert_allclose(packed[b, start:stop], separate, rtol=1e-3, atol=1e-4)
        if start:
            assert np.linalg.norm(forgotten[b, start:stop] - separate) > 0.05 * np.linalg.norm(separate)


def test_padding_leaves_no_trace_in_outputs_and_reports(variant):
    _, weights_, forward, _ = variant
    hidden, reports = forward(weights_, TOKENS, SEGMENTS)
    other = np.where(SEGMENTS < 0, 28 - TOKENS, TOKENS)
    assert np.any(other != TOKENS)
    hidden2, reports2 = forward(weights_, other, SEGMENTS)
    np.testing.assert_array_equal(hidden[SEGMENTS >= 0], hidden2[SEGMENTS >= 0])
    for a, b in zip(jax.tree.leaves(reports), jax.tree.leaves(reports2), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert np.isfinite(hidden).all()


@pytest.mark.parametrize("lengths", [[10, 10], [5, 9], [1, 6]], ids=str)
def test_prefill_and_decode_equal_the_full_forward(variant, lengths):
    """A batch padded on the right to one size, then single tokens until every row is whole."""
    model, weights_, forward, extend = variant
    want = np.asarray(forward(weights_, TOKENS, np.zeros_like(SEGMENTS))[0])
    lengths = np.array(lengths, np.int32)
    padded = np.where(np.arange(T) < lengths[:, None], TOKENS, 7)
    state = init_decode_state(model, B, T + 3)
    first, state = extend(weights_, padded, state, lengths)
    for b, length in enumerate(lengths):
        np.testing.assert_allclose(first[b, :length], want[b, :length], rtol=1e-3, atol=1e-4)
    while np.any(state.length < T):
        position = np.minimum(state.length, T - 1)
        growing = np.asarray(state.length < T, np.int32)
        token = np.take_along_axis(TOKENS, position[:, None], 1)
        hidden, state = extend(weights_, token, state, growing)
        for b in np.flatnonzero(growing):
            np.testing.assert_allclose(hidden[b, 0], want[b, position[b]], rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(state.length, T)


def test_causal_and_packed_by_gradients(tiny, shaken):
    """d hidden[t] / d embedding[s] is zero (or rounding noise) exactly where s is later or of another document."""
    weights_ = shaken(weights.init(tiny, 0))
    direction = np.random.default_rng(2).standard_normal(tiny.dim).astype(np.float32)

    @jax.jit
    def reach(embed):
        def project(embed):
            net = weights.bind(tiny, Weights(weights_.params | {"embed": embed}, weights_.router))
            return jnp.einsum("btd,d->bt", net(tiny, TOKENS, SEGMENTS)[0], direction)

        _, back = jax.vjp(project, embed)
        one_token = jnp.eye(B * T).reshape(B, T, B, T)
        return jax.lax.map(lambda row: jax.lax.map(lambda cotangent: back(cotangent)[0], row), one_token)

    touched = np.abs(reach(weights_.params["embed"])).max(-1)[..., TOKENS]
    touched = touched > 1e-6 * touched.max()
    for b in range(B):
        assert not np.any(touched[b, :, 1 - b])
        same, real = SEGMENTS[b][:, None] == SEGMENTS[b][None], SEGMENTS[b] >= 0
        np.testing.assert_array_equal(touched[b, :, b][real], np.tril(same)[real])


def test_rematerialization_and_bfloat16_keep_gradients_and_reports(tiny, shaken, assert_close):
    """Every policy gives the same numbers; bfloat16 gives near ones, with gradients and statistics in float32."""
    model = c.replace(tiny, layers=2, full_attention=(2,), residual=c.BlockAttnRes(1))
    weights_ = shaken(weights.init(model, 0))
    want = _value_and_grad(model, TOKENS, SEGMENTS)(*weights_)
    (_, (hidden, reports)), grads = want
    for policy in ("dots", "full"):
        got = _value_and_grad(c.replace(model, remat=policy), TOKENS, SEGMENTS)(*weights_)
        assert_close(got, want, 1e-5)
        np.testing.assert_array_equal(got[0][1][1][1].balance.histogram, reports[1].balance.histogram)
        np.testing.assert_array_equal(got[0][1][1][1].balance.load, reports[1].balance.load)

    narrow = c.replace(model, dtype="bfloat16")
    (_, (hidden16, reports16)), grads16 = _value_and_grad(narrow, TOKENS, SEGMENTS)(*weights_)
    real = SEGMENTS >= 0
    assert hidden16.dtype == jnp.bfloat16
    assert np.linalg.norm((hidden16 - hidden)[real]) < 0.1 * np.linalg.norm(hidden[real])
    assert {x.dtype for x in jax.tree.leaves(grads16)} == {jnp.dtype(jnp.float32)}
    flat16, flat = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (grads16, grads))
    assert np.dot(flat16, flat) > 0.98 * np.linalg.norm(flat16) * np.linalg.norm(flat)
    assert reports16[1].balance.margin.dtype == reports16[1].max_logit.dtype == jnp.float32


def test_bfloat16_decodes(tiny, shaken):
    """Several tokens and single ones (the absorbed form) give the same hidden states, within rounding."""
    model = c.replace(tiny, layers=2, full_attention=(2,), dtype="bfloat16")
    net = weights.bind(model, shaken(weights.init(model, 0)))
    step = jax.jit(lambda tokens, state: net.extend(model, tokens, state))
    want, _ = step(TOKENS[:, :4], init_decode_state(model, B, T))
    state, outs = init_decode_state(model, B, T), []
    for t in range(4):
        hidden, state = step(TOKENS[:, t : t + 1], state)
        outs.append(hidden)
    got, want = (np.asarray(x, np.float32) for x in (np.concatenate(outs, axis=1), want))
    assert hidden.dtype == jnp.bfloat16 and np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)
    assert net.logits(hidden).dtype == jnp.float32


@pytest.mark.parametrize(
    "changes",
    [
        dict(layers=1, full_attention=()),
        dict(dense_layers=0, full_attention=(1, 2, 3), moe=c.MoE(6, 2, 9, 0, balancer=c.NoBalancing())),
        dict(full_attention=(), dense_layers=3, residual=c.PlainResidual()),
    ],
    ids=lambda changes: ", ".join(map(str, changes.values())),
)
def test_odd_models_trace_forward_backward_and_decode(tiny, changes):
    model = c.replace(tiny, **changes)
    shapes = weights.structure(model).shapes
    (value, (hidden, reports)), grads = jax.eval_shape(_value_and_grad(model, TOKENS, SEGMENTS), *shapes)
    assert hidden.shape == (B, T, model.dim) and len(reports) == model.layers and value.shape == ()
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, shapes.params)
    for report, kind in zip(reports, model.kinds):
        assert (report.max_logit is not None) == (kind.mixer == "mla")
        assert (report.balance is not None) == (kind.ffn == "moe")
    state = jax.eval_shape(lambda: init_decode_state(model, B, 6))
    after = jax.eval_shape(lambda w, s: weights.bind(model, w).extend(model, TOKENS[:, :3], s)[1], shapes, state)
    assert after == state


def test_initial_weights_depend_on_the_seed_alone_and_never_repeat(tiny):
    """No two parameters share a stream of numbers: the first values of every pair differ."""
    first, again, other = (weights.init(tiny, seed) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert np.any(first.params["embed"] != other.params["embed"])
    assert jax.tree.map(lambda x: (x.shape, x.dtype), first) == jax.tree.map(
        lambda x: (x.shape, x.dtype), weights.structure(tiny).shapes
    )
    drawn = {jax.tree_util.keystr(path): np.ravel(x)[:4] for path, x in jax.tree_util.tree_leaves_with_path(first)}
    starts = [tuple(np.sign(x) * abs(x) / np.std(x)) for x in drawn.values() if np.std(x) > 0]
    assert len({tuple(np.round(start, 3)) for start in starts}) == len(starts) > 30
    assert not np.any(jax.tree.leaves(first.router)[0])
