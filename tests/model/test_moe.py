"""Mixture of experts: the router, and every form of the expert computation against a loop over experts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import megablox

from k3jax import config as c
from k3jax import grouped
from k3jax.model.moe import MoELayer, Routing, dense_expert_mix, expert_mix, route

D, L, F = 7, 6, 5
ROUTE = jax.jit(route, static_argnums=(3, 4))
FORMS = {"blocked": grouped.blocked, "ragged": grouped.ragged}


def _mix(form, z, routing, gate, up, down, activation):
    """``expert_mix`` through one form, whatever the platform."""
    y = FORMS[form](z, routing.experts, gate, up, down, activation=activation)
    return jnp.einsum("nal,na->nl", y, routing.weights)


def _inputs(tokens, experts, *, skew=0.0):
    """x, z, router and expert weights; ``skew`` sends tokens to the first two experts."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, D), np.float32)
    x[:, 0] = 1
    router = rng.standard_normal((D, experts), np.float32)
    router[0] += skew * np.where(np.arange(experts) < 2, 1, -2)
    matrices = rng.standard_normal((3, experts, L, F), np.float32)
    return x, rng.standard_normal((tokens, L), np.float32), router, *matrices


def _value_and_grads(mix, x, z, router, gate, up, down, *, active):
    """Output, and the gradients of x and router (through the weights), z, gate, up and down."""
    bias = np.zeros(router.shape[1], np.float32)
    cotangent = np.random.default_rng(1).standard_normal(z.shape).astype(np.float32)

    def f(x, z, router, gate, up, down):
        return mix(z, route(x, router, bias, active, 1.5), gate, up, down, c.SiTU())

    @jax.jit
    def run(*args):
        value, back = jax.vjp(f, *args)
        return value, back(cotangent)

    return run(x, z, router, gate, up, down)


def _literal(z, routing, gate, up, down, activation):
    """One token, one expert at a time, in float64, from the routing alone."""
    z, gate, up, down = (np.asarray(x, np.float64) for x in (z, gate, up, down))
    out = np.zeros_like(z)
    for n, (experts, weights) in enumerate(zip(routing.experts, routing.weights)):
        for e, p in zip(experts, weights):
            g, u = z[n] @ gate[e], z[n] @ up[e]
            a = g / (1 + np.exp(-g)) * u
            if isinstance(activation, c.SiTU):
                a = 4 * np.tanh(g / 4) / (1 + np.exp(-g)) * 25 * np.tanh(u / 25)
            out[n] += float(p) * (down[e] @ a)
    return out


CASES = {
    "even": dict(tokens=13, experts=6, active=2, block=4),
    "hot and empty experts": dict(tokens=13, experts=6, active=2, skew=4.0, block=4),
    "one token": dict(tokens=1, experts=6, active=2, block=128),
    "all but one expert": dict(tokens=5, experts=4, active=3, block=128),
    "one expert each": dict(tokens=11, experts=5, active=1, block=1),
    "more rows than a block": dict(tokens=100, experts=3, active=2, skew=1.0, block=128),
}


@pytest.mark.parametrize("case", CASES)
def test_every_form_equals_the_dense_loop_in_value_and_gradients(case, assert_close, monkeypatch):
    spec = dict(CASES[case])
    active = spec.pop("active")
    monkeypatch.setattr(grouped, "ROW_BLOCK", spec.pop("block"))
    inputs = _inputs(**spec)
    want = _value_and_grads(dense_expert_mix, *inputs, active=active)
    for form in FORMS:
        assert_close(_value_and_grads(partial(_mix, form), *inputs, active=active), want, 2e-5, floor=1.0)
    if case == "hot and empty experts":
        gate_grads = np.abs(want[1][3]).max((1, 2))
        assert np.all(gate_grads[:2] > 0) and not np.any(gate_grads[2:])


