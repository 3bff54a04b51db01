"""Numbers by layer and by role, against NumPy on small arrays, and a model's layers in their order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import config as c
from k3jax import observe
from k3jax.model import attnres, balancing
from k3jax.model.block import LayerReport
from k3jax.model.kda import Gauges, gauges
from k3jax.roles import ParamMeta, Role

SEGMENTS = np.array([[0, 0, 1, -1, -1], [-1] * 5, [0, 1, 1, 2, 2]], np.int32)
VALID = SEGMENTS >= 0
RNG = np.random.default_rng(0)


def observation(load, margin, tokens):
    return balancing.Observation(jnp.array(load), jnp.array(tokens), None, None, None, jnp.array(margin, jnp.float32))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 5.0])
def test_gauges_equal_numpy_and_ignore_what_padding_holds(scale):
    g = -scale * RNG.random((3, 5, 2, 4), np.float32)
    state = RNG.standard_normal((3, 2, 4, 6)).astype(np.float32)
    state[1] = 0  # a row of padding leaves its state at zero
    dirty = np.where(VALID[..., None, None], g, np.nan)
    seen = gauges(jnp.array(dirty), VALID, jnp.array(state), VALID.any(axis=1))
    inside = g[VALID].astype(np.float64)
    np.testing.assert_allclose(seen.log_decay / seen.channels, inside.mean(), rtol=1e-6)
    assert (seen.low, seen.high) == (inside.min().astype(np.float32), inside.max().astype(np.float32))
    norms = np.linalg.norm(state[[0, 2]].reshape(2, 2, -1), axis=-1)
    np.testing.assert_allclose(np.sqrt(seen.square / seen.states), np.sqrt((norms**2).mean()), rtol=1e-6)
    whole = gauges(jnp.array(g), np.ones_like(VALID), jnp.array(state), np.ones(3, bool))
    assert whole.channels == g.size and whole.log_decay != seen.log_decay, "padding would change the numbers"
    filled = VALID.any(axis=1)
    grads = jax.grad(lambda g, s: sum(gauges(g, VALID, s, filled)), argnums=(0, 1))(jnp.array(g), jnp.array(state))
    assert not any(np.any(leaf) for leaf in grads)


def test_depth_weights_equal_numpy(tiny_mix):
    model, mix, stream, u = tiny_mix
    got = mix.weights(model, stream, jnp.array(VALID)) / VALID.sum()
    values = np.concatenate([np.asarray(stream.sources[:2]), np.asarray(stream.running)[None]]).astype(np.float64)
    scores = (values / np.sqrt((values**2).mean(-1, keepdims=True) + model.eps)) @ u
    weights = np.exp(scores) / np.exp(scores).sum(axis=0)
    want = weights[:, VALID].mean(axis=1)
    np.testing.assert_allclose(got, [want[0], want[1], 0, want[2]], rtol=1e-5)
    assert not np.allclose(got, weights.mean(axis=(1, 2))[[0, 1, 1, 2]], rtol=1e-2)
    assert not np.any(jax.grad(lambda s: mix.weights(model, stream._replace(running=s), VALID).sum())(stream.running))


@pytest.fixture
def tiny_mix():
    """A mixing site before the third block of three, with a random query."""
    model = c.ModelConfig(
        vocab=8,
        dim=6,
        layers=3,
        full_attention=(3,),
        kda=c.KDA(heads=1, head_dim=4, forget_rank=2),
        mla=c.MLA(heads=1, q_rank=None, kv_rank=4, nope_dim=4, shared_dim=2, v_dim=4),
        dense_width=8,
        dense_layers=3,
        moe=c.MoE(experts=2, active=1, width=4, shared=0, latent=None),
        residual=c.BlockAttnRes(1),
    )
    mix = attnres.DepthMix(model)
    norm, query = RNG.standard_normal((2, 6)).astype(np.float32)
    mix.norm[...], mix.query[...] = norm, query
    sources = RNG.standard_normal((3, *SEGMENTS.shape, 6)).astype(np.float32)
    sources[2] = 1e9  # a slot not filled yet
    running = RNG.standard_normal((*SEGMENTS.shape, 6)).astype(np.float32)
    return model, mix, attnres.Stream(jnp.array(running), jnp.array(sources), jnp.array(2)), norm * query


def stack(*layers, repeats):
    """[repeats, run length, ...] from reports in the order given."""
    return jax.tree.map(lambda *x: jnp.stack(x).reshape(repeats, -1, *x[0].shape), *layers)


def moe(load, margin=0.0):
    return LayerReport(observation(load, margin, 4), None, None)


def test_layers_come_in_the_order_in_which_they_run():
    """A scan of [a b | c] twice, then one more run: a b c a' b' c' d."""
    first = stack(moe([1, 7, 0, 0], 2.0), moe([2, 2, 2, 2], 4.0), moe([3, 5, 0, 0]), moe([4, 4, 0, 0]), repeats=2)
    second = stack(moe([8, 0, 0, 0]), moe([5, 1, 1, 1]), repeats=2)
    reports = [[first, second], [stack(moe([0, 0, 0, 8], 8.0), repeats=1)]]

    def router(scale):
        def biases(*shape):
            return {"ffn": {"bias": scale * jnp.arange(np.prod(shape) * 4.0).reshape(*shape, 4)}}

        return {"segments": {0: {0: biases(2, 2), 1: biases(2, 1)}, 1: {0: biases(1, 1)}}}

    found = observe.layer_metrics(reports, router_before=router(0.0), router_after=router(0.5))
    assert found.keys() == {"load", "load_max_over_mean", "dead_share", "margin", "bias_drift"}
    np.testing.assert_array_equal(found["load"][:, 0], [1, 2, 8, 3, 4, 5, 0])
    np.testing.assert_allclose(found["load_max_over_mean"], [3.5, 1, 4, 2.5, 2, 2.5, 4])
    np.testing.assert_allclose(found["dead_share"], [0.5, 0, 0.75, 0.5, 0.5, 0, 0.75])
    np.testing.assert_allclose(found["margin"], [0.5, 1, 0, 0, 0, 0, 2])
    starts = np.array([0, 4, 0, 8, 12, 4, 0])[:, None] + np.arange(4)
    np.testing.assert_allclose(found["bias_drift"], np.sqrt(((0.5 * starts) ** 2).mean(axis=1)), rtol=1e-6)


