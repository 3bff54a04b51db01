"""A peak that is an array in the optimizer's state: the same updates, and one program for all peaks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config_optim import WSD, AdamW, Cosine, Muon, Optimizer, Tunable
from k3jax.optim import build_optimizer, learning_rate, make_schedule
from k3jax.roles import ParamMeta, Role

META = {"w": ParamMeta(Role.MATRIX, ("embed", "rank")), "g": ParamMeta(Role.NORM, ("width",))}
PARAMS = {"w": np.ones((4, 3), np.float32), "g": np.ones(4, np.float32)}


def _after(config: Optimizer, steps: int = 6):
    optimizer = build_optimizer(config, META, steps)
    state, params, rates = optimizer.init(PARAMS), PARAMS, []
    update = jax.jit(optimizer.update)
    for step in range(steps):
        rates.append(learning_rate(config.schedule, steps, state))
        grads = jax.tree.map(lambda p, step=step: np.float32(step + 1) * jnp.sin(p), params)
        updates, state = update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params, rates


@pytest.mark.parametrize("schedule", [Cosine(peak=3e-2, floor=1e-3, warmup=0.3), WSD(peak=2e-2, warmup=0.2, decay=0.4)])
def test_updates_are_those_of_the_schedule(schedule):
    plain, rates = _after(Optimizer(matrices=AdamW(lr_scale=2.0), schedule=schedule))
    tunable, tunable_rates = _after(Optimizer(matrices=AdamW(lr_scale=2.0), schedule=Tunable(schedule)))
    np.testing.assert_allclose(tunable_rates, rates, rtol=1e-6)
    np.testing.assert_allclose(rates, make_schedule(schedule, 6)(np.arange(6)), rtol=1e-6)
    for a, b in zip(jax.tree.leaves(tunable), jax.tree.leaves(plain)):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def _program(schedule) -> str:
    optimizer = build_optimizer(Optimizer(schedule=schedule), META, 6)
    state = jax.eval_shape(optimizer.init, PARAMS)
    return jax.jit(optimizer.update).lower(PARAMS, state, PARAMS).as_text()


def test_one_program_for_all_peaks():
    """With the negative control that an ordinary schedule has its peak in the program."""
    low, high = (_program(Tunable(Cosine(peak=peak))) for peak in (1e-3, 1e-2))
    assert low == high
    low, high = (_program(Cosine(peak=peak)) for peak in (1e-3, 1e-2))
    assert low != high


def test_blocks_of_one_factor_are_not_matched():
    assert Muon().scale(400) == pytest.approx(4.0) and Muon(factor=1.6).scale(400) == 1.6
    with pytest.raises(ValueError, match=r"Muon.factor must be in \(0"):
        Muon(factor=0.0)
