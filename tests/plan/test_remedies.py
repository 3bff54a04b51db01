"""What is proposed when a step does not fit."""

import dataclasses

import pytest

from k3jax import presets
from k3jax.config import replace
from k3jax.config_layout import Layout
from k3jax.plan.needs import Memory
from k3jax.plan.remedies import remedies


@pytest.fixture
def config(micro_model):
    return replace(presets.load("tiny"), batch=16, model=micro_model)


NEEDS = Memory(parameters=100, optimizer=100, gradients=100, saved=800, other=100, hbm=700)


def test_every_proposal_fits_and_changes_what_is_largest(config):
    assert NEEDS.largest == "saved" and NEEDS.total == 1200 and not NEEDS.fits
    found = remedies(config, Layout(fsdp=2), NEEDS)
    assert found == sorted(found, key=lambda one: -one.total) and all(one.total <= NEEDS.hbm for one in found)
    flags = [one.flags for one in found]
    assert "--remat full" in flags and "--batch 4" in flags and "--set micro_batches=4" in flags
    assert "--batch 8" not in flags  # 750: still too much


def test_rows_that_would_not_divide_are_not_proposed(config):
    flags = [one.flags for one in remedies(config, Layout(fsdp=8), NEEDS)]
    assert not any("batch 4" in one or "micro_batches=4" in one for one in flags)


def test_nothing_helps_when_the_state_alone_is_too_large(config):
    assert remedies(config, Layout(fsdp=2), dataclasses.replace(NEEDS, parameters=10**6)) == []
