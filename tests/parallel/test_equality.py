"""Every layout gives the loss, the gradients, the router bias and the Muon step of one device.

The smallest model with every part in it, rows of packed documents that cross all borders, and decays so weak that what
one shard leaves behind matters in all later ones. Everything is float32.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import config as c
from k3jax import layouts, observe, placement, sharding, step
from k3jax.config_data import StdlibCorpus
from k3jax.config_optim import Cosine, Optimizer
from k3jax.data import Batch
from k3jax.model import balancing
from k3jax.parallel import context
from k3jax.roles import path_name
from k3jax.run_config import TrainConfig

B, T = 8, 32

LAYOUTS = """
data=8
fsdp=8
expert=8
expert=8,transport=RaggedAllToAll
expert=8,transport=Balanced
context=8
data=2,tensor=4
context=2,tensor=4
data=4,context=2
data=2,fsdp=4
data=2,fsdp=4,optimizer=('data',)
data=2,expert=4
data=2,expert=4,transport=RaggedAllToAll
fsdp=2,expert=4
fsdp=2,expert=4,transport=Balanced
fsdp=4,tensor=2
fsdp=4,context=2,mla=Zigzag
expert=2,context=4,transport=RaggedAllToAll
expert=4,tensor=2
expert=4,tensor=2,transport=Balanced
fsdp=2,expert=2,tensor=2,dense=('expert',)
data=2,expert=2,context=2,optimizer=('data','context')
fsdp=2,context=2,tensor=2
expert=2,context=2,tensor=2
expert=2,context=2,tensor=2,transport=RaggedAllToAll,mla=Zigzag
data=2,context=2,tensor=2,transport=Balanced
""".split()


@pytest.fixture(scope="module")
def config() -> TrainConfig:
    model = c.ModelConfig(
        vocab=264,
        dim=16,
        layers=2,
        full_attention=(2,),
        kda=c.KDA(heads=4, head_dim=8, forget_rank=4),
        mla=c.MLA(heads=4, q_rank=8, kv_rank=8, nope_dim=8, shared_dim=4, v_dim=8),
        dense_width=24,
        dense_layers=0,
        moe=c.MoE(experts=16, active=2, width=8, shared=1, latent=c.Latent(8), balancer=c.QuantileBalancing(bins=50)),
        residual=c.BlockAttnRes(1),
        init_std=0.2,
        dtype="float32",
        remat="full",
    )
    return TrainConfig(
        model=model, optimizer=Optimizer(schedule=Cosine(peak=0.1, warmup=0.0)), data=StdlibCorpus(), seq_len=T, batch=B, steps=4,
        loss_chunk=16,
    )  # fmt: skip


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Documents of 1 to 32 tokens that end anywhere, and padding at the end of some rows."""
    rng = np.random.default_rng(0)
    lengths = [[32], [5, 11, 9, 4], [1, 2, 3, 20, 6], [13, 19], [7], [3, 3, 3, 3, 3, 3], [31, 1], [16, 16]]
    segments = np.full((B, T), -1, np.int32)
    for row, documents in enumerate(lengths):
        ids = np.repeat(np.arange(len(documents)), documents)
        segments[row, : len(ids)] = ids
    tokens, targets = rng.integers(0, 264, (2, B, T), dtype=np.int32)
    return Batch(tokens, targets, segments, (segments >= 0).astype(np.float32))


@pytest.fixture(scope="module")
def state(config):
    """Noise on every array, so that all of them take part, and decays of a few percent a token."""
    state, rng = step.init_state(config), np.random.default_rng(1)

    def shake(path, x):
        weak = -4.0 if path_name(path).endswith("dt_bias") else 0.0
        return jnp.asarray(weak + (0 if weak else x) + 0.1 * rng.standard_normal(x.shape), jnp.float32)

    return state._replace(weights=jax.tree_util.tree_map_with_path(shake, state.weights))


def one_step(config, on, state, batch):
    """Loss, gradients, weights after one step, and what was counted."""
    grads, objective, _, reports = step._gradients(config, state, batch, on)
    (after, *_), _ = step._apply(config, on, state, grads, reports)
    seen = [report.balance.load for segment in reports for report in segment]
    moved = jax.tree.map(lambda new, old: new - old, after.params, state.weights.params)
    layers = observe.layer_metrics(reports, router_before=state.weights.router, router_after=after.router)
    return objective, grads, moved, after.router, seen, layers


