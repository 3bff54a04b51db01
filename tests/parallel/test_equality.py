"""Every layout gives the loss, the gradients, the router bias and the Muon step of one device.

The smallest model with every part in it, rows of packed documents that cross all borders, and decays so weak that what
one shard leaves behind matters in all later ones. Everything is float32.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import config as c
from k3jax import layouts, observe, placement, sharding, step
from k3jax.config_data import StdlibCorpus
from k3jax.config_optim import Cosine, Optimizer, QKClip
from k3jax.data import Batch
from k3jax.model import balancing
from k3jax.parallel import context
from k3jax.plan import hlo
from k3jax.roles import path_name
from k3jax.run_config import TrainConfig
from pallas_kernels.kda import api

B, T = 8, 32

# Compilation is what takes time here. So one layer has to do for a layout, with the mixer that it says most about, and
# all of a step is compiled for the first few only.
WHOLE_STEPS = """
data=2,fsdp=2,tensor=2,optimizer=('data',)
expert=2,context=2,tensor=2,transport=Balanced
""".split()

KDA_LAYERS = """
fsdp=8
expert=8
context=8
data=2,tensor=4
data=4,context=2
context=2,tensor=4
context=4,tensor=2
fsdp=2,context=4
fsdp=4,tensor=2
data=2,context=2,tensor=2
fsdp=2,context=2,tensor=2
expert=2,context=4
expert=2,context=2,tensor=2
""".split()

MLA_LAYERS = """
data=8
expert=8,transport=RaggedAllToAll
expert=8,transport=Balanced
data=2,expert=4,transport=RaggedAllToAll
fsdp=2,expert=4
fsdp=2,expert=4,transport=Balanced
expert=4,tensor=2,transport=Balanced
fsdp=4,context=2,mla=Zigzag
context=4,tensor=2,mla=Zigzag
fsdp=2,expert=2,tensor=2,dense=('expert',)
data=2,expert=2,context=2,transport=RaggedAllToAll
""".split()


def small(full_attention: tuple[int, ...], layers: int) -> TrainConfig:
    model = c.ModelConfig(
        vocab=264,
        dim=16,
        layers=layers,
        full_attention=full_attention,
        kda=c.KDA(heads=4, head_dim=8, forget_rank=4, conv=3),
        mla=c.MLA(heads=4, q_rank=8, kv_rank=8, nope_dim=8, shared_dim=4, v_dim=8),
        dense_width=24,
        dense_layers=0,
        moe=c.MoE(experts=16, active=2, width=8, shared=1, latent=c.Latent(8), balancer=c.QuantileBalancing(bins=50)),
        residual=c.BlockAttnRes(1),
        init_std=0.2,
        dtype="float32",
        remat="full" if layers == 2 else "none",
    )
    optimizer = Optimizer(schedule=Cosine(peak=0.1, warmup=0.0), qk_clip=QKClip(threshold=0.2))
    return TrainConfig(
        model=model, optimizer=optimizer, data=StdlibCorpus(), seq_len=T, batch=B, steps=4, loss_chunk=16
    )


def balanced_by(config: TrainConfig, balancer: c.Balancer) -> TrainConfig:
    return c.replace(config, model=c.replace(config.model, moe=c.replace(config.model.moe, balancer=balancer)))


CONFIGS = {"kda": small((), 1), "mla": small((1,), 1), "both": small((2,), 2)}
CONFIGS["micro-batches"] = c.replace(balanced_by(CONFIGS["mla"], c.ExactQuantileBalancing()), micro_batches=2)
CONFIGS["auxiliary loss"] = balanced_by(CONFIGS["mla"], c.AuxLoss(weight=1.0))


@pytest.fixture(scope="module", autouse=True)
def token_by_token():
    """The recurrence in its smallest form, on shards of any length: it compiles in half the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "SHORT", T)
        yield


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


@functools.cache
def state_of(name: str):
    """Noise on every array, so that all of them take part, and decays of a few percent a token."""
    state, rng = step.init_state(CONFIGS[name]), np.random.default_rng(1)

    def shake(path, x):
        weak = path_name(path).endswith("dt_bias")
        return jnp.asarray((-4.0 if weak else np.asarray(x)) + 0.1 * rng.standard_normal(x.shape), jnp.float32)

    return state._replace(weights=jax.tree_util.tree_map_with_path(shake, state.weights))


def gradients(config, on, state, batch):
    """Loss, gradients, the router bias after the step, and the loads of experts."""
    grads, objective, _, reports = step._gradients(config, state, batch, on)
    router, _ = step._update_router(config.model, state, reports)
    return objective, grads, router, [report.balance.load for segment in reports for report in segment]


def whole_step(config, on, state, batch):
    """The same, how far the weights move, and the numbers by layer."""
    grads, objective, _, reports = step._gradients(config, state, batch, on)
    (after, *_), _ = step._apply(config, on, state, grads, reports)
    moved = jax.tree.map(lambda new, old: new - old, after.params, state.weights.params)
    layers = observe.layer_metrics(reports, router_before=state.weights.router, router_after=after.router)
    return objective, grads, after.router, layers["load"], moved, layers


