"""What a step reports of every layer and every role of parameter, computed inside the step: reductions only.

Every number is of the whole batch, over all micro-batches and devices, without padding.
"""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from k3jax import sharding
from k3jax.model import balancing, kda
from k3jax.model.block import LayerReport
from k3jax.model.weights import Tree
from k3jax.roles import ParamMeta, meta_by_path, meta_of

type Reports = list[list[LayerReport]]


def merge(report: LayerReport) -> LayerReport:
    """The report of a batch from those of its micro-batches, stacked along axis 0 of every leaf."""
    seen, gauges = report.balance, report.gauges
    if seen is not None:
        summed = jax.tree.map(lambda x: x.sum(axis=0), seen._replace(required=None))
        required = None
        if seen.required is not None:
            required = jnp.concatenate(list(sharding.lie(seen.required, sharding.EVERYWHERE)), axis=2)
        seen = summed._replace(required=required)
    if gauges is not None:
        summed = jax.tree.map(lambda x: x.sum(axis=0), gauges)
        gauges = summed._replace(low=gauges.low.min(axis=0), high=gauges.high.max(axis=0))
    max_logit = None if report.max_logit is None else report.max_logit.max(axis=0)
    depth = None if report.depth is None else report.depth.sum(axis=0)
    return LayerReport(seen, max_logit, None, gauges, depth)


def over_loops(reports: Reports) -> Reports:
    """The reports of layers that were gone through several times, stacked along axis 0 of every leaf, as those of one
    time: sums over all, and the hidden state after the last."""

    def one(report: LayerReport) -> LayerReport:
        return merge(report)._replace(hidden=None if report.hidden is None else report.hidden[-1])

    return [[one(report) for report in segment] for segment in reports]


def added_up(reports: Reports) -> Reports:
    """The reports of all layers with what their parts on all devices with tokens add up to.

    On a mesh one all-reduce of integers, the balancer's counts of all layers; one of floats, which only metrics read;
    and one of extremes.
    """
    flat, structure = jax.tree.flatten(reports, is_leaf=lambda node: isinstance(node, LayerReport))
    counts = sharding.added_up([_counts(report) for report in flat], 2)
    sums = sharding.added_up([_sums(report) for report in flat], 2)
    extremes = sharding.greatest([_extremes(report) for report in flat], 2)
    return jax.tree.unflatten(structure, map(_completed, flat, counts, sums, extremes))


def _counts(report: LayerReport) -> tuple | None:
    """Integers: what the balancer decides by."""
    return None if report.balance is None else (report.balance.load, report.balance.tokens, report.balance.histogram)


def _sums(report: LayerReport) -> tuple:
    margin = None if report.balance is None else report.balance.margin
    return margin, None if report.gauges is None else report.gauges._replace(low=None, high=None), report.depth


def _extremes(report: LayerReport) -> tuple | None:
    return None if report.gauges is None else (-report.gauges.low, report.gauges.high)


def _completed(report: LayerReport, counts, sums, extremes) -> LayerReport:
    margin, gauges, depth = sums
    seen = report.balance
    if seen is not None:
        load, tokens, histogram = counts
        required = None if seen.required is None else sharding.lie(seen.required, sharding.EVERYWHERE)
        seen = balancing.Observation(load, tokens, histogram, required, seen.aux_loss, margin)
    if gauges is not None:
        low, high = extremes
        gauges = gauges._replace(low=-low, high=high)
    max_logit = None if report.max_logit is None else sharding.lie(report.max_logit, sharding.EVERYWHERE)
    return LayerReport(seen, max_logit, report.hidden, gauges, depth)


