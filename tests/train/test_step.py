"""The train step: accumulation, guards, balancing from one step to the next, and lowering without arrays."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import config as c
from k3jax import presets
from k3jax import step as step_module
from k3jax.config_optim import QKClip
from k3jax.data.load import load_data
from k3jax.model import layout, weights
from k3jax.model.block import LayerReport
from k3jax.model.transformer import by_layer
from k3jax.step import eval_step, init_state, lower_train_step, train_step


@pytest.fixture(scope="module")
def batches(micro):
    data = load_data(micro.data, vocab=micro.model.vocab)
    return data.batches(length=micro.seq_len, batch=micro.batch, seed=micro.seed)


@pytest.fixture(scope="module")
def step(micro):
    return jax.jit(partial(train_step, micro))


def biases(state):
    return jax.tree.leaves(state.weights.router)


def test_learns_the_batch_it_sees(micro, batches, step):
    state, losses = init_state(micro), []
    for _ in range(6):
        state, metrics = step(state, batches[0])
        losses.append(float(metrics.loss))
    assert np.isclose(losses[0], np.log(micro.model.vocab), atol=0.5)
    assert losses[-1] < losses[0] - 0.3
    assert int(state.step) == 6


def test_micro_batches_change_nothing_but_rounding(micro, batches, step):
    state = init_state(micro)
    whole, seen = step(state, batches[0])
    parts, seen_in_parts = jax.jit(partial(train_step, c.replace(micro, micro_batches=2)))(state, batches[0])
    np.testing.assert_allclose(seen.loss, seen_in_parts.loss, rtol=1e-6)
    np.testing.assert_allclose(seen.grad_norm, seen_in_parts.grad_norm, rtol=1e-5)
    np.testing.assert_array_equal(seen.layers["load"], seen_in_parts.layers["load"])
    assert seen.layers.keys() == seen_in_parts.layers.keys() >= {"depth_weights", "state_norm", "max_logit", "margin"}
    for name, value in seen.layers.items():
        np.testing.assert_allclose(value, seen_in_parts.layers[name], rtol=2e-5, atol=1e-6, err_msg=name)
    for name, value in seen.grad_norm_by_role.items():
        np.testing.assert_allclose(value, seen_in_parts.grad_norm_by_role[name], rtol=1e-5, err_msg=name)
    for a, b in zip(biases(whole), biases(parts)):
        np.testing.assert_array_equal(a, b)


def test_bias_moves_after_the_step_and_counts_from_the_next(micro, batches, step):
    state = init_state(micro)
    assert all(not np.any(bias) for bias in biases(state))
    after, first = step(state, batches[0])
    assert any(np.any(bias) for bias in biases(after))
    frozen = after._replace(weights=after.weights._replace(router=state.weights.router))
    _, with_new = step(after, batches[0])
    _, with_old = step(frozen, batches[0])
    assert not np.array_equal(with_new.layers["load"], with_old.layers["load"])
    assert int(first.layers["load"].sum()) == 2 * micro.tokens_per_step * micro.model.moe.active


def test_a_balancing_window_is_part_of_the_state(micro, batches):
    model = c.replace(micro.model, layers=1, full_attention=(), dense_layers=0)
    model = c.replace(model, moe=c.replace(model.moe, balancer=c.QuantileBalancing(window=2)))
    config = c.replace(micro, model=model)
    step, states = jax.jit(partial(train_step, config)), [init_state(config)]
    for number in range(2):
        states.append(step(states[-1], batches[number])[0])
    counted = [int(jax.tree.leaves(state.window)[1].sum()) for state in states]
    assert counted == [0, model.moe.experts * config.tokens_per_step, 0]
    moved = [bool(biases(state)[0].any()) for state in states]
    assert moved == [False, False, True]


def test_a_step_that_is_not_finite_changes_nothing(micro, batches, step):
    good = init_state(micro)
    params = dict(good.weights.params, norm=good.weights.params["norm"].at[3].set(jnp.nan))
    state = good._replace(weights=good.weights._replace(params=params))
    after, metrics = step(state, batches[0])
    assert not bool(metrics.verdict.finite)
    assert int(after.step) == int(after.guard.in_a_row) == 1
    for old, new in zip(jax.tree.leaves(state[1:3]), jax.tree.leaves(after[1:3])):
        np.testing.assert_array_equal(old, new)


def test_evaluation_moves_and_observes_nothing(micro, batches):
    state = init_state(micro)
    jaxpr = str(jax.make_jaxpr(partial(eval_step, micro))(state.weights, batches[0]))
    assert f"i32[{micro.model.moe.experts},{micro.model.moe.balancer.bins}]" not in jaxpr


@pytest.mark.parametrize(
    "balancer", [c.ExactQuantileBalancing(), c.SignRule(), c.AuxLoss(), c.NoBalancing()], ids=lambda b: type(b).__name__
)
def test_every_balancer_lowers_with_micro_batches(micro, balancer):
    moe = c.replace(micro.model.moe, balancer=balancer)
    lower_train_step(c.replace(micro, model=c.replace(micro.model, moe=moe), micro_batches=2))


def test_every_mla_layer_is_clipped_by_its_own_logits():
    """In the scanned layout of a model with two scans: layer by layer and head by head, and nothing else moves."""
    model = presets.load("tiny").model
    segments = layout.plan(model.kinds)
    params = weights.init(model, 0).params
    rng = np.random.default_rng(0)

    def report(segment, run):
        shape = (segment.repeats, run.count, model.mla.heads)
        seen = rng.uniform(0, 4, shape).astype(np.float32) if run.kind.mixer == "mla" else None
        return LayerReport(None, seen, None)

    reports = [[report(segment, run) for run in segment.runs] for segment in segments]
    clipped = step_module._clip_attention(QKClip(threshold=2.0), params, reports)
    stacks = [
        [[tree["segments"][s][r]["mixer"] for r in range(len(x.runs))] for s, x in enumerate(segments)]
        for tree in (params, clipped)
    ]
    heads = 0
    for old, new, seen in zip(*(by_layer(segments, tree) for tree in (*stacks, reports))):
        moved = {name for name in old if not np.array_equal(old[name], new[name])}
        if seen.max_logit is None:
            assert not moved
            continue
        assert moved <= {"q_up", "k_up"}
        nope = model.mla.nope_dim
        for head, logit in enumerate(seen.max_logit):
            gamma = min(1.0, 2.0 / float(logit))
            product = np.einsum("rk,sk->rs", new["q_up"][:, head, :nope], new["k_up"][:, head])
            before = np.einsum("rk,sk->rs", old["q_up"][:, head, :nope], old["k_up"][:, head])
            np.testing.assert_allclose(product, gamma * before, rtol=2e-5, atol=1e-7)
            np.testing.assert_allclose(new["q_up"][:, head, nope:], gamma * old["q_up"][:, head, nope:], rtol=1e-6)
            heads += gamma < 1
    assert heads >= 2
    assert all(clipped[name] is params[name] for name in params if name != "segments")


def test_the_whole_of_k3_lowers_from_shapes():
    lowered = lower_train_step(presets.load("kimi_k3"))
    weights = lowered.args_info[0][0].weights.params
    assert (
        sum(leaf.size if hasattr(leaf, "size") else np.prod(leaf.shape) for leaf in jax.tree.leaves(weights)) > 2.7e12
    )