def test_experts_without_a_token_are_dead_and_padding_revives_none():
    """Five tokens go to the first two of four experts, one of padding to the others."""
    scores = jnp.array(RNG.random((6, 4)), jnp.float32)
    selected = jnp.array([[0, 1]] * 5 + [[2, 3]])
    top = jnp.tile(jnp.array([0.9, 0.8, 0.5]), (6, 1))

    def dead_share(valid):
        seen = balancing.observe(c.SignRule(), scores, jnp.zeros(4), selected, top, jnp.array(valid))
        report = stack(LayerReport(seen, None, None), repeats=1)
        router = {"segments": {0: {0: {"ffn": {"bias": jnp.zeros((1, 1, 4))}}}}}
        found = observe.layer_metrics([[report]], router_before=router, router_after=router)
        np.testing.assert_allclose(found["margin"], 0.3, rtol=1e-6)
        return float(found["dead_share"][0])

    assert dead_share([True] * 5 + [False]) == 0.5
    assert dead_share([True] * 6) == 0


def test_micro_batches_merge_to_their_batch():
    """Of two halves of a batch, one with an all-padding row, the numbers of the whole."""
    rows = 4
    g = -RNG.random((rows, 5, 2, 4), np.float32)
    state = RNG.standard_normal((rows, 2, 4, 6)).astype(np.float32)
    state[1] = 0
    valid = np.concatenate([VALID, VALID[:1]])
    weights = RNG.random((rows, 2, 3)).astype(np.float32)

    def report(part):
        load = jnp.array([part.start, 3, 0], jnp.int32)
        seen = gauges(jnp.array(g[part]), valid[part], jnp.array(state[part]), valid[part].any(axis=1))
        depth = jnp.array(weights[part].sum(axis=0))
        return LayerReport(
            observation(load, float(part.stop), 5), jnp.array([part.start, 7.0 - part.start]), None, seen, depth
        )

    halves = jax.tree.map(lambda *x: jnp.stack(x), report(slice(0, 2)), report(slice(2, 4)))
    merged = observe.merge(halves)
    whole = gauges(jnp.array(g), valid, jnp.array(state), valid.any(axis=1))
    for name, got, want in zip(Gauges._fields, merged.gauges, whole):
        np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(merged.depth, weights.sum(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(merged.max_logit, [2, 7])
    np.testing.assert_array_equal(merged.balance.load, [2, 6, 0])
    assert (merged.balance.tokens, merged.balance.margin) == (10, 6.0)


def test_norms_by_role_equal_numpy_and_a_role_is_needed():
    tree = {"a": 3 * jnp.ones((2, 2)), "b": {"c": jnp.array([2.0, 1.0]), "d": 1e3 * jnp.ones(4, jnp.bfloat16)}}
    meta = {
        "a": ParamMeta(Role.MATRIX, ("embed", "rank")),
        "b": {"c": ParamMeta(Role.NORM, ("embed",)), "d": ParamMeta(Role.NORM, ("embed",))},
    }
    found = observe.norms_by_role(tree, meta)
    assert found.keys() == {"matrix", "norm"}
    np.testing.assert_allclose(found["matrix"], 6.0)
    np.testing.assert_allclose(found["norm"], np.sqrt(5 + 4e6), rtol=1e-2)
    with pytest.raises(ValueError, match=r"without a role.*'e'"):
        observe.norms_by_role(tree | {"e": jnp.ones(1)}, meta)
