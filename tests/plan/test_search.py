"""Searching for a layout: what is legal, what is ranked first, what compiling a few of them leaves."""

import dataclasses
import json
import subprocess
import sys
import types

import pytest

from k3jax import config_io, layouts, presets
from k3jax.config import ConfigError, replace
from k3jax.plan import chips, search, search_report, workers, working_set
from k3jax.plan.plans import Remedy
from k3jax.progress import Progress
from launch import from_plan


@pytest.fixture
def config(micro_model, monkeypatch):
    monkeypatch.setattr(working_set, "kept", lambda config, devices: 0)
    return replace(presets.load("tiny"), batch=8, seq_len=64, model=micro_model)


@pytest.fixture
def found(config):
    return search.ranked(config, chips.topology("v5p:2x2x1"))


def test_every_layout_is_legal_and_for_all_devices(config):
    topology = chips.topology("v5p:2x2x2")
    shapes = search.legal(config, topology)
    assert all(layout.devices == 8 for layout in shapes)
    assert len({layouts.text(layout) for layout in shapes}) == len(shapes) > 5
    assert max(layout.tensor for layout in shapes) == 2  # heads
    assert max(layout.expert for layout in shapes) == 4  # experts
    assert all(layout.context == 1 for layout in shapes)


def test_long_rows_are_cut(config):
    shapes = search.legal(replace(config, seq_len=search.LONG), chips.topology("v5p:2x2x1"))
    assert {layout.context for layout in shapes} == {1, 2, 4}


def test_the_ranking_is_by_time_and_the_front_by_both(found):
    steps = [one.step for one in found.fitting]
    assert steps == sorted(steps) and found.best[0] is found.fitting[0]
    sizes = [one.bytes for one in found.best]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == min(one.bytes for one in found.fitting)


def test_without_a_legal_layout_the_nearest_batch_is_named(config):
    with pytest.raises(
        ConfigError, match=r"takes 7 rows of 63 tokens in 1 micro-batches; nearest is --batch 8, for which "
    ):
        search.legal(replace(config, batch=7, seq_len=63), chips.topology("v5p:2x2x1"))


def test_without_a_fitting_layout_the_nearest_is_named(config, monkeypatch):
    fixed = [Remedy("--remat full", 5)]
    monkeypatch.setattr(search, "remedied", lambda config, plan: dataclasses.replace(plan, remedies=fixed))
    monkeypatch.setitem(chips.CHIPS, "v5p", chips.CHIPS["v5p"].__class__(**{**vars(chips.CHIPS["v5p"]), "hbm": 1e5}))
    with pytest.raises(
        ConfigError,
        match=r"none of the \d+ layouts fits v5p:2x2x1: nearest is .* MB of 100 kB; it would fit with --remat full",
    ):
        search.ranked(config, chips.topology("v5p:2x2x1"))


def fake(config, outcomes):
    """A process that ends as the next outcome says: seconds of a step, or the error that it prints."""
    left = iter(outcomes)

    def run(command, *, env, capture_output, text, timeout):
        outcome = next(left)
        if outcome is subprocess.TimeoutExpired:
            raise subprocess.TimeoutExpired(command, timeout)
        memory = {"total": 10**9, "hbm": 10**11, "fits": True}
        if outcome == "too large":
            outcome, memory = 1.0, {"total": 2 * 10**11, "hbm": 10**11, "fits": False}
        if isinstance(outcome, str):
            return types.SimpleNamespace(returncode=1, stderr=f"noise\nerror: {outcome}\n")
        folder = command[command.index("--out") + 1]
        plan = {
            "topology": "v5p:2x2x1",
            "layout": command[command.index("--layout") + 1],
            "name": "micro.json",
            "config": config_io.to_dict(config),
            "memory": memory,
            "seconds": {"step": outcome},
            "binding": "kernels",
        }
        workers.pathlib.Path(folder).mkdir(parents=True)
        (workers.pathlib.Path(folder) / "plan.json").write_text(json.dumps(plan))
        return types.SimpleNamespace(returncode=0, stderr="")

    return run


def compile_some(found, config, folder, outcomes, budget=60):
    call = workers.Call("micro.json", "v5p:2x2x1", ("batch=8",))
    with Progress(1) as progress:
        return workers.compiled(
            found, call, folder, budget=budget, count=len(outcomes), progress=progress, run=fake(config, outcomes)
        )


def test_compiled_layouts_come_first_and_failures_are_said(found, config, tmp_path):
    ranked = compile_some(found, config, tmp_path, [3.0, "no such luck", 2.0, subprocess.TimeoutExpired])
    assert [one.step for one in ranked.fitting[:2]] == [2.0, 3.0]
    assert [one.failure for one in ranked.failed] == ["no such luck"]
    assert next(one.late for one in ranked.fitting if one.late).startswith("not done in the 60 s")
    assert len(ranked.fitting) == len(found.fitting) - 1 and [one.step for one in ranked.best] == [2.0]
    assert "no such luck" in search_report.text(ranked)


def test_what_the_compiler_refuses_is_not_recommended(found, config, tmp_path):
    """Neither what it finds no room for, nor what it finds too large; nor does it become the search's plan."""
    first = [one.layout for one in found.fitting[:2]]
    ranked = compile_some(found, config, tmp_path, ["no way to fit", "too large"])
    assert sorted(one.layout for one in ranked.failed) == sorted(first)
    assert not {one.layout for one in (*ranked.fitting, *ranked.best)} & set(first)
    said = search_report.text(ranked)
    assert "no way to fit" in said and "does not fit: 200 GB of" in said
    search_report.write(ranked, config, "micro.json", tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["layout"] not in first


def test_without_time_nothing_is_compiled(found, config, tmp_path):
    ranked = compile_some(found, config, tmp_path, [1.0, 1.0], budget=0)
    assert all(one.compiled is None for one in ranked.fitting)
    assert [one.late for one in ranked.fitting].count("no time was left for it") == 2 and not ranked.failed


def test_the_best_plan_becomes_a_run(found, config, tmp_path):
    ranked = compile_some(found, config, tmp_path, [3.0, 2.0])
    for one, expected in ((ranked, 2.0), (found, found.best[0].step)):
        search_report.write(one, config, "micro.json", tmp_path)
        assert (tmp_path / "search.png").stat().st_size and json.loads((tmp_path / "search.json").read_text())["best"]
        plan = from_plan.read(tmp_path / "plan.json")
        assert plan["seconds"]["step"] == expected
        assert plan["config"] == config and plan["memory"]["fits"]
        layouts.load(plan["layout"])


def test_the_commands_of_workers_are_commands_of_the_planner():
    call = workers.Call("tiny", "v5p:2x2x1", ("batch=8", "model.remat=full"))
    words = call.command("fsdp=4", workers.pathlib.Path("out"))
    assert words[:3] == [sys.executable, "-m", "k3jax.plan"]
    assert words[-6:] == ["--set", "batch=8", "--set", "model.remat=full", "--out", "out"]


@pytest.mark.parametrize(
    "topology, package", [("v5p:2x2x1", "-r requirements-tpu.txt"), ("h100:2x8", "-r requirements-cuda13.txt")]
)
def test_without_a_compiler_the_command_that_brings_one_is_said(monkeypatch, topology, package):
    def refuse(**kwargs):
        raise RuntimeError("no plugin\nand more")

    monkeypatch.setattr(chips.topologies, "get_topology_desc", refuse)
    with pytest.raises(
        ConfigError, match=rf"{topology}: no plugin\. A .PU's compiler comes with: pip install {package}"
    ):
        chips.devices_of(chips.topology(topology))
