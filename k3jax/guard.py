"""Guards of a run: which steps are not applied, and when the run must stop.

Everything is decided inside the train step, from the global loss and gradient norm: all devices and hosts decide alike,
a replay decides the same, and the decision costs no transfer. What the decision remembers is part of the train state.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from k3jax.run_config import SpikeGuard

MAD_TO_DEVIATION = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


class GuardState(NamedTuple):
    """losses: [window] float32, the losses of the last applied steps, NaN where there are none yet. applied: [] int32,
    steps applied since the window was emptied. in_a_row: [] int32, steps skipped since the last applied one. halted: []
    int32, 1 once the run must stop: from then on no step changes anything."""

    losses: Array
    applied: Array
    in_a_row: Array
    halted: Array


class Verdict(NamedTuple):
    """apply: [] bool. finite, spike: [] bool, why not. median, deviation: [] float32, the robust centre and spread that
    the loss was held against. in_a_row: [] int32 skipped steps including this one. halted: [] bool, the run must
    stop."""

    apply: Array
    finite: Array
    spike: Array
    median: Array
    deviation: Array
    in_a_row: Array
    halted: Array


def init(spikes: SpikeGuard | None) -> GuardState:
    """Nothing remembered."""
    losses = jnp.full(1 if spikes is None else spikes.window, jnp.nan)
    return GuardState(losses, *(jnp.zeros((), jnp.int32) for _ in range(3)))


def judge(
    state: GuardState, loss: Array, finite: Array, *, spikes: SpikeGuard | None, max_skipped: int
) -> tuple[Verdict, GuardState]:
    """Whether a step is applied, and what is remembered of it.

    A step is skipped when it is not finite, or when the loss is a spike: more than
    ``spikes.threshold`` robust deviations above the median of the last applied losses. The deviation is
    1.4826 x the median absolute deviation, at least ``spikes.floor``. The run halts at the skipped step after
    ``max_skipped`` skipped ones, or at the first spike when ``spikes.action`` is 'stop'.

    Args:
      loss: [] float32, nats per token of the global batch.
      finite: [] bool, of the loss and the gradient.
    """
    count = jnp.minimum(state.applied, state.losses.shape[0])
    median = _median(state.losses, count)
    spike, deviation = jnp.zeros((), bool), jnp.full((), jnp.nan)
    if spikes is not None:
        deviation = MAD_TO_DEVIATION * _median(jnp.abs(state.losses - median), count)
        deviation = jnp.maximum(deviation, spikes.floor)
        known = state.applied >= spikes.min_history
        spike = finite & known & (loss > median + spikes.threshold * deviation)
    halted_before = state.halted > 0
    apply = finite & ~spike & ~halted_before
    in_a_row = jnp.where(halted_before, state.in_a_row, jnp.where(apply, 0, state.in_a_row + 1))
    halted = halted_before | (in_a_row > max_skipped)
    if spikes is not None and spikes.action == "stop":
        halted |= spike
    slot = state.applied % state.losses.shape[0]
    new = GuardState(
        losses=jnp.where(apply, state.losses.at[slot].set(loss), state.losses),
        applied=state.applied + apply,
        in_a_row=in_a_row,
        halted=halted.astype(jnp.int32),
    )
    return Verdict(apply, finite, spike, median, deviation, in_a_row, halted), new


def _median(values: Array, count: Array) -> Array:
    """Median of the ``count`` numbers of an array whose other entries are NaN, which sort last; NaN of none."""
    ordered = jnp.sort(values)
    return (ordered[jnp.maximum(count - 1, 0) // 2] + ordered[count // 2]) / 2
