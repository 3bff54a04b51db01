"""Keeping experts evenly loaded: Quantile Balancing, and the rules it is compared with. Pure functions of scores.

A balancer watches a batch (:func:`observe`, per micro-batch, inside the forward pass), its observations add up over
micro-batches and devices, and once per step it moves the router bias (:func:`update`), which counts from the next
step on. The bias takes part in the selection of experts only, never in their weights, and carries no gradient.

K3 report (arXiv 2607.24653), section 2.3.3 and appendices C and D; sign rule arXiv 2408.15664; auxiliary loss
arXiv 2101.03961.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from k3jax import config as c
from k3jax import sharding

COARSE_BINS = 32


class Observation(NamedTuple):
    """What one MoE layer reports about one batch. ``None`` where the balancer does not ask for it. Sums over tokens
    leave an island in parts (:func:`k3jax.sharding.partial`).

    load: [E] int32 tokens sent to each expert, padding left out.
    tokens: [] int32 tokens seen, padding left out.
    histogram: [E, bins] int32 counts of required bias (Quantile Balancing).
    required: [N, E] float32 required bias of every token, +inf for padding (exact Quantile Balancing).
    aux_loss: [] float32, with a gradient (auxiliary loss).
    margin: [] float32 sum over tokens of the gap between the last expert chosen and the first left out.
    """

    load: Array
    tokens: Array
    histogram: Array | None
    required: Array | None
    aux_loss: Array | None
    margin: Array


def observe(balancer: c.Balancer, scores_NE, bias_E, selected_NA, biased_top_NA1, valid_N) -> Observation:
    """What ``balancer`` needs to know of a batch.

    Args:
      scores_NE: float32 router scores, without bias.
      bias_E: float32 bias that the selection used.
      selected_NA: experts of each token.
      biased_top_NA1: the A + 1 largest biased scores; the last is the cutoff alpha.
      valid_N: bool, False for padding.
    """
    experts = scores_NE.shape[1]
    chosen_NE = (selected_NA[..., None] == jnp.arange(experts)).any(axis=1) & valid_N[:, None]
    load = chosen_NE.sum(axis=0, dtype=jnp.int32)
    histogram = required = aux_loss = None
    required_NE = jax.lax.stop_gradient(biased_top_NA1[:, -1:] - scores_NE)
    match balancer:
        case c.QuantileBalancing(bins):
            histogram = required_bias_histogram(required_NE, bias_E, valid_N, bins)
        case c.ExactQuantileBalancing():
            required = jnp.where(valid_N[:, None], required_NE, jnp.inf)
        case c.AuxLoss(weight):
            aux_loss = weight * switch_loss(scores_NE, load, selected_NA.shape[1], valid_N)
    margin = jnp.where(valid_N, biased_top_NA1[:, -2] - biased_top_NA1[:, -1], 0).sum()
    sums = load, valid_N.sum(dtype=jnp.int32), histogram, jax.lax.stop_gradient(margin)
    load, tokens, histogram, margin = sharding.partial(sums)
    return Observation(load, tokens, histogram, required, aux_loss, margin)


def observation_specs(balancer: c.Balancer) -> Observation:
    """How an observation leaves an island, one spec per field that is not None."""
    part = sharding.PARTIAL
    return Observation(
        load=part,
        tokens=part,
        histogram=part if isinstance(balancer, c.QuantileBalancing) else None,
        required=part if isinstance(balancer, c.ExactQuantileBalancing) else None,
        aux_loss=sharding.EVERYWHERE if isinstance(balancer, c.AuxLoss) else None,
        margin=part,
    )


def histogram_range(bias_E: Array, bins: int) -> tuple[Array, Array]:
    """Lower end and bin width: a score is in (0, 1), so a required bias lies in [min b - 1, max b + 1]."""
    low = bias_E.min() - 1
    return low, (bias_E.max() + 1 - low) / bins


def required_bias_histogram(required_NE: Array, bias_E: Array, valid_N: Array, bins: int) -> Array:
    """[E, bins] int32 counts of ``required_NE`` over the valid tokens (K3 report, appendix D).

    A bin number is split in a coarse and a fine digit, so that counting is one small matrix product of two one-hot
    arrays per expert: exact in float32 up to 2^24 tokens a call, and much faster than a scatter everywhere.
    """
    low, width = histogram_range(bias_E, bins)
    index = jnp.clip(jnp.floor((required_NE - low) / width).astype(jnp.int32), 0, bins - 1)
    fine = -(-bins // COARSE_BINS)
    coarse_NEI = (index[..., None] // fine == jnp.arange(COARSE_BINS)) & valid_N[:, None, None]
    fine_NEJ = index[..., None] % fine == jnp.arange(fine)
    counts = jnp.einsum(
        "nei,nej->eij",
        coarse_NEI.astype(jnp.bfloat16),
        fine_NEJ.astype(jnp.bfloat16),
        preferred_element_type=jnp.float32,
    )
    return counts.reshape(counts.shape[0], -1)[:, :bins].astype(jnp.int32)


def quantile_from_histogram(histogram_EB: Array, bias_E: Array, target: Array) -> Array:
    """The bias that would have given every expert ``target`` tokens: [E] float32, within one bin of exact.

    The first bin whose cumulative count reaches ``ceil(target)`` (at least 1), interpolated inside.
    """
    low, width = histogram_range(bias_E, histogram_EB.shape[1])
    cumulative = jnp.cumsum(histogram_EB, axis=1)
    rank = jnp.maximum(jnp.ceil(target), 1)
    index = jnp.argmax(cumulative >= rank, axis=1)
    inside = jnp.take_along_axis(histogram_EB, index[:, None], axis=1)[:, 0]
    below = jnp.take_along_axis(cumulative, index[:, None], axis=1)[:, 0] - inside
    share = jnp.clip((target - below) / jnp.maximum(inside, 1), 0, 1)
    return low + (index + share) * width


def exact_quantile(required_NE: Array, target: Array, tokens: Array) -> Array:
    """The (target + 1)-th smallest required bias of every expert, [E] (K3 report, eq. 14)."""
    rank = jnp.clip(jnp.floor(target).astype(jnp.int32), 0, jnp.maximum(tokens - 1, 0))
    return jnp.sort(required_NE, axis=0)[rank]


def switch_loss(scores_NE: Array, load_E: Array, active: int, valid_N: Array) -> Array:
    """``E sum_e f_e P_e``: share of the assignments times mean normalized score; 1 when both are even."""
    probability = scores_NE / scores_NE.sum(axis=-1, keepdims=True)
    sums = valid_N.sum(), load_E, jnp.where(valid_N[:, None], probability, 0).sum(axis=0)
    tokens, load_E, sum_E = sharding.total(sums, sharding.TOKEN_AXES)
    tokens = jnp.maximum(tokens, 1)
    share_E, mean_E = load_E / (tokens * active), sum_E / tokens
    return scores_NE.shape[1] * jnp.sum(jax.lax.stop_gradient(share_E) * mean_E)


def update(balancer: c.Balancer, bias_E: Array, seen: Observation, active: int) -> Array:
    """The bias of the next step, mean-centered for Quantile Balancing; unchanged when no token was seen."""
    target = seen.tokens.astype(jnp.float32) * active / bias_E.shape[0]  # in integers, 2^27 tokens overflow
    match balancer:
        case c.QuantileBalancing():
            new = quantile_from_histogram(seen.histogram, bias_E, target)
            new -= new.mean()
        case c.ExactQuantileBalancing():
            new = exact_quantile(seen.required, target, seen.tokens)
            new -= new.mean()
        case c.SignRule(rate):
            new = bias_E + rate * jnp.sign(target - seen.load)
        case _:
            return bias_E
    return jnp.where(seen.tokens > 0, new, bias_E)


class Window(NamedTuple):
    """What Quantile Balancing has counted since it last moved the bias: tokens [...] int32, histogram [..., E, bins]
    int32, for layers stacked in front. The bias stands still meanwhile, so that all counts are of the same bins."""

    tokens: Array
    histogram: Array


def empty_window(balancer: c.QuantileBalancing, bias_E: Array) -> Window:
    """Nothing counted, for the layers whose biases these are."""
    return Window(jnp.zeros(bias_E.shape[:-1], jnp.int32), jnp.zeros((*bias_E.shape, balancer.bins), jnp.int32))


def count_on(window: Window, bias_E: Array, seen: Observation, update, *, last: Array) -> tuple[Array, Window]:
    """The bias and the window after one more step; ``last``, [] bool, says that this step ends the window."""
    tokens, histogram = window.tokens + seen.tokens, window.histogram + seen.histogram
    new = update(bias_E, seen._replace(tokens=tokens, histogram=histogram))
    kept = Window(jnp.where(last, 0, tokens), jnp.where(last, 0, histogram))
    return jnp.where(last, new, bias_E), kept