def layer_metrics(reports: Reports, *, router_before: Tree, router_after: Tree) -> dict[str, Array]:
    """Numbers by layer, first layer first; each key exists where the model has such layers.

    MoE layers, L of them:
      load: [L, E] int32, tokens sent to each expert.
      load_max_over_mean: [L], the largest load over the mean one: 1 when they are even.
      dead_share: [L], share of the experts that no token was sent to.
      margin: [L], mean gap of the biased scores between the last expert chosen and the first left out.
      bias_drift: [L], RMS over experts of what this step added to the router bias.
    MLA layers:
      max_logit: [layers, H], the largest attention logit.
    KDA layers:
      log_decay_mean, log_decay_min, log_decay_max: [layers], over every eighth token, heads and key channels; the
        share of the state that a token keeps is its exponential.
      state_norm: [layers], RMS over rows and heads of the Frobenius norm of the state after a row's last token.
    All layers, with attention residuals:
      depth_weights: [layers, 2, S + 1], mean weight of every depth source at the mixer's and the feed-forward part's
        site (embedding first, running sum last; K3 report, arXiv 2607.24653, section 2.2).
    """
    found = {}
    seen = _in_order(reports, lambda report: report.balance and report.balance._replace(histogram=None, required=None))
    if seen is not None:
        found |= _balance_metrics(seen)
        found["bias_drift"] = _bias_drift(reports, router_before, router_after)
    max_logit = _in_order(reports, lambda report: report.max_logit)
    if max_logit is not None:
        found["max_logit"] = max_logit
    gauges = _in_order(reports, lambda report: report.gauges)
    if gauges is not None:
        found |= _gauge_metrics(gauges)
    depth = _in_order(reports, lambda report: report.depth)
    if depth is not None:
        found["depth_weights"] = depth / jnp.maximum(depth.sum(axis=-1, keepdims=True), 1)
    return found


def _balance_metrics(seen: balancing.Observation) -> dict[str, Array]:
    mean_L = seen.load.mean(axis=1)
    return {
        "load": seen.load,
        "load_max_over_mean": seen.load.max(axis=1) / jnp.maximum(mean_L, 1e-9),
        "dead_share": (seen.load == 0).mean(axis=1),
        "margin": seen.margin / jnp.maximum(seen.tokens, 1),
    }


def _gauge_metrics(seen: kda.Gauges) -> dict[str, Array]:
    return {
        "log_decay_mean": seen.log_decay / jnp.maximum(seen.channels, 1),
        "log_decay_min": seen.low,
        "log_decay_max": seen.high,
        "state_norm": jnp.sqrt(seen.square / jnp.maximum(seen.states, 1)),
    }


def _bias_drift(reports: Reports, before: Tree, after: Tree) -> Array:
    """[L] RMS over experts of the change of the router bias."""

    def biases(router: Tree) -> Array:
        stacks = [
            [router["segments"][s][r]["ffn"]["bias"] for r, report in enumerate(segment) if report.balance is not None]
            for s, segment in enumerate(reports)
        ]
        return jnp.concatenate([_join(runs) for runs in stacks if runs])

    return jnp.sqrt(jnp.mean(jnp.square(biases(after) - biases(before)), axis=1))


def _in_order(reports: Reports, pick: Callable[[LayerReport], Any]) -> Any:
    """What ``pick`` takes of every report that has it, each leaf one row per layer in layer order; None if none has
    it."""
    stacks = [[x for report in segment if (x := pick(report)) is not None] for segment in reports]
    stacks = [_join(stack) for stack in stacks if stack]
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), *stacks) if stacks else None


def _join(runs: list[Any]) -> Any:
    """The layers of one segment, from leaves [repeats, run length, ...] per run to [layers, ...] in layer order."""

    def leaf(*stacks: Array) -> Array:
        joined = jnp.concatenate(stacks, axis=1)
        return joined.reshape(-1, *joined.shape[2:])

    return jax.tree.map(leaf, *runs)


def norms_by_role(tree: Tree, meta: Tree) -> dict[str, Array]:
    """L2 norm over the arrays of each role present, float32 scalars keyed by the role's value.

    Args:
      tree: parameters or gradients.
      meta: tree of :class:`ParamMeta` with the same structure.

    Raises:
      ValueError: an array without a role; the message names its path.
    """
    metas: dict[str, ParamMeta] = meta_by_path(meta)
    squares = collections.defaultdict(float)
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        squares[meta_of(metas, path, x.ndim).role.value] += jnp.sum(jnp.square(x.astype(jnp.float32)))
    return {role: jnp.sqrt(squares[role]) for role in sorted(squares)}
