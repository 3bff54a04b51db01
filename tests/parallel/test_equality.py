"""Every layout gives the loss, the gradients, the optimizer step and the numbers by layer of one device.

Compilation is what takes time here: one layer does for most layouts, with the mixer and the feed-forward part that the
layout says most about, and the recurrence is token by token. Two layouts see three layers.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_run

from k3jax import config as c
from k3jax import layouts, observe, placement, runtime, sharding, step
from k3jax.data import Batch
from k3jax.model import balancing
from k3jax.parallel import context
from k3jax.plan import hlo
from k3jax.roles import path_name
from pallas_kernels.kda import api

COUNTED = c.QuantileBalancing(bins=50)
CONFIGS = {
    "kda": small_run.run_of(1, (), experts=None),
    "kda, experts": small_run.run_of(1, (), experts=c.AuxLoss(weight=1.0)),
    "mla, experts": small_run.run_of(1, (1,), experts=COUNTED),
    "shared keys": small_run.run_of(2, (1, 2), experts=None, share=2),
    # A scan over two dense layers of KDA, then MLA with experts; two closed blocks and the running sum.
    "deep": small_run.run_of(3, (3,), conv=3, experts=COUNTED, dense_layers=2),
}
# The same arithmetic in another order: what these give is compared with the one named behind them.
VARIANTS = {
    "kda, some kept": (c.replace(CONFIGS["kda"], model=c.replace(CONFIGS["kda"].model, remat=c.Save())), "kda"),
    "mla, micro-batches": (c.replace(CONFIGS["mla, experts"], micro_batches=2), "mla, experts"),
}

CASES = """
kda: fsdp=8
kda: context=8
kda: data=2,tensor=4
kda: data=4,context=2
kda: context=2,tensor=4
kda: fsdp=2,context=4
kda: fsdp=4,tensor=2
kda: data=2,fsdp=2,tensor=2,optimizer=('data',)
kda, some kept: fsdp=2,context=2,tensor=2
kda, experts: expert=8
kda, experts: expert=2,context=4
kda, experts: data=2,context=2,tensor=2
kda, experts: expert=2,context=2,tensor=2
mla, experts: data=8
mla, experts: expert=8,transport=RaggedAllToAll
mla, experts: expert=8,transport=Balanced
mla, experts: data=2,expert=4,transport=RaggedAllToAll
mla, experts: fsdp=2,expert=4
mla, experts: fsdp=2,expert=4,transport=Balanced
mla, experts: expert=4,tensor=2,transport=Balanced
mla, experts: fsdp=4,context=2,mla=Zigzag
mla, experts: context=4,tensor=2,mla=Zigzag
shared keys: fsdp=2,context=2,tensor=2,mla=Zigzag
mla, micro-batches: data=2,expert=2,context=2,transport=RaggedAllToAll
deep: fsdp=2,expert=2,tensor=2,dense=('expert',),optimizer=('fsdp',),transport=RaggedAllToAll
deep: expert=2,context=2,tensor=2,transport=Balanced,mla=Zigzag
""".strip().splitlines()


@pytest.fixture(scope="module", autouse=True)
def token_by_token():
    """The recurrence in its smallest form, on shards of any length: it compiles in half the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "SHORT", small_run.T)
        yield


@pytest.fixture(scope="module")
def batch() -> Batch:
    return small_run.batch()


def whole_step(config, on, state, batch):
    """Loss, gradients, the weights after the step, and the numbers by layer."""
    grads, objective, _, reports = step._gradients(config, state, batch, on)
    (after, *_), _ = step._apply(config, on, state, grads, reports)
    layers = observe.layer_metrics(reports, router_before=state.weights.router, router_after=after.router)
    return objective, grads, after, layers


def on_mesh(fn, config, text, batch):
    """What ``fn`` gives on eight devices."""
    layout = layouts.load(text)
    mesh = placement.make_mesh(layout.sizes)
    placed = placement.put(small_run.state_of(config), placement.state_shardings(config, mesh, layout))
    with jax.set_mesh(mesh), runtime.collection_paused():
        return jax.device_get(jax.jit(partial(fn, config, layout))(placed, placement.put_batch(batch, mesh, 0, 1)))