def on_mesh(fn, name, text, batch):
    """What ``fn`` gives on eight devices."""
    config, state = CONFIGS[name], state_of(name)
    layout = layouts.load(text)
    mesh = placement.make_mesh(layout.sizes)
    placed = placement.put(state, placement.state_shardings(config, mesh, layout))
    with jax.set_mesh(mesh):
        return jax.device_get(jax.jit(partial(fn, config, layout))(placed, placement.put_batch(batch, mesh, 0, 1)))


@pytest.fixture(scope="module")
def alone(batch):
    """What a function gives on one device."""

    @functools.cache
    def of(fn, name):
        return jax.device_get(jax.jit(partial(fn, CONFIGS[name], layouts.Layout()))(state_of(name), batch))

    return of


def assert_trees_close(got, want, tolerance):
    """Relative RMS of every array. Arrays of zeros (a depth mixture of one source has no gradient) are zero in both."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want)):
        scale = np.sqrt(np.mean(np.square(b)))
        error = np.sqrt(np.mean(np.square(a - b)))
        assert error <= tolerance * scale, f"{path_name(path)}: relative RMS {error / scale:.1e}"


def assert_same_gradients(got, want):
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    assert_trees_close(got[1], want[1], 1e-4)
    for a, b in zip(jax.tree.leaves(got[2:4]), jax.tree.leaves(want[2:4])):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


LAYERS = [("kda", text) for text in KDA_LAYERS] + [("mla", text) for text in MLA_LAYERS]
LAYERS += [("micro-batches", "fsdp=2,context=2,tensor=2"), ("auxiliary loss", "expert=2,context=2,tensor=2")]


@pytest.mark.parametrize(("name", "text"), LAYERS)
def test_a_layout_changes_no_gradient(batch, alone, name, text):
    assert_same_gradients(on_mesh(gradients, name, text, batch), alone(gradients, name))


@pytest.mark.parametrize("text", WHOLE_STEPS)
def test_a_layout_changes_no_step(batch, alone, text):
    got, want = on_mesh(whole_step, "both", text, batch), alone(whole_step, "both")
    assert_same_gradients(got, want)
    assert_trees_close(got[4], want[4], 1e-3)
    for name, value in got[5].items():
        np.testing.assert_allclose(value, want[5][name], rtol=1e-3, atol=1e-5, err_msg=name)


def loss_and_load(config, on, state, batch):
    objective, (_, reports) = step.loss_fn(*state.weights, config, batch, jnp.float32(64), on=on)
    reports = observe.added_up(reports)
    after, _ = step._update_router(config.model, state, reports)
    return objective, [report.balance.load for segment in reports for report in segment], after


def test_all_layers_balance_by_one_integer_all_reduce():
    """Over all axes, each of which holds tokens of its own."""
    config, layout = CONFIGS["both"], layouts.load("data=2,expert=2,tensor=2")
    mesh = placement.make_mesh(layout.sizes)
    with jax.set_mesh(mesh):
        lowered = jax.jit(partial(loss_and_load, config, layout)).lower(*placement.abstract(config, mesh, layout))
    program = hlo.Program.parse(lowered.compile().as_text())
    counts = [(one, times) for one, _, times in program.executed() if one.opcode.startswith("all-reduce")]
    ((one, times),) = [(one, times) for one, times in counts if one.shapes[0][0] == "s32"]
    moe = config.model.moe
    assert times == 1 and one.bytes == 4 * config.model.layers * (moe.experts * (1 + moe.balancer.bins) + 1)
    assert hlo.replica_groups(one.attributes, 8).shape == (1, 8)


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
def test_the_suite_would_notice_what_a_shard_does_not_hear(monkeypatch, batch, alone, name, broken):
    """Negative controls."""
    monkeypatch.setattr(context, name, broken)
    loss, _, _ = on_mesh(loss_and_load, "kda", "context=8", batch)
    assert abs(loss / alone(loss_and_load, "kda")[0] - 1) > 1e-4


def counted_by_every_tensor_rank(x, _real=sharding.partial):
    return _real(sharding.total(x, "tensor"))


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (balancing.sharding, "partial", counted_by_every_tensor_rank),
        (balancing.sharding, "TOKEN_AXES", sharding.BATCH_AXES),
    ],
    ids=["tensor ranks counted twice", "an axis left out"],
)
def test_the_suite_would_notice_tokens_counted_wrongly(monkeypatch, batch, alone, owner, name, broken):
    """Negative controls."""
    monkeypatch.setattr(owner, name, broken)
    _, load, _ = on_mesh(loss_and_load, "mla", "data=4,tensor=2", batch)
    assert np.any(load[0] != alone(loss_and_load, "mla")[1][0])
