"""Quantile Balancing and the rules it is compared with."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import config as c
from k3jax.model import balancing
from k3jax.model.balancing import (
    exact_quantile,
    histogram_range,
    observe,
    quantile_from_histogram,
    required_bias_histogram,
    switch_loss,
)
from k3jax.model.moe import MoELayer, route

QUANTILE = [c.QuantileBalancing(), c.ExactQuantileBalancing()]
BALANCERS = [*QUANTILE, c.SignRule(0.1), c.AuxLoss(0.5), c.NoBalancing()]
UPDATE = jax.jit(balancing.update, static_argnums=(0, 3))
HISTOGRAM = jax.jit(required_bias_histogram, static_argnums=3)


@partial(jax.jit, static_argnums=(0, 3))
def _seen(balancer, scores, bias, active, valid=None):
    """The observation of a batch with these scores."""
    top, experts = jax.lax.top_k(scores + bias, active + 1)
    valid = jnp.ones(len(scores), bool) if valid is None else valid
    return observe(balancer, scores, bias, experts[:, :active], top, valid)


def _scores(tokens, experts, *, seed=0, skew=1.0):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((tokens, experts)) + skew * np.random.default_rng(99).standard_normal(experts)
    return (1 / (1 + np.exp(-logits))).astype(np.float32)


@pytest.mark.parametrize("balancer", QUANTILE, ids=str)
def test_two_updates_bring_896_experts_to_the_sampling_floor(balancer):
    """16 of 896, from a router that prefers some experts, a fresh batch at every step, in pieces of 512 tokens."""
    tokens, width, experts, active, piece = 4096, 24, 896, 16, 512
    rng = np.random.default_rng(0)
    router = rng.standard_normal((width, experts), np.float32) / math.sqrt(width)
    router[0] = rng.standard_normal(experts)

    @jax.jit
    def step(x, bias):
        def one(x):
            routing = route(x, router, bias, active, 1.0)
            valid = jnp.ones(piece, bool)
            return observe(balancer, routing.scores, bias, routing.experts, routing.top, valid)

        seen = jax.lax.map(one, x.reshape(-1, piece, width))
        required = None if seen.required is None else seen.required.reshape(tokens, experts)
        seen = jax.tree.map(lambda x: x.sum(0), seen._replace(required=None))._replace(required=required)
        return UPDATE(balancer, bias, seen, active), seen.load

    def violation(load):
        assert load.sum() == tokens * active
        return load.max() / (tokens * active / experts) - 1

    bias, violations = np.zeros(experts, np.float32), []
    for _ in range(3):
        x = rng.standard_normal((tokens, width), np.float32)
        x[:, 0] = 1
        bias, load = step(x, bias)
        violations.append(violation(load))
    floor = math.sqrt(2 * math.log(experts) / (tokens * active / experts))
    assert violations[0] > 8 * floor
    assert violations[2] < 2 * floor, violations
    assert abs(bias.mean()) < 1e-6


@pytest.mark.parametrize("bins", [2, 7, 33, 1000])
def test_histogram_counts_every_valid_token_once_in_its_bin(bins):
    scores, bias = _scores(300, 5), np.random.default_rng(1).standard_normal(5).astype(np.float32)
    required = np.sort(scores + bias, axis=1)[:, -3:-2] - scores
    valid = np.random.default_rng(2).random(300) < 0.7
    got = np.asarray(HISTOGRAM(required, bias, valid, bins))
    low, width = (np.float32(x) for x in histogram_range(jnp.asarray(bias), bins))
    index = np.floor((required - low) / width).astype(int)
    assert got.dtype == np.int32 and index.min() >= 0 and index.max() < bins
    for e in range(5):
        np.testing.assert_array_equal(got[e], np.bincount(index[valid, e], minlength=bins))


def test_counts_do_not_depend_on_how_tokens_are_split():
    """Bit for bit, whatever the micro-batches and the order; and so is the new bias."""
    scores, bias = jnp.asarray(_scores(96, 12)), jnp.linspace(-0.3, 0.3, 12)
    valid = jnp.asarray(np.random.default_rng(0).random(96) < 0.8)

    def watch(scores, valid):
        return _seen(c.QuantileBalancing(), scores, bias, 2, valid)

    whole = watch(scores, valid)
    order = np.random.default_rng(1).permutation(96)
    for pieces in (np.split(order, 2), np.split(order, 8)):
        parts = [watch(scores[piece], valid[piece]) for piece in pieces]
        for name in ("load", "tokens", "histogram"):
            np.testing.assert_array_equal(sum(getattr(part, name) for part in parts), getattr(whole, name))


@pytest.mark.parametrize("active", [1, 3, 7])
@pytest.mark.parametrize("skew", [0.0, 1.0, 3.0])
def test_histogram_is_within_one_bin_of_exact(active, skew):
    """Of the order statistic it estimates whatever the data, and of the exact rule where tokens are dense."""
    tokens, experts, bins = 4096, 8, 1000
    scores = _scores(tokens, experts, skew=skew)
    bias = np.random.default_rng(5).standard_normal(experts).astype(np.float32) * 0.3
    required = np.sort(scores + bias, axis=1)[:, -active - 1, None] - scores
    target = tokens * active / experts
    estimate = quantile_from_histogram(HISTOGRAM(required, bias, np.ones(tokens, bool), bins), bias, target)
    _, width = histogram_range(bias, bins)
    statistic = np.sort(required, axis=0)[math.ceil(target) - 1]
    np.testing.assert_array_less(abs(estimate - statistic), width * 1.001)
    exact = exact_quantile(jnp.asarray(required), jnp.float32(target), jnp.int32(tokens))
    np.testing.assert_array_equal(exact, np.sort(required, axis=0)[int(target)])
    gap = exact - statistic
    np.testing.assert_array_less(abs(estimate - exact), width * 1.001 + gap)
    assert np.median(gap) < width


@pytest.mark.parametrize("tokens", [1, 31])
def test_targets_below_one_token_and_fractions_stay_in_range(tokens):
    scores, bias = _scores(tokens, 64), np.zeros(64, np.float32)
    for balancer in QUANTILE:
        new = UPDATE(balancer, bias, _seen(balancer, scores, bias, 2), 2)
        assert np.isfinite(new).all() and np.ptp(new) <= 2


@pytest.mark.parametrize("balancer", BALANCERS, ids=str)
def test_padding_and_empty_batches_leave_no_trace(balancer):
    scores, bias = _scores(40, 6), np.linspace(-0.2, 0.2, 6, dtype=np.float32)
    valid = np.arange(40) < 25
    run = partial(_seen, balancer)
    want = run(scores, bias, 2, valid)
    loud = run(np.where(valid[:, None], scores, _scores(40, 6, seed=7)), bias, 2, valid)
    short = _seen(balancer, scores[:25], bias, 2)
    for got in (loud, short):
        np.testing.assert_array_equal(got.load, want.load)
        np.testing.assert_allclose(
            UPDATE(balancer, bias, got, 2), UPDATE(balancer, bias, want, 2), rtol=1e-6, atol=1e-7
        )
        if got.aux_loss is not None:
            np.testing.assert_allclose(got.aux_loss, want.aux_loss, rtol=1e-6)
        np.testing.assert_allclose(got.margin, want.margin, rtol=1e-5)
    assert want.tokens == 25 and want.load.sum() == 50
    nothing = run(scores, bias, 2, np.zeros(40, bool))
    np.testing.assert_array_equal(UPDATE(balancer, bias, nothing, 2), bias)
    assert nothing.tokens == 0 and not np.any(nothing.load) and nothing.margin == 0


@pytest.mark.parametrize("balancer", QUANTILE, ids=str)
def test_new_bias_is_centered_and_does_not_depend_on_a_common_offset(balancer):
    scores = _scores(512, 8)
    bias = np.random.default_rng(1).standard_normal(8).astype(np.float32) * 0.2
    new, moved = (
        np.asarray(UPDATE(balancer, start, _seen(balancer, scores, start, 2), 2)) for start in (bias, bias + 4)
    )
    assert abs(new.mean()) < 1e-6
    np.testing.assert_allclose(moved, new, atol=1e-5 if isinstance(balancer, c.ExactQuantileBalancing) else 3e-3)


def test_exact_rule_gives_every_expert_its_target_at_fixed_cutoffs_or_leaves_it_in_a_tie():
    """800 expert updates of 8 tokens, 4 experts, 1 active: a token's cutoff expert sits exactly at its old bias."""
    tokens, experts, active = 8, 4, 1
    rng = np.random.default_rng(0)
    scores = rng.random((200, tokens, experts)).astype(np.float32)
    bias = 0.3 * rng.standard_normal((200, experts)).astype(np.float32)
    required = np.sort(scores + bias[:, None], axis=2)[..., -2, None] - scores
    target = tokens * active / experts
    new = jax.jit(jax.vmap(lambda r: exact_quantile(r, jnp.float32(target), jnp.int32(tokens))))(required)
    count = (required < np.asarray(new)[:, None] - 1e-6).sum(axis=1)
    unchanged = abs(new - bias) < 1e-6
    assert np.all((count == target) | unchanged)
    assert 500 < (count == target).sum() < 800 and np.any(unchanged & (count < target))


