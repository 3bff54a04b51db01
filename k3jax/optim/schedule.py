"""Learning-rate schedules: cosine; warm-up, stable, decay; and one after the other with a second warm-up."""

import optax
from jax import Array

from k3jax.config_optim import WSD, Cosine, Rewarm, Schedule, Tunable


def make_schedule(config: Schedule, total_steps: int, *, peak: Array | None = None) -> optax.Schedule:
    """A function from the number of updates already made to the learning rate of the next.

    The k-th update (k from 1 to total_steps) uses the schedule at k, so the first rate is above zero; the last one is
    the floor, and so is any later one. A share above zero takes at least one step, the warm-up first, so that a
    warmed-up run of one step is made at the peak.

    Args:
      peak: [] float32, in place of the peak of a Cosine or WSD.

    Raises:
      ValueError: fewer than one step.
    """
    if total_steps < 1:
        raise ValueError(f"a schedule needs at least one step, got total_steps={total_steps}")
    if isinstance(config, Rewarm):
        first_steps = min(max(1, round(config.at * total_steps)), max(total_steps - 1, 1))
        first = make_schedule(config.first, first_steps)
        second = make_schedule(config.second, max(total_steps - first_steps, 1))
        return optax.join_schedules([first, second], [first_steps])
    if isinstance(config, Tunable):
        return make_schedule(config.schedule, total_steps, peak=peak)
    peak = config.peak if peak is None else peak
    warmup = _steps(config.warmup, total_steps)
    rise = optax.linear_schedule(0.0, peak, warmup) if warmup else optax.constant_schedule(peak)
    match config:
        case Cosine():
            fall_steps, fall = total_steps - warmup, _cosine
        case WSD():
            fall_steps, fall = min(_steps(config.decay, total_steps), total_steps - warmup), _linear
        case _:
            raise TypeError(f"schedule must be Cosine, WSD, Rewarm or Tunable, got {config!r}")
    stable = optax.constant_schedule(peak)
    fall = fall(peak, config.floor, fall_steps) if fall_steps else stable
    rate = optax.join_schedules([rise, stable, fall], [warmup, total_steps - fall_steps])
    return lambda count: rate(count + 1)


def _steps(share: float, total_steps: int) -> int:
    return max(1, round(share * total_steps)) if share > 0 else 0


def _cosine(peak: float | Array, floor: float, steps: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(peak, steps, alpha=floor / peak)


def _linear(peak: float | Array, floor: float, steps: int) -> optax.Schedule:
    return optax.linear_schedule(peak, floor, steps)