@functools.cache
def alone(name):
    """What a step gives on one device."""
    config = CONFIGS[name]
    with runtime.collection_paused():
        step_of = jax.jit(partial(whole_step, config, layouts.Layout()))
        return jax.device_get(step_of(small_run.state_of(config), small_run.batch()))


def assert_trees_close(got, want, tolerance):
    """Relative RMS of every array. Arrays of zeros (a depth mixture of one source has no gradient) are zero in both."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        scale = np.sqrt(np.mean(np.square(b)))
        error = np.sqrt(np.mean(np.square(a - b)))
        assert error <= tolerance * scale, f"{path_name(path)}: relative RMS {error / scale:.1e}"


@pytest.mark.parametrize("case", CASES)
def test_a_layout_changes_no_step(batch, case):
    name, text = case.split(": ")
    config, like = VARIANTS.get(name) or (CONFIGS[name], name)
    loss, grads, after, layers = on_mesh(whole_step, config, text, batch)
    expected = alone(like)
    assert loss == pytest.approx(expected[0], rel=1e-5)
    assert_trees_close(grads, expected[1], 1e-4)
    before = jax.device_get(small_run.state_of(config).weights)
    moved, expected_moves = (
        jax.tree.map(np.subtract, weights.params, before.params) for weights in (after, expected[2])
    )
    assert_trees_close(moved, expected_moves, 1e-3)
    for a, b in zip(jax.tree.leaves(after.router), jax.tree.leaves(expected[2].router), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert layers.keys() == expected[3].keys()
    for field, value in layers.items():
        np.testing.assert_allclose(value, expected[3][field], rtol=1e-3, atol=1e-5, err_msg=field)


def test_the_cases_are_what_they_say():
    """Everything moves that may move: experts get different loads, heads are clipped, every matrix takes a step."""
    loss, grads, _, layers = alone("deep")
    assert len(layers["load"]) == 1 and np.ptp(layers["load"]) > 0 and np.any(layers["bias_drift"])
    assert (layers["max_logit"] > small_run.CLIP.threshold).all()
    assert np.isfinite(loss) and all(np.any(x) for x in jax.tree.leaves(grads["segments"][0][1]))
    assert len({text.split(": ")[1] for text in CASES}) >= 24


def loss_and_load(config, on, state, batch):
    objective, (_, reports) = step.loss_fn(*state.weights, config, batch, batch.weights_BT.sum(), on=on)
    reports = observe.added_up(reports)
    return objective, [report.balance.load for segment in reports for report in segment if report.balance is not None]


def test_all_layers_balance_by_one_integer_all_reduce():
    """Over all axes, each of which holds tokens of its own."""
    config, layout = small_run.run_of(2, (2,), experts=COUNTED), layouts.load("data=2,expert=2,tensor=2")
    mesh = placement.make_mesh(layout.sizes)

    def balanced(state, batch):
        _, (_, reports) = step.loss_fn(*state.weights, config, batch, jnp.float32(64), on=layout)
        return step._update_router(config.model, state, observe.added_up(reports))

    with jax.set_mesh(mesh), runtime.collection_paused():
        lowered = jax.jit(balanced).lower(*placement.abstract(config, mesh, layout))
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
def test_the_suite_would_notice_what_a_shard_does_not_hear(monkeypatch, batch, name, broken):
    """Negative controls."""
    monkeypatch.setattr(context, name, broken)
    loss, _ = on_mesh(loss_and_load, CONFIGS["kda"], "context=8", batch)
    assert abs(loss / alone("kda")[0] - 1) > 1e-4


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
def test_the_suite_would_notice_tokens_counted_wrongly(monkeypatch, batch, owner, name, broken):
    """Negative controls."""
    monkeypatch.setattr(owner, name, broken)
    _, (load,) = on_mesh(loss_and_load, CONFIGS["mla, experts"], "data=4,tensor=2", batch)
    assert np.any(load[0] != alone("mla, experts")[3]["load"])