@pytest.mark.parametrize("balancer", BALANCERS, ids=str)
def test_an_observation_holds_what_the_rule_asks_for_and_nothing_else(balancer):
    scores, bias = _scores(20, 6), np.zeros(6, np.float32)
    seen = _seen(balancer, scores, bias, 2)
    asked = {c.QuantileBalancing: "histogram", c.ExactQuantileBalancing: "required", c.AuxLoss: "aux_loss"}
    held = {name for name in ("histogram", "required", "aux_loss") if getattr(seen, name) is not None}
    assert held == ({asked[type(balancer)]} if type(balancer) in asked else set())
    ordered = np.sort(scores, axis=1)
    np.testing.assert_allclose(seen.margin, (ordered[:, -2] - ordered[:, -3]).sum(), rtol=1e-5)
    np.testing.assert_array_equal(seen.load, np.bincount(scores.argsort(1)[:, -2:].reshape(-1), minlength=6))


def test_sign_rule_moves_by_its_rate_against_the_overload():
    scores = np.tile(np.float32([0.9, 0.8, 0.2, 0.1]), (6, 1))
    bias = np.float32([0.5, 0.5, 0, 0])
    seen = _seen(c.SignRule(0.1), scores, bias, 2)
    np.testing.assert_allclose(UPDATE(c.SignRule(0.1), bias, seen, 2), [0.4, 0.4, 0.1, 0.1], rtol=1e-6)
    even = seen._replace(load=jnp.full(4, 3))
    np.testing.assert_array_equal(UPDATE(c.SignRule(0.1), bias, even, 2), bias)


