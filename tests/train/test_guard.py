"""The rules by which steps are refused, on made-up losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import guard
from k3jax.config import ConfigError
from k3jax.run_config import SpikeGuard

SPIKES = SpikeGuard(threshold=5.0, window=8, min_history=4, floor=0.01)


def play(losses, spikes=SPIKES, max_skipped=2):
    """The verdicts on a sequence of losses, as a list."""
    judge = jax.jit(lambda s, x: guard.judge(s, x, jnp.isfinite(x), spikes=spikes, max_skipped=max_skipped))
    state, verdicts = guard.init(spikes), []
    for loss in losses:
        verdict, state = judge(state, jnp.float32(loss))
        verdicts.append(jax.device_get(verdict))
    return verdicts, state


def applied(losses, **settings):
    return [bool(verdict.apply) for verdict in play(losses, **settings)[0]]


def test_a_spike_is_skipped_and_not_remembered():
    calm = [3.0, 2.9, 3.1, 2.95, 3.05]
    assert applied([*calm, 9.0, 9.0, 3.0]) == [True] * 5 + [False, False, True]


def test_the_statistics_are_median_and_scaled_median_deviation():
    losses = [3.0, 2.8, 3.4, 2.9, 3.1]
    verdict = play([*losses, 3.2])[0][-1]
    median = np.median(losses)
    assert verdict.median == pytest.approx(median)
    assert verdict.deviation == pytest.approx(1.4826 * np.median(np.abs(np.array(losses) - median)), rel=1e-5)


def test_the_window_forgets():
    """After eight losses around one, three is a spike although the first losses were as high."""
    losses = [3.0, 3.1, 2.9, 3.0, *np.linspace(2.5, 1.2, 8), *(1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.1, 0.9)]
    assert all(applied(losses))
    assert applied([*losses, 3.0])[-1] is False


def test_a_falling_loss_and_too_little_history_are_no_spikes():
    assert all(applied([5.0, 4.0, 3.0, 2.0, 1.0, 0.5]))
    assert all(applied([1.0, 1.0, 1.0, 9.0]))


def test_equal_losses_do_not_make_a_spike_of_a_ripple():
    assert all(applied([2.0] * 6 + [2.04]))
    assert applied([2.0] * 6 + [2.06])[-1] is False


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_step_too_many_halts_the_run_for_good(bad):
    verdicts, state = play([1.0, bad, bad, 1.0, bad, bad, bad, 1.0, 1.0], max_skipped=2)
    assert [bool(v.apply) for v in verdicts] == [True, False, False, True, False, False, False, False, False]
    assert [bool(v.halted) for v in verdicts] == [False] * 6 + [True] * 3
    assert [int(v.in_a_row) for v in verdicts] == [0, 1, 2, 0, 1, 2, 3, 3, 3]
    assert int(state.applied) == 2


def test_no_step_is_refused_twice_where_none_may_be():
    assert [bool(v.halted) for v in play([float("nan")], max_skipped=0)[0]] == [True]


def test_a_spike_stops_the_run_where_the_configuration_says_so():
    stop = SpikeGuard(threshold=5.0, window=8, min_history=4, action="stop")
    verdicts, _ = play([1.0, 1.1, 0.9, 1.0, 5.0], spikes=stop)
    assert bool(verdicts[-1].halted) and not verdicts[-1].apply


def test_without_a_spike_guard_any_finite_loss_passes():
    assert applied([1.0] * 6 + [1e9], spikes=None) == [True] * 7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"threshold": 0.0}, "threshold = 0.0"),
        ({"window": 4, "min_history": 5}, "must not exceed window = 4"),
        ({"action": "explode"}, "skip, stop"),
        ({"floor": -1.0}, "floor = -1.0"),
    ],
)
def test_impossible_guards_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        SpikeGuard(**fields)
