"""Learning-rate schedules at the points where their definition changes."""

import numpy as np
import pytest

from k3jax.config_optim import WSD, Cosine, Rewarm
from k3jax.optim import make_schedule


def rates(config, total_steps):
    return np.asarray(make_schedule(config, total_steps)(np.arange(total_steps + 10)))


def test_cosine():
    peak, floor, steps = 2e-3, 1e-4, 1000
    lr = rates(Cosine(peak=peak, floor=floor, warmup=0.01), steps)
    k = np.arange(1, steps + 11)
    fall = floor + 0.5 * (peak - floor) * (1 + np.cos(np.pi * np.clip((k - 10) / 990, 0, 1)))
    np.testing.assert_allclose(lr, np.where(k <= 10, peak * k / 10, fall), rtol=1e-5)
    assert lr[9] == lr.max() == np.float32(peak)
    np.testing.assert_allclose(lr[steps - 1 :], floor, rtol=1e-5)


def test_wsd():
    peak, floor, steps = 2e-3, 1e-4, 500
    lr = rates(WSD(peak=peak, floor=floor, warmup=0.01, decay=0.2), steps)
    np.testing.assert_allclose(lr[:5], peak * np.arange(1, 6) / 5, rtol=1e-6)
    assert (lr[4:400] == np.float32(peak)).all()
    np.testing.assert_allclose(lr[400:500], peak + (floor - peak) * np.arange(1, 101) / 100, rtol=1e-5)
    np.testing.assert_allclose(lr[500:], floor, rtol=1e-6)


def test_rewarm_is_two_schedules_in_a_row():
    first, second = Cosine(peak=2e-3, floor=2e-4), WSD(peak=5e-4, warmup=0.1, decay=0.9)
    lr = rates(Rewarm(first=first, second=second, at=0.8), 500)
    np.testing.assert_array_equal(lr[:400], rates(first, 400)[:400])
    np.testing.assert_array_equal(lr[400:], rates(second, 100))
    assert np.isclose(lr[399], 2e-4) and lr[409] == lr[400:].max() == np.float32(5e-4) and lr[499] == 0


@pytest.mark.parametrize("config", [Cosine(peak=1.0), WSD(peak=1.0), Rewarm(Cosine(peak=1.0), WSD(peak=1.0))])
def test_short_runs_move(config):
    for steps in (1, 2, 3):
        lr = rates(config, steps)
        assert lr[0] > 0 and np.isfinite(lr).all() and lr.max() <= 1
    with pytest.raises(ValueError, match="total_steps=0"):
        make_schedule(config, 0)