@pytest.mark.parametrize("balancer", [c.AuxLoss(0.5), c.NoBalancing()], ids=str)
def test_some_rules_never_move_the_bias(balancer):
    scores, bias = _scores(20, 6), np.linspace(0, 1, 6, dtype=np.float32)
    np.testing.assert_array_equal(UPDATE(balancer, bias, _seen(balancer, scores, bias, 2), 2), bias)


def test_aux_loss_is_one_when_even_and_its_gradient_lowers_the_overloaded():
    even = jnp.full((12, 4), 0.3)
    np.testing.assert_allclose(switch_loss(even, jnp.full(4, 6), 2, jnp.ones(12, bool)), 1, rtol=1e-6)
    scores = jnp.asarray(_scores(64, 6, skew=2.0))
    seen = _seen(c.AuxLoss(0.5), scores, jnp.zeros(6), 2)
    share, mean = seen.load / 128, (scores / scores.sum(1, keepdims=True)).mean(0)
    np.testing.assert_allclose(seen.aux_loss, 0.5 * 6 * (share * mean).sum(), rtol=1e-5)
    assert seen.aux_loss > 0.5
    grad = jax.grad(lambda scores: _seen(c.AuxLoss(0.5), scores, jnp.zeros(6), 2).aux_loss)(scores)
    per_expert = np.asarray(grad.sum(0))
    assert per_expert[np.argmax(seen.load)] > 0 > per_expert[np.argmin(seen.load)]


@pytest.fixture(scope="module")
def layer(tiny, build):
    """(run, weights, x) of an MoE layer with some balancer; run gives (output, observation)."""

    def make(balancer, valid, observe=True):
        model = c.replace(tiny, moe=c.replace(tiny.moe, balancer=balancer))
        weights, bind = build(lambda: MoELayer(model))
        x = np.random.default_rng(0).standard_normal((2, 6, model.dim), np.float32)
        return lambda weights: bind(weights)(model, x, valid, observe=observe), weights

    return make


