"""What is proposed when a step does not fit."""

import dataclasses
import shlex

import pytest

from k3jax import config_io, layouts, presets
from k3jax.config import replace
from k3jax.config_layout import Layout
from k3jax.plan import arithmetic, chips, report, working_set
from k3jax.plan.remedies import remedied

POD = chips.topology("v5p:2x2x2")


@pytest.fixture
def config(micro_model, monkeypatch):
    """Layers keep a kilobyte of every token, or 250 bytes with full rematerialization."""

    def kept(config, devices):
        tokens = config.batch * config.seq_len // config.micro_batches // devices
        return tokens * (250 if config.model.remat == "full" else 1000)

    monkeypatch.setattr(working_set, "kept", kept)
    return replace(presets.load("tiny"), batch=64, seq_len=512, model=replace(micro_model, remat="none"))


def proposals(config, layout, share):
    """Those for a device with a share of the memory that the step needs."""
    needs = arithmetic.plan(config, layout, POD).memory.total
    small = dataclasses.replace(POD, chip=dataclasses.replace(POD.chip, hbm=share * needs))
    plan = remedied(config, arithmetic.plan(config, layout, small))
    assert not plan.memory.fits
    return small, plan


def applied(config, layout, flags):
    """The run and the layout after a proposal is pasted."""
    name, value = shlex.split(flags)
    match name:
        case "--layout":
            return config, layouts.load(value)
        case "--set":
            return config_io.override(config, [value]), layout
    field = {"--batch": "batch", "--remat": "model.remat"}[name]
    return config_io.override(config, [f"{field}={value}"]), layout


@pytest.mark.parametrize("layout", [Layout(data=8), Layout(data=4, fsdp=2), Layout(expert=4, fsdp=2)], ids=layouts.text)
@pytest.mark.parametrize("share", [0.95, 0.7])
def test_every_proposal_does_what_it_says(config, layout, share):
    small, plan = proposals(config, layout, share)
    assert plan.remedies
    for one in plan.remedies:
        after = arithmetic.plan(*applied(config, layout, one.flags), small).memory
        assert after.fits and after.total == pytest.approx(one.total, abs=2), one.flags
    assert plan.remedies == sorted(plan.remedies, key=lambda one: -one.total)


def test_many_small_parts_are_proposed_where_a_few_are_too_large(config):
    """Not only halves and quarters."""
    _, plan = proposals(replace(config, batch=512), Layout(data=8), 0.08)
    flags = [one.flags for one in plan.remedies]
    assert any(int(one.split("=")[1]) >= 16 for one in flags if "micro_batches" in one), flags


def test_state_that_lies_whole_is_spread_over_the_same_devices(config, monkeypatch):
    monkeypatch.setattr(working_set, "kept", lambda config, devices: 0)
    _, plan = proposals(replace(config, batch=8, seq_len=16), Layout(data=8), 0.97)
    assert any(one.flags.startswith('--layout "') and "fsdp=" in one.flags for one in plan.remedies)


def test_where_no_single_change_helps_the_search_is_named(config):
    _, plan = proposals(config, Layout(data=8), 1e-6)
    assert plan.remedies == [] and "no single change" in report.text(plan) and "--search" in report.text(plan)


def test_what_fits_needs_no_remedy(config):
    assert remedied(config, arithmetic.plan(config, Layout(data=8), POD)).remedies == []
