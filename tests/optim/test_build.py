"""The whole optimizer: who is updated by what, decayed or not, and refused without a role."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from k3jax.config_optim import WSD, AdamW, Cosine, Muon, Optimizer
from k3jax.optim import build_optimizer, make_schedule, scale_by_muon, update_rms
from k3jax.roles import ParamMeta, Role

META = {
    "embed": ParamMeta(Role.EMBEDDING, ("vocab", "embed")),
    "head": ParamMeta(Role.UNEMBEDDING, ("embed", "vocab")),
    "blocks": {
        "norm": ParamMeta(Role.NORM, ("embed",)),
        "q": ParamMeta(Role.HEADS, ("embed", "heads", "key")),
        "A_log": ParamMeta(Role.VECTOR, ("heads",)),
        "dt_bias": ParamMeta(Role.VECTOR, ("heads", "key")),
        "conv": ParamMeta(Role.CONV, ("heads", "key", "tap")),
        "router": ParamMeta(Role.ROUTER, ("embed", "experts")),
        "down": ParamMeta(Role.MATRIX, ("embed", "rank")),
        "experts": ParamMeta(Role.EXPERTS, ("experts", "latent", "ffn")),
    },
}
SIZES = {"vocab": 32, "embed": 16, "heads": 4, "key": 8, "tap": 4, "experts": 6, "rank": 12, "latent": 8, "ffn": 10}
CONSTANT = WSD(peak=1e-2, floor=1e-2, warmup=0.0, decay=0.5)


def random_params(seed=0):
    leaves, treedef = jax.tree.flatten(META)
    lead = [() if meta.role in (Role.EMBEDDING, Role.UNEMBEDDING) else (2, 3) for meta in leaves]
    shapes = [n + tuple(SIZES[axis] for axis in meta.axes) for n, meta in zip(lead, leaves)]
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(treedef, [rng.normal(size=shape).astype("float32") for shape in shapes])


def first_update(config, gradients, params):
    optimizer = build_optimizer(config, META, 10)
    step = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[0])
    return jax.tree.map(np.asarray, step(gradients, params))


def test_decay_goes_where_it_belongs():
    params = random_params()
    updates = first_update(Optimizer(schedule=CONSTANT), jax.tree.map(np.zeros_like, params), params)
    for path, u in jax.tree_util.tree_leaves_with_path(updates):
        name = path[-1].key
        p = params.get(name, params["blocks"].get(name))
        expected = np.zeros_like(p) if name in ("norm", "A_log", "dt_bias") else -1e-2 * 0.1 * p
        np.testing.assert_allclose(u, expected, atol=1e-8, err_msg=name)


def test_groups():
    """Each parameter equals its own optimizer run alone; embeddings and head are never orthogonalized."""
    params, gradients = random_params(), random_params(1)
    config = Optimizer(matrices=Muon(lr_scale=2.0), router=AdamW(weight_decay=0.3), schedule=CONSTANT, clip_norm=None)
    updates = first_update(config, gradients, params)

    def alone(transform, name, lr, decay):
        optimizer = optax.chain(transform, optax.add_decayed_weights(decay), optax.scale_by_learning_rate(lr))
        tree = {"blocks": {name: params["blocks"][name]}} if name in params["blocks"] else {name: params[name]}
        grads = {"blocks": {name: gradients["blocks"][name]}} if "blocks" in tree else {name: gradients[name]}
        step = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[0])
        return jax.tree.leaves(step(grads, tree))[0]

    adam = optax.scale_by_adam(0.9, 0.95, 1e-8)
    for name, decay in [("embed", 0.1), ("head", 0.1), ("norm", 0.0), ("conv", 0.1), ("router", 0.3)]:
        u = updates.get(name, updates["blocks"].get(name))
        np.testing.assert_allclose(u, alone(adam, name, 1e-2, decay), atol=1e-7, err_msg=name)
    for name in ("q", "down", "experts"):
        expected = alone(scale_by_muon(Muon(), META), name, 2e-2, 0.1)
        np.testing.assert_allclose(updates["blocks"][name], expected, atol=1e-6, err_msg=name)

    def spread(u):
        s = np.linalg.svd(u, compute_uv=False)
        return s.max() / s.min()

    assert spread(updates["blocks"]["down"][0, 0] + 2e-3 * params["blocks"]["down"][0, 0]) < 1.5
    assert spread(updates["embed"]) > 2 and spread(updates["head"]) > 2


def test_variants():
    params, gradients = random_params(), random_params(1)
    adamw = first_update(Optimizer(matrices=AdamW(), schedule=CONSTANT, clip_norm=None), gradients, params)
    expected = -1e-2 * (np.sign(gradients["blocks"]["q"]) + 0.1 * params["blocks"]["q"])
    np.testing.assert_allclose(adamw["blocks"]["q"], expected, atol=1e-5)
    muon = first_update(Optimizer(router=Muon(newton_schulz="polar8"), schedule=CONSTANT), gradients, params)
    router = (muon["blocks"]["router"] / -1e-2 - 0.1 * params["blocks"]["router"])[1, 1]
    np.testing.assert_allclose(np.linalg.svd(router, compute_uv=False), 0.2 * 16**0.5, rtol=1e-2)


def test_gradients_are_clipped_by_their_global_norm():
    params, gradients = random_params(), random_params(1)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradients)))
    scaled = jax.tree.map(lambda g: g * 0.5 / norm, gradients)

    def moments(clip_norm, gradients):
        optimizer = build_optimizer(Optimizer(clip_norm=clip_norm), META, 10)
        state = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[1])(gradients, params)
        return np.concatenate([np.ravel(x) for x in jax.tree.leaves(state)])

    expected = moments(None, scaled)
    np.testing.assert_allclose(moments(0.5, gradients), expected, atol=1e-6)
    assert np.abs(moments(None, gradients) - expected).max() > 1e-2


def test_learning_rate_follows_the_schedule():
    schedule = Cosine(peak=1e-2, floor=1e-3, warmup=0.2)
    params = random_params()
    zeros = jax.tree.map(np.zeros_like, params)
    optimizer = build_optimizer(Optimizer(schedule=schedule), META, 10)
    state, update = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
    for t in range(10):
        updates, state = update(zeros, state, params)
        lr = float(make_schedule(schedule, 10)(t))
        for name in ("q", "router", "conv"):
            np.testing.assert_allclose(updates["blocks"][name], -lr * 0.1 * params["blocks"][name], atol=1e-8)


def test_a_parameter_without_a_role_is_refused():
    params = random_params()
    optimizer = build_optimizer(Optimizer(), META, 10)
    params["blocks"]["gate"] = jnp.ones((2, 3, 4, 4))
    with pytest.raises(ValueError, match=r"without a role.*'blocks/gate'"):
        optimizer.init(params)
    with pytest.raises(ValueError, match=r"without a role.*'blocks/gate'"):
        build_optimizer(Optimizer(), {**META, "blocks": {**META["blocks"], "gate": None}}, 10)


def test_update_rms():
    tree = jax.tree.map(np.ones_like, random_params())
    tree["blocks"]["dt_bias"] *= 3
    rms = update_rms(tree, META)
    assert set(rms) == {role.value for role in Role}
    np.testing.assert_allclose(rms["vector"], np.sqrt((4 * 1 + 32 * 9) / 36), rtol=1e-6)
    assert all(value == 1 for role, value in rms.items() if role != "vector")


def test_muon_descends_where_roles_are_right():
    """A small least-squares fit: the loss falls by two orders of magnitude, all groups working together."""
    meta = {"w": ParamMeta(Role.MATRIX, ("in", "out")), "b": ParamMeta(Role.VECTOR, ("out",))}
    x = jax.random.normal(jax.random.key(0), (64, 8))
    y = x @ jax.random.normal(jax.random.key(1), (8, 6)) + 1.0
    params = {"w": jnp.zeros((8, 6)), "b": jnp.zeros(6)}
    decay_free = Optimizer(matrices=Muon(weight_decay=0.0), schedule=Cosine(peak=0.2))
    optimizer = build_optimizer(decay_free, meta, 100)

    @jax.jit
    def step(params, state):
        loss, g = jax.value_and_grad(lambda p: jnp.mean(jnp.square(x @ p["w"] + p["b"] - y)))(params)
        updates, state = optimizer.update(g, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = optimizer.init(params)
    losses = []
    for _ in range(100):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.01 * losses[0], losses[::20]