def on_mesh(fn, config, text, state, batch):
    """What ``fn`` gives on eight devices."""
    layout = layouts.load(text)
    mesh = placement.make_mesh(layout.sizes)
    placed = placement.put(state, placement.state_shardings(config, mesh, layout))
    with jax.set_mesh(mesh):
        return jax.device_get(jax.jit(partial(fn, config, layout))(placed, placement.put_batch(batch, mesh, 0, 1)))


@pytest.fixture(scope="module")
def alone(config, state, batch):
    return jax.device_get(jax.jit(partial(one_step, config, layouts.Layout()))(state, batch))


def assert_trees_close(got, want, tolerance):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want)):
        scale = np.sqrt(np.mean(np.square(b)))
        error = np.sqrt(np.mean(np.square(a - b))) / scale
        assert scale > 0, f"{path_name(path)} takes no part"
        assert error < tolerance, f"{path_name(path)}: relative RMS {error:.1e}"


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_layout_changes_nothing(config, state, batch, alone, text):
    loss, grads, moved, router, load, layers = on_mesh(one_step, config, text, state, batch)
    assert loss == pytest.approx(alone[0], rel=1e-5)
    assert_trees_close(grads, alone[1], 1e-4)
    assert_trees_close(moved, alone[2], 1e-3)
    for a, b in zip(jax.tree.leaves((router, load)), jax.tree.leaves((alone[3], alone[4]))):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for name, value in layers.items():
        np.testing.assert_allclose(value, alone[5][name], rtol=1e-3, atol=1e-5, err_msg=name)


def loss_and_load(config, on, state, batch):
    objective, (_, reports) = step.loss_fn(*state.weights, config, batch, jnp.float32(64), on=on)
    reports = [[observe.added_up(report) for report in segment] for segment in reports]
    after, _ = step._update_router(config.model, state, reports)
    return objective, [report.balance.load for segment in reports for report in segment], after


@pytest.fixture(scope="module")
def forward_alone(config, state, batch):
    return jax.device_get(jax.jit(partial(loss_and_load, config, layouts.Layout()))(state, batch))


def without_M(*args, _real=context.segment_summary, **kwargs):
    summary = _real(*args, **kwargs)
    return summary._replace(M=jnp.zeros_like(summary.M))


def without_tokens_before(*args, _real=context._left_tails, **kwargs):
    tails, ids = _real(*args, **kwargs)
    return jax.tree.map(jnp.zeros_like, tails), ids


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("entering_state", lambda summaries, initial_state, shard, continues: jnp.zeros_like(initial_state)),
        ("segment_summary", without_M),
        ("_left_tails", without_tokens_before),
    ],
    ids=["no incoming state", "no M", "no halo"],
)
def test_the_suite_would_notice_what_a_shard_does_not_hear(
    monkeypatch, config, state, batch, forward_alone, name, broken
):
    """Negative controls."""
    monkeypatch.setattr(context, name, broken)
    loss, _, _ = on_mesh(loss_and_load, config, "context=8", state, batch)
    assert abs(loss / forward_alone[0] - 1) > 1e-4


def counted_by_every_tensor_rank(x, _real=sharding.partial):
    return _real(sharding.total(x, "tensor"))


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (balancing.sharding, "partial", counted_by_every_tensor_rank),
        (balancing.sharding, "PARTIAL", sharding.ROWS),
    ],
    ids=["tensor ranks counted twice", "an axis left out"],
)
def test_the_suite_would_notice_tokens_counted_wrongly(
    monkeypatch, config, state, batch, forward_alone, owner, name, broken
):
    """Negative controls; and as it is, the counts are exact."""
    right = on_mesh(loss_and_load, config, "data=4,tensor=2", state, batch)
    for a, b in zip(jax.tree.leaves(right[1]), jax.tree.leaves(forward_alone[1])):
        np.testing.assert_array_equal(a, b)
    monkeypatch.setattr(owner, name, broken)
    wrong = on_mesh(loss_and_load, config, "data=4,tensor=2", state, batch)
    assert any(
        np.any(a != b) for a, b in zip(jax.tree.leaves(wrong[1]), jax.tree.leaves(forward_alone[1]))
    )
