"""Muon against the golden, against Optax, against the singular values, and against loops over its own blocks."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from k3jax.config_optim import Muon
from k3jax.optim import newton_schulz, orthogonalize, scale_by_muon
from k3jax.optim.muon import NEWTON_SCHULZ
from k3jax.roles import ParamMeta, Role

GOLDEN = pathlib.Path(__file__).parents[1] / "goldens" / "ops" / "muon.npz"

LEAD = (2, 3)

# name: (meta, shape without the layer axes, reduction axes, output axes), axes counted with the layer axes.
PARAMETERS = {
    "kda_q": (ParamMeta(Role.HEADS, ("embed", "heads", "key")), (24, 4, 8), (2,), (4,)),
    "kda_v": (ParamMeta(Role.HEADS, ("embed", "heads", "value")), (24, 4, 8), (2,), (4,)),
    "q_up": (ParamMeta(Role.HEADS, ("rank", "heads", "key")), (10, 4, 12), (2,), (4,)),
    "heads_first": (ParamMeta(Role.HEADS, ("heads", "embed", "key")), (4, 24, 8), (3,), (4,)),
    "out": (ParamMeta(Role.MATRIX, ("embed", "heads", "value")), (24, 4, 8), (2,), (3, 4)),
    "forget_out": (ParamMeta(Role.MATRIX, ("rank", "heads", "key")), (6, 4, 8), (2,), (3, 4)),
    "kv_down": (ParamMeta(Role.MATRIX, ("embed", "rank")), (24, 10), (2,), (3,)),
    "expert_up": (ParamMeta(Role.EXPERTS, ("experts", "latent", "ffn")), (5, 12, 20), (3,), (4,)),
    "expert_down": (ParamMeta(Role.EXPERTS, ("experts", "latent", "ffn")), (5, 20, 12), (3,), (4,)),
    "router": (ParamMeta(Role.ROUTER, ("embed", "experts")), (24, 5), (2,), (3,)),
}
META = {name: entry[0] for name, entry in PARAMETERS.items()}


def random_tree(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=LEAD + entry[1]).astype("float32") for name, entry in PARAMETERS.items()}


def orthogonalized(tree, config, meta=META):
    return jax.tree.map(np.asarray, jax.jit(lambda g: orthogonalize(g, meta, config=config))(tree))


def matrix_with_condition(condition, rows=16, cols=40, n=64):
    """A stack of matrices whose singular values spread evenly in the logarithm from 1 to 1/condition."""
    rng = np.random.default_rng(0)
    u = np.linalg.qr(rng.normal(size=(n, rows, rows)))[0]
    v = np.linalg.qr(rng.normal(size=(n, cols, rows)))[0]
    return jnp.asarray((u * np.geomspace(1 / condition, 1, rows)) @ v.swapaxes(1, 2), jnp.float32)


def test_golden():
    golden = np.load(GOLDEN)
    meta = {str(i): ParamMeta(Role.MATRIX, ("in", "out")) for i in range(3)}
    lr, decay = 0.02, 0.1
    optimizer = optax.chain(
        scale_by_muon(Muon(newton_schulz="jordan5", momentum=0.95, eps=1e-7, rms=0.2), meta),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(lr),
    )
    params = {name: jnp.asarray(golden[f"init_{name}"]) for name in meta}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for t in range(5):
        updates, state = update({name: golden[f"grad_{t}_{name}"] for name in meta}, state, params)
        params = optax.apply_updates(params, updates)
        for name in meta:
            np.testing.assert_allclose(params[name], golden[f"after_{t}_{name}"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("schedule", "dtype", "condition", "low", "high"),
    [
        ("jordan5", "float32", 1e1, 0.68, 1.14),
        ("jordan5", "float32", 1e2, 0.68, 1.14),
        ("jordan5", "float32", 1e3, 0.30, 1.21),
        ("jordan5", "bfloat16", 1e1, 0.66, 1.17),
        ("polar5", "float32", 1e2, 0.86, 1.13),
        ("polar5", "float32", 1e3, 0.50, 1.13),
        ("polar8", "float32", 1e2, 0.999, 1.001),
        ("polar8", "float32", 1e3, 0.999, 1.001),
        ("hybrid10", "float32", 1e3, 0.999, 1.001),
    ],
)
def test_singular_values(schedule, dtype, condition, low, high):
    """The norm puts the largest singular value below one, so at condition 1e3 the smallest start below 1e-3."""
    x = newton_schulz(matrix_with_condition(condition), schedule=schedule, dtype=dtype)
    s = np.linalg.svd(x, compute_uv=False)
    assert low <= s.min() and s.max() <= high, (s.min(), s.max())


def test_polar8_is_the_polar_factor():
    x = matrix_with_condition(100.0)
    u, _, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    np.testing.assert_allclose(newton_schulz(x, schedule="polar8"), u @ vt, atol=1e-3)
    tall = newton_schulz(jnp.swapaxes(x, 1, 2), schedule="polar8")
    np.testing.assert_allclose(tall, (u @ vt).swapaxes(1, 2), atol=1e-3)
    assert np.abs(newton_schulz(x, schedule="jordan5") - u @ vt).max() > 1e-2, "a loose schedule must not pass"


def test_equals_optax():
    """Optax corrects the bias of its averages and we do not, so it is given our momentum with beta = 0."""
    config = Muon(newton_schulz="polar5", eps=1e-8)
    dimensions = {name: optax.contrib.MuonDimensionNumbers(entry[2], entry[3]) for name, entry in PARAMETERS.items()}
    table = NEWTON_SCHULZ["polar5"]
    oracle = optax.chain(
        optax.contrib.scale_by_muon(
            table, len(table), beta=0.0, nesterov=False, weight_dimension_numbers=dimensions, eps=1e-8
        ),
        optax.contrib._muon.scale_by_shape(dimensions, consistent_rms=0.2),
    )
    ours = scale_by_muon(config, META)
    params = random_tree(0)
    state, momentum = jax.jit(ours.init)(params), jax.tree.map(np.zeros_like, params)
    oracle_state = jax.jit(oracle.init)(params)
    oracle_update, update = jax.jit(oracle.update), jax.jit(ours.update)
    for t in range(2):
        gradients = random_tree(t + 1)
        updates, state = update(gradients, state)
        momentum = jax.tree.map(lambda m, g: 0.95 * m + 0.05 * g, momentum, gradients)
        lookahead = jax.tree.map(lambda m, g: 0.95 * m + 0.05 * g, momentum, gradients)
        expected, _ = oracle_update(lookahead, oracle_state)
        for name in PARAMETERS:
            np.testing.assert_allclose(updates[name], expected[name], atol=5e-6, err_msg=name)


def test_one_stack_equals_one_block_at_a_time():
    """Grouping, heads, experts and layers: every block alone gives the same, and a wrong cut does not."""
    g = random_tree(3)
    grouped = orthogonalized(g, Muon())
    alone = jax.jit(lambda x: 0.2 * max(x.shape) ** 0.5 * newton_schulz(x))

    for name in ("kda_q", "kda_v", "q_up"):
        for layer, head in [((0, 0), 0), ((1, 2), 3), ((0, 1), 2)]:
            block = grouped[name][layer][:, head]
            np.testing.assert_allclose(block, alone(g[name][layer][:, head]), atol=5e-6, err_msg=name)
    for name in ("expert_up", "expert_down"):
        for layer, expert in [((0, 0), 0), ((1, 2), 4)]:
            block = grouped[name][layer][expert]
            np.testing.assert_allclose(block, alone(g[name][layer][expert]), atol=5e-6, err_msg=name)
    for name in ("out", "kv_down", "router", "forget_out"):
        matrix = g[name][1, 2].reshape(g[name].shape[2], -1)
        np.testing.assert_allclose(grouped[name][1, 2].reshape(matrix.shape), alone(matrix), atol=5e-6, err_msg=name)
    merged = orthogonalized(g, Muon(heads="merged"))
    whole = alone(g["kda_q"][0, 0].reshape(24, 32)).reshape(24, 4, 8)
    np.testing.assert_allclose(merged["kda_q"][0, 0], whole, atol=5e-6)
    assert np.abs(merged["kda_q"] - grouped["kda_q"]).max() > 1e-2
    np.testing.assert_allclose(merged["expert_up"], grouped["expert_up"], atol=1e-6)


def test_heads_get_equal_updates():
    """Heads whose gradients span four decades; only a block per head gives each the same update size."""
    g = {"q": np.random.default_rng(0).normal(size=(32, 4, 8)) * np.array([1, 1e-1, 1e-2, 1e-3])[:, None]}
    meta = {"q": ParamMeta(Role.HEADS, ("embed", "heads", "key"))}

    def rms_of_heads(heads):
        update = orthogonalized(g, Muon(heads=heads), meta)["q"]
        return np.sqrt(np.mean(np.square(update), (0, 2)))

    split, merged = rms_of_heads("split"), rms_of_heads("merged")
    assert split.max() / split.min() < 1.1
    assert merged.max() / merged.min() > 2


def test_update_rms_does_not_depend_on_shape():
    """0.2 times the shrink of the schedule, whatever the block."""
    for schedule, low, high in [("jordan5", 0.8, 1.15), ("polar8", 0.99, 1.01)]:
        updates = orthogonalized(random_tree(5), Muon(newton_schulz=schedule))
        for name, u in updates.items():
            rms = np.sqrt(np.mean(np.square(u)))
            assert 0.2 * low <= rms <= 0.2 * high, (schedule, name, rms)


def test_degenerate_gradients_are_finite():
    rank_one = {scale: scale * np.ones((2, 3, 24, 10), "float32") for scale in (0.0, 1e-12, 1.0, 1e12)}
    rank_one[1.0][0, 0] = 0
    meta = {scale: META["kv_down"] for scale in rank_one}
    update = orthogonalized(rank_one, Muon(), meta)
    assert not update[0.0].any() and not update[1.0][0, 0].any()
    for scale, u in update.items():
        assert np.isfinite(u).all(), scale
    np.testing.assert_allclose(update[1e12], update[1.0][1, 1, 0, 0], rtol=1e-4)


def test_dtypes():
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), random_tree(0))
    optimizer = scale_by_muon(Muon(dtype="bfloat16"), META)
    state = jax.eval_shape(optimizer.init, params)
    updates, new_state = jax.eval_shape(optimizer.update, params, state)
    assert {x.dtype.name for x in jax.tree.leaves(updates)} == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(new_state)} == {"float32"}
    assert jax.tree.structure(state) == jax.tree.structure(new_state)


def test_loops_do_not_grow_with_parameters():
    def loops(count):
        names = [f"w{i}" for i in range(count)]
        meta = {name: ParamMeta(Role.MATRIX, ("in", "out")) for name in names}
        shapes = {name: jax.ShapeDtypeStruct((8, 4) if i % 2 else (4, 8), "float32") for i, name in enumerate(names)}
        return str(jax.make_jaxpr(lambda g: orthogonalize(g, meta, config=Muon()))(shapes)).count("scan[")

    assert loops(2) == loops(12) == 1