ALL = np.ones((2, 6), bool)


@pytest.mark.parametrize("balancer", [c.QuantileBalancing(), c.AuxLoss(0.5)], ids=str)
def test_rematerialization_counts_once(layer, balancer):
    """The observation beside a gradient is that of the plain forward, with and without rematerialization."""
    valid = np.array([[True] * 6, [True] * 4 + [False] * 2])
    forward, weights = layer(balancer, valid)

    def beside_a_gradient(f):
        def objective(weights):
            y, seen = f(weights)
            return (y**2).sum(), seen

        return jax.grad(objective, has_aux=True)(weights)[1]

    @jax.jit
    def all_ways(weights):
        return forward(weights)[1], [beside_a_gradient(f) for f in (forward, jax.checkpoint(forward))]

    want, others = all_ways(weights)
    for got in others:
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5 if a.dtype == np.float32 else 0)
    assert want.tokens == 10


@pytest.mark.parametrize("balancer", [c.ExactQuantileBalancing(), c.AuxLoss(0.5)], ids=str)
def test_only_the_auxiliary_loss_has_a_gradient_and_it_reaches_the_router_alone(layer, balancer):
    run, weights = layer(balancer, ALL)

    @jax.jit
    @jax.grad
    def grads(weights):
        floats = [x for x in jax.tree.leaves(run(weights)[1]) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(x.sum() for x in floats)

    touched = {name for name, grad in grads(weights).items() if np.any(jax.tree.leaves(grad)[0])}
    assert touched == ({"router"} if isinstance(balancer, c.AuxLoss) else set())


def test_outside_training_nothing_is_seen(layer):
    run, weights = layer(c.QuantileBalancing(), ALL, observe=False)
    assert jax.eval_shape(run, weights)[1] is None


@pytest.mark.parametrize("balancer", [c.QuantileBalancing(), c.ExactQuantileBalancing()], ids=str)
def test_the_bias_that_a_batch_gives_counts_from_the_next_one_on(layer, balancer):
    """A batch is observed with the old bias; the new one lowers the worst load at once."""
    run, weights = layer(balancer, ALL)
    run = jax.jit(run)
    old = jnp.array([1.0, 0, 0, 0, 0, 0])
    seen = run(weights | {"bias": old})[1]
    after = run(weights | {"bias": UPDATE(balancer, old, seen, 2)})[1].load
    assert seen.load[0] == 12 and after.max() < 12 and after.sum() == 24


def test_assignments_beyond_32_bits_do_not_overflow():
    """2^28 tokens of 16 experts each are 2^32 assignments."""
    seen = balancing.Observation(jnp.full(4, 2**30), jnp.int32(2**28), None, None, None, jnp.float32(0))
    np.testing.assert_array_equal(UPDATE(c.SignRule(1.0), jnp.zeros(4), seen, 16), np.zeros(4))


def test_a_window_of_steps_is_one_large_batch():
    """Two steps under one bias, counted together: the bias moves once, to where both batches at once would put it."""
    balancer, bias = c.QuantileBalancing(bins=50, window=2), jnp.array([0.3, -0.1, 0.0, -0.2])
    scores = jax.random.uniform(jax.random.key(1), (40, 4))
    update = partial(balancing.update, balancer, active=2)

    def observe(scores):
        top, selected = jax.lax.top_k(scores + bias, 3)
        return balancing.observe(balancer, scores, bias, selected[:, :2], top, jnp.ones(len(scores), bool))

    window = balancing.empty_window(balancer, bias)
    still, window = balancing.count_on(window, bias, observe(scores[:15]), update, last=jnp.array(False))
    np.testing.assert_array_equal(still, bias)
    assert window.histogram.sum() == 4 * window.tokens == 60
    moved, window = balancing.count_on(window, bias, observe(scores[15:]), update, last=jnp.array(True))
    np.testing.assert_array_equal(moved, update(bias, observe(scores)))
    assert not window.histogram.any() and not window.tokens


def test_a_window_below_one_step_is_refused():
    with pytest.raises(c.ConfigError, match=r"QuantileBalancing\.window = 0"):
        c.QuantileBalancing(window=0)
