"""One optimizer step and one evaluation step: pure functions of a state and a batch."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from k3jax import config as c
from k3jax import guard, observe, sharding
from k3jax.config_layout import ALONE, Layout
from k3jax.config_optim import QKClip, Tunable
from k3jax.data import Batch
from k3jax.loss import LossStats, chunked_cross_entropy
from k3jax.model import balancing, weights
from k3jax.model.weights import Tree, Weights
from k3jax.optim import build_optimizer, learning_rate, orthogonalize, qk_clip, update_rms
from k3jax.parallel.muon import orthogonalize_arrays
from k3jax.run_config import TrainConfig


class TrainState(NamedTuple):
    """Everything that a step reads beside its batch. step: [] int32, steps made, skipped ones included. window: what
    the balancer has counted since its last update, empty where it updates every step. guard: what the guards remember.
    key: [2] uint32, of the run; a layer that draws numbers folds the step and its own name in."""

    step: Array
    weights: Weights
    opt_state: Any
    window: dict[str, balancing.Window]
    guard: guard.GuardState
    key: Array


class StepMetrics(NamedTuple):
    """What a step reports, all without a gradient.

    loss: [] nats per predicted token, float32. grad_norm: [] before clipping. By role: grad_norm_by_role, the norms of
    which grad_norm is the norm; param_norm_by_role, after the step; update_rms. verdict: whether the step was
    applied, and why not; one that was not leaves weights and optimizer as they were. layers: numbers by layer
    (:func:`k3jax.observe.layer_metrics`).
    """

    loss: Array
    weight: Array
    accuracy: Array
    grad_norm: Array
    grad_norm_by_role: dict[str, Array]
    param_norm_by_role: dict[str, Array]
    update_rms: dict[str, Array]
    lr: Array
    verdict: guard.Verdict
    layers: dict[str, Array]


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """The optimizer of a run."""
    meta, on_mesh = weights.structure(config.model).meta, sharding.active()
    return build_optimizer(
        config.optimizer, meta, config.steps, orthogonalize=orthogonalize_arrays if on_mesh else orthogonalize
    )


def program(config: TrainConfig) -> TrainConfig:
    """The run with what its compiled steps do not depend on set to one value: the seed, and the peak of a Tunable
    schedule. Runs that agree in it share their programs."""
    optimizer = config.optimizer
    if isinstance(optimizer.schedule, Tunable):
        schedule = dataclasses.replace(optimizer.schedule.schedule, peak=1.0)
        optimizer = dataclasses.replace(optimizer, schedule=Tunable(schedule))
    return dataclasses.replace(config, seed=0, optimizer=optimizer)


def init_state(config: TrainConfig) -> TrainState:
    """The state before the first step: a pure function of the configuration and its seed."""
    initial = weights.init(config.model, config.seed)
    opt_state = jax.jit(optimizer(config).init)(initial.params)
    key = jax.random.key_data(jax.random.key(config.seed))
    window = _empty_window(config.model, initial.router)
    return TrainState(jnp.zeros((), jnp.int32), initial, opt_state, window, guard.init(config.spikes), key)


def abstract_state(config: TrainConfig) -> TrainState:
    """Shapes and dtypes of the state; nothing is allocated."""
    shapes = weights.structure(config.model).shapes
    opt_state = jax.eval_shape(optimizer(config).init, shapes.params)
    guards = jax.eval_shape(lambda: guard.init(config.spikes))
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    window = jax.eval_shape(partial(_empty_window, config.model), shapes.router)
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32), shapes, opt_state, window, guards, key)


def abstract_batch(config: TrainConfig) -> Batch:
    """Shapes and dtypes of a training batch."""
    ints = jax.ShapeDtypeStruct((config.batch, config.seq_len), jnp.int32)
    return Batch(ints, ints, ints, jax.ShapeDtypeStruct(ints.shape, jnp.float32))


def loss_fn(
    params: Tree,
    router: Tree,
    config: TrainConfig,
    batch: Batch,
    count: Array,
    *,
    capture: bool = False,
    on: Layout = ALONE,
):
    """A batch's part of the mean loss, and what the forward pass saw.

    Args:
      count: [] tokens of the whole step, which the sum over this batch's tokens is divided by.
      capture: keep every layer's hidden state in its report.
      on: what travels between the devices of the mesh in scope, if there is one.

    Returns:
      ``(objective, (stats, reports))``: the float32 number to differentiate, the sums to report, and the layers'
      reports (see :meth:`Transformer.__call__`).
    """
    model = config.model
    net = weights.bind(model, Weights(params, router))
    hidden, reports = net(model, batch.tokens_BT, batch.segments_BT, observe=True, capture=capture, on=on)
    reports = reports if model.loops == 1 else observe.over_loops(reports)
    with jax.named_scope("loss"):
        objective, stats = chunked_cross_entropy(
            hidden, net.head[...], batch.targets_BT, batch.weights_BT, chunk=config.loss_chunk, z_loss=config.z_loss
        )
    observed = [report.balance for segment in reports for report in segment if report.balance is not None]
    aux = [seen.aux_loss.sum() for seen in observed if seen.aux_loss is not None]
    return (objective + stats.weight * sum(aux)) / count, (stats, reports)


def _gradients(config: TrainConfig, state: TrainState, batch: Batch, on: Layout):
    """Gradient of the mean loss, the loss, summed statistics and reports, accumulated over micro-batches in float32."""
    count = jnp.maximum(batch.weights_BT.sum(), 1)
    grad_fn = jax.value_and_grad(partial(loss_fn, config=config, count=count, on=on), has_aux=True)

    def one(batch):
        (objective, (stats, reports)), grads = grad_fn(state.weights.params, state.weights.router, batch=batch)
        return grads, objective, stats, reports

    if config.micro_batches == 1:
        *terms, reports = one(batch)
        return *terms, observe.added_up(reports)
    split = _micro_batches(batch, config.micro_batches)
    shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], split))
    zeros = sharding.zeros(shapes[:3])

    def accumulate(sums, micro_batch):
        *terms, reports = one(micro_batch)
        return jax.tree.map(jnp.add, sums, tuple(terms)), reports

    sums, reports = jax.lax.scan(accumulate, zeros, split)
    return *sums, observe.added_up([[observe.merge(report) for report in segment] for segment in reports])


def _micro_batches(batch: Batch, count: int) -> Batch:
    """Each array [B, ...] as [count, B / count, ...]; on a mesh every device cuts its own rows."""

    def cut(batch):
        return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)

    return sharding.island(cut, sharding.CUT_ROWS)(batch)


def train_step(
    config: TrainConfig, state: TrainState, batch: Batch, on: Layout = ALONE
) -> tuple[TrainState, StepMetrics]:
    """One optimizer step on the global batch. ``on``: what travels between the devices of the mesh in scope.

    The new router bias comes from this batch and counts from the next one on. When the guards refuse the step, only the
    step number and what they remember move; once they have halted the run, nothing does.
    """
    grads, objective, stats, reports = _gradients(config, state, batch, on)
    meta = weights.structure(config.model).meta
    grad_norms = observe.norms_by_role(grads, meta)
    grad_norm = optax.tree.norm(grad_norms)
    loss = stats.nats / jnp.maximum(stats.weight, 1)
    finite = jnp.isfinite(objective) & jnp.isfinite(grad_norm)
    verdict, guards = guard.judge(state.guard, loss, finite, spikes=config.spikes, max_skipped=config.max_skipped)
    kept, rms = _unless_refused(verdict.apply, state, *_apply(config, on, state, grads, reports))
    metrics = StepMetrics(
        loss=loss,
        weight=stats.weight,
        accuracy=stats.correct / jnp.maximum(stats.weight, 1),
        grad_norm=grad_norm,
        grad_norm_by_role=grad_norms,
        param_norm_by_role=observe.norms_by_role(kept[0].params, meta),
        update_rms=rms,
        lr=learning_rate(config.optimizer.schedule, config.steps, state.opt_state),
        verdict=verdict,
        layers=observe.layer_metrics(reports, router_before=state.weights.router, router_after=kept[0].router),
    )
    return TrainState(state.step + (state.guard.halted == 0), *kept, guards, state.key), metrics


def _apply(config: TrainConfig, on: Layout, state: TrainState, grads: Tree, reports):
    """New weights, optimizer state and balancing window, and the RMS of the updates by role."""
    with jax.named_scope("optimizer"):
        params = state.weights.params
        own_grads, own_params = sharding.spread((grads, params), on.optimizer)
        updates, opt_state = optimizer(config).update(own_grads, state.opt_state, own_params)
        params = optax.apply_updates(params, sharding.lie_like(updates, params))
        if config.optimizer.qk_clip is not None:
            params = _clip_attention(config.optimizer.qk_clip, params, reports)
    with jax.named_scope("balance"):
        router, window = _update_router(config.model, state, reports)
    rms = update_rms(updates, weights.structure(config.model).meta)
    return (Weights(params, router), opt_state, window), rms


def _unless_refused(apply: Array, state: TrainState, new, rms):
    """What :func:`_apply` gives, or the old ones. Elementwise, so that new arrays take the place of the old: the
    branches of a conditional would need both at once."""
    old = state.weights, state.opt_state, state.window
    kept = jax.tree.map(lambda new, old: jnp.where(apply, new, old), new, old)
    return kept, jax.tree.map(lambda x: jnp.where(apply, x, 0), rms)


def eval_step(config: TrainConfig, weights_: Weights, batch: Batch, on: Layout = ALONE) -> LossStats:
    """Summed statistics of a held-out batch; balancing neither sees nor moves anything."""
    net = weights.bind(config.model, weights_)
    hidden, _ = net(config.model, batch.tokens_BT, batch.segments_BT, on=on)
    _, stats = chunked_cross_entropy(hidden, net.head[...], batch.targets_BT, batch.weights_BT, chunk=config.loss_chunk)
    return stats


def lower_train_step(config: TrainConfig) -> jax.stages.Lowered:
    """The train step lowered from shapes alone: no array is made and nothing is compiled."""
    step = jax.jit(partial(train_step, config), donate_argnums=0)
    return step.lower(abstract_state(config), abstract_batch(config))


def _at(tree: Tree, *path) -> Tree:
    for key in path:
        tree = tree[key]
    return tree


def _replace_at(tree: Tree, path: tuple, value) -> Tree:
    """A copy of a nested dict with one node replaced."""
    if not path:
        return value
    return {**tree, path[0]: _replace_at(tree[path[0]], path[1:], value)}


def _runs(reports):
    """(segment, run, report) of every stack of layers."""
    for s, segment in enumerate(reports):
        for r, report in enumerate(segment):
            yield s, r, report


def _clip_attention(clip: QKClip, params: Tree, reports) -> Tree:
    for s, r, report in _runs(reports):
        if report.max_logit is not None:
            path = ("segments", s, r, "mixer")
            layer = qk_clip(_at(params, *path), report.max_logit, threshold=clip.threshold)
            params = _replace_at(params, path, layer)
    return params


def _update_router(model: c.ModelConfig, state: TrainState, reports) -> tuple[Tree, dict[str, balancing.Window]]:
    """The router biases of the next step, and what is counted on."""
    router, windows = state.weights.router, {}
    update = jax.vmap(jax.vmap(partial(balancing.update, model.moe.balancer, active=model.moe.active)))
    for s, r, report in _runs(reports):
        if report.balance is not None:
            path, name = ("segments", s, r, "ffn", "bias"), f"{s}.{r}"
            bias = _at(router, *path)
            if name in state.window:
                new, windows[name] = balancing.count_on(
                    state.window[name],
                    bias,
                    report.balance,
                    update,
                    last=(state.step + 1) % model.moe.balancer.window == 0,
                )
            else:
                new = update(bias, report.balance)
            router = _replace_at(router, path, new)
    return router, windows


def _empty_window(model: c.ModelConfig, router: Tree) -> dict[str, balancing.Window]:
    """Nothing counted, for each stack of layers with experts; no entry where every step updates."""
    if not isinstance(getattr(model.moe, "balancer", None), c.QuantileBalancing) or model.moe.balancer.window == 1:
        return {}
    biases = {
        f"{s}.{r}": layers["ffn"]["bias"] for s, segment in router["segments"].items() for r, layers in segment.items()
    }
    return {name: balancing.empty_window(model.moe.balancer, bias) for name, bias in biases.items()}