@pytest.mark.parametrize("activation", [c.SiTU(), c.SwiGLU()], ids=["situ", "swiglu"])
def test_the_dense_loop_and_the_public_form_equal_single_tokens(activation):
    x, z, router, *matrices = _inputs(9, 6)
    bias = np.linspace(-1, 1, 6, dtype=np.float32)
    routing = ROUTE(x, router, bias, 2, 2.0)
    want = _literal(z, routing, *matrices, activation)
    for mix in (dense_expert_mix, expert_mix):
        got = jax.jit(mix, static_argnums=5)(z, routing, *matrices, activation)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_router_is_sigmoid_top_k_with_bias_and_weights_without():
    x, _, router, *_ = _inputs(9, 6)
    bias = np.random.default_rng(1).standard_normal(6).astype(np.float32)
    got = ROUTE(x, router, bias, 2, 2.5)
    scores = 1 / (1 + np.exp(-x.astype(np.float64) @ router))
    order = np.argsort(-(scores + bias), axis=1)[:, :3]
    chosen = np.take_along_axis(scores, order[:, :2], 1)
    np.testing.assert_array_equal(got.experts, order[:, :2])
    np.testing.assert_allclose(got.weights, 2.5 * chosen / chosen.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(got.scores, scores, rtol=1e-5)
    np.testing.assert_allclose(got.top, np.take_along_axis(scores + bias, order, 1), rtol=1e-5)


def test_router_is_float32_whatever_the_input_and_keeps_near_ties():
    """Scores that differ by 2e-4, less than bfloat16 resolves: rounded to it they would choose the wrong expert."""
    x = np.ones((4, D), np.float32)
    router = np.zeros((D, 3), np.float32)
    router[:2] = [[1.0, 1.0, 0.9], [0.0, 1e-3, 0.0]]
    got = ROUTE(x.astype(jnp.bfloat16), router, np.zeros(3, np.float32), 1, 1.0)
    assert all(a.dtype == jnp.float32 for a in (got.weights, got.scores, got.top))
    assert np.all(got.experts == 1)
    assert np.all(np.asarray(got.scores).astype(jnp.bfloat16).argmax(-1) == 0)
    assert "HIGHEST" in str(jax.make_jaxpr(lambda x: route(x, router, np.zeros(3), 1, 1.0))(x))


def test_ties_choose_distinct_experts_and_stay_finite():
    """A router of zeros ties every expert; far below zero every score is as small as 1e-13."""
    x, z, router, *matrices = _inputs(5, 6)
    for logits in (0.0, -30.0):
        router = np.zeros_like(router)
        router[0] = logits
        value, grads = _value_and_grads(expert_mix, x, z, router, *matrices, active=3)
        experts = np.asarray(ROUTE(x, router, np.zeros(6, np.float32), 3, 1.0).experts)
        assert all(len(set(row)) == 3 for row in experts)
        assert all(np.isfinite(g).all() for g in (value, *grads))


@pytest.fixture(scope="module")
def layer(tiny, build):
    weights, bind = build(lambda: MoELayer(tiny))
    x = np.random.default_rng(0).standard_normal((2, 6, tiny.dim), np.float32)
    run = jax.jit(lambda weights, x: bind(weights)(tiny, x, np.ones(x.shape[:2], bool), observe=False)[0])
    return weights, run, x


@pytest.mark.parametrize("constant", [1.0, -2.0, 64.0])
def test_a_constant_on_every_bias_changes_no_bit(layer, constant):
    """And another bias on one expert does."""
    weights, run, x = layer
    want = run(weights, x)
    np.testing.assert_array_equal(run(weights | {"bias": weights["bias"] + constant}, x), want)
    moved = np.asarray(weights["bias"]) + np.array([2.0, 0, 0, 0, 0, 0], np.float32)
    assert np.any(run(weights | {"bias": moved}, x) != want)


def test_the_bias_has_no_gradient_and_the_router_has_one(layer):
    weights, run, x = layer
    grads = jax.jit(jax.grad(lambda weights: (run(weights, x) ** 2).sum()))(weights)
    assert not np.any(grads["bias"])
    others = jax.tree.map(lambda g: np.any(g), {name: g for name, g in grads.items() if name != "bias"})
    assert all(jax.tree.leaves(others)), others


LAYERS = {
    "k3": {},
    "latent without norm": dict(latent=c.Latent(11, norm=False)),
    "ordinary, one shared": dict(latent=None, shared=1, scale=2.446),
    "no shared": dict(shared=0),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_its_equation(name, tiny, build):
    """K3 report, eq. 11: routed experts in the latent, weighted, normalized, up, plus shared experts at full width."""
    model = c.replace(tiny, moe=c.replace(tiny.moe, **LAYERS[name]))
    spec = model.moe
    weights, bind = build(lambda: MoELayer(model))
    x = np.random.default_rng(0).standard_normal((2, 5, model.dim), np.float32)
    got, seen = jax.jit(lambda w, x: bind(w)(model, x, np.ones((2, 5), bool), observe=False))(weights, x)
    assert seen is None
    w = jax.tree.map(lambda a: np.asarray(a, np.float64), weights)
    flat = x.reshape(-1, model.dim)
    routing = ROUTE(flat, weights["router"], weights["bias"], spec.active, spec.scale)
    z = flat @ w["latent_down"] if spec.latent else flat
    u = _literal(z, routing, w["gate"], w["up"], w["down"], model.activation)
    if spec.latent and spec.latent.norm:
        u = u / np.sqrt((u**2).mean(-1, keepdims=True) + model.eps) * w["latent_norm"]
    y = u @ w["latent_up"].T if spec.latent else u
    if spec.shared:
        half = Routing(np.zeros((len(flat), 1), int), np.ones((len(flat), 1)), None, None)
        s = {name: matrix.reshape(model.dim, spec.shared, spec.width) for name, matrix in w["shared"].items()}
        for i in range(spec.shared):
            one = [s[name][None, :, i] for name in ("gate", "up", "down")]
            y = y + _literal(flat, half, *one, model.activation)
    np.testing.assert_allclose(got.reshape(-1, model.dim), y, rtol=1e-3, atol=1e-3)


def test_scale_acts_on_the_weights_and_the_latent_norm_undoes_it(tiny, build):
    def output(**changes):
        model = c.replace(tiny, moe=c.replace(tiny.moe, shared=0, **changes))
        weights, bind = build(lambda: MoELayer(model))
        x = np.random.default_rng(0).standard_normal((1, 5, model.dim), np.float32)
        return jax.jit(lambda w, x: bind(w)(model, x, np.ones((1, 5), bool), observe=False)[0])(weights, x)

    np.testing.assert_allclose(output(scale=3.0), output(), rtol=1e-3, atol=1e-3)
    plain = dict(latent=c.Latent(11, norm=False))
    np.testing.assert_allclose(output(scale=3.0, **plain), 3 * output(**plain), rtol=1e-4, atol=1e-4)


def test_a_token_is_not_changed_by_its_neighbors(layer):
    """Dropless: no capacity, so that tokens that want one expert never displace each other."""
    weights, run, x = layer
    crowded = x.copy()
    crowded[:, 1:] = x[:, :1]
    np.testing.assert_allclose(run(weights, crowded)[:, 0], run(weights, x)[:, 0], rtol=1e-5, atol=1e-6)


def test_bfloat16_combines_in_float32(tiny, build):
    weights, bind = build(lambda: MoELayer(tiny))
    x16 = np.random.default_rng(0).standard_normal((2, 6, tiny.dim), np.float32).astype(jnp.bfloat16)
    valid = np.ones((2, 6), bool)
    run = jax.jit(lambda x: bind(weights)(tiny, x, valid, observe=True))
    (got, seen), (want, exact) = run(x16), run(x16.astype(np.float32))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(seen.load, exact.load)
    np.testing.assert_array_equal(seen.histogram, exact.histogram)
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)


@pytest.mark.parametrize(
    "platform, product", [("cpu", "dot_general"), ("tpu", "tpu_custom_call"), ("cuda", "ragged_dot")]
)
def test_the_lowering_target_chooses_the_form(platform, product, monkeypatch):
    """Whatever devices the program is lowered on; products and sum over experts are float32 on every target."""
    monkeypatch.setattr(grouped, "GPU_KERNEL", "xla")
    _, z, _, *matrices = _inputs(4, 6)
    routing = Routing(np.zeros((4, 2), np.int32), np.ones((4, 2), np.float32), None, None)
    traced = jax.jit(expert_mix, static_argnums=5).trace(z.astype(jnp.bfloat16), routing, *matrices, c.SiTU())
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert product in text and ("ragged_dot" in text) == (product == "ragged_dot")
    assert "HIGHEST" in text


@pytest.mark.parametrize("rows", [512, 130], ids=["whole tiles", "padded"])
def test_the_kernel_of_tpus_is_the_grouped_product(rows, monkeypatch):
    """Its interpreted form, values and gradients, an empty group and rows beyond the last among them."""
    monkeypatch.setattr(megablox, "gmm", partial(megablox.gmm, interpret=True))
    rng, sizes = np.random.default_rng(0), jnp.array([50, 0, rows - 80])
    x, w, dy = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((rows, 96), (3, 96, 160), (rows, 160)))
    inside = jnp.arange(rows)[:, None] < sizes.sum()

    def both(product):
        y, pull = jax.vjp(lambda x, w: jnp.where(inside, product(x, w, sizes), 0), x, w)
        dx, dw = pull(dy)
        return y, jnp.where(inside, dx, 0), dw

    for got, want in zip(both(grouped._megablox), both(jax.lax.ragged_dot)):
        got, want = np.float32(got), np.float32(want)
        assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)


def test_one_compilation_serves_every_routing(layer):
    weights, run, x = layer
    before = run._cache_size()
    for seed in range(3):
        run(weights, np.random.default_rng(seed).standard_normal(x.shape, np.float32))
    assert run._cache_size() == max(before, 1)
