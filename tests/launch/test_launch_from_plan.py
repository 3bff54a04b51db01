"""From a plan to the spec of its run."""

import json
import subprocess
import sys

import pytest

from k3jax import config_io, presets
from k3jax.config import ConfigError
from launch import from_plan, spec

PLAN = {
    "name": "kimi_k3",
    "config": presets.load("kimi_k3"),
    "topology": "tpu7x:16x16x16",
    "layout": "fsdp=16,expert=64,tensor=8,dense=('expert',)",
    "memory": {"total": 80e9, "hbm": 96 * 2**30, "fits": True},
    "seconds": {"step": 36.0},
}


@pytest.mark.parametrize(
    "topology, layout, hosts, per_host",
    [
        ("tpu7x:16x16x16", PLAN["layout"], 1024, 8),
        ("v5p:16x16x16", "fsdp=16,expert=64,tensor=4", 1024, 4),
        ("h200:512x8", "fsdp=16,expert=64,tensor=4", 512, 8),
    ],
)
def test_the_spec_of_a_plan(topology, layout, hosts, per_host):
    found = from_plan.spec_of(
        PLAN | {"topology": topology, "layout": layout}, config="kimi_k3", name="k3", runs="gs://r"
    )
    assert (found.topology, found.layout, found.hosts, found.devices_per_host) == (topology, layout, hosts, per_host)


@pytest.mark.parametrize(
    "change, given, message",
    [
        (["batch=1024"], "kimi_k3", "--config=kimi_k3 is not what was planned: batch = 2048, but 1024 was planned"),
        (["model.remat=Save"], "kimi_k3", r"model.remat = full, but .*Save.* was planned"),
        (["optimizer.matrices.dtype=bfloat16"], "kimi_k3", "optimizer.matrices.dtype = float32, but bfloat16"),
        ([], "nano", "model.*seq_len = 256, but 8192 was planned"),
        ([], "kimi_k4", "no preset or file 'kimi_k4'; did you mean 'kimi_k3'"),
    ],
)
def test_configurations_that_were_not_planned(tmp_path, change, given, message):
    plan = PLAN | {"config": config_io.override(PLAN["config"], change)}
    with pytest.raises(ConfigError, match=message):
        from_plan.configuration(plan, given, tmp_path / "k3.json")
    assert not list(tmp_path.iterdir())


def test_what_was_planned_is_what_runs(tmp_path):
    """A preset as it is needs no file; one with changes gets it; what no plan depends on may differ."""
    assert from_plan.configuration(PLAN, "", tmp_path / "k3.json") == "kimi_k3" and not list(tmp_path.iterdir())
    changed = config_io.override(PLAN["config"], ["batch=1024", "seed=3"])
    path = from_plan.configuration(PLAN | {"config": changed}, "", tmp_path / "k3.json")
    assert path == str(tmp_path / "k3.config.json") and presets.load(path) == changed
    other = config_io.override(changed, ["steps=10", "optimizer.schedule.peak=1e-3", "data=TextFolder(path='docs')"])
    config_io.save_json(other, tmp_path / "other.json")
    given = str(tmp_path / "other.json")
    assert from_plan.configuration(PLAN | {"config": changed}, given, tmp_path / "k3.json") == given


def test_a_plan_that_does_not_fit_becomes_no_run():
    memory = {"total": 120e9, "hbm": 100e9, "fits": False}
    with pytest.raises(ConfigError, match=r"does not fit: 120.0 GB of 100.0 GB"):
        from_plan.spec_of(PLAN | {"memory": memory}, config="kimi_k3", name="k3", runs="gs://r")


def test_the_cost_is_steps_times_chips():
    steps = presets.load("kimi_k3").steps
    assert f"at least {steps * 36 / 3600 * 4096:,.1f} chip-hours" in from_plan.cost(PLAN, presets.load("kimi_k3"))


def test_the_commands(tmp_path):
    """One command from plan to spec, one from spec to manifest; what cannot be is one line and exit code 2."""
    (tmp_path / "plan.json").write_text(json.dumps(PLAN | {"config": config_io.to_dict(PLAN["config"])}))

    def call(*arguments):
        return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=600)

    made = call("launch.from_plan", tmp_path / "plan.json", "--runs", "gs://bucket/runs",
                "--out", tmp_path / "k3.json", "--set", "image=r/k3jax:tpu",
                "--set", "kubernetes.service_account=trainer")  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert spec.load(tmp_path / "k3.json").kubernetes.service_account == "trainer"
    refused = call("launch.render", tmp_path / "k3.json", "--to", "skypilot")
    assert (
        refused.returncode == 2 and refused.stderr == "launch.render: SkyPilot 0.14.1 has no tpu7x; gke and xpk have\n"
    )


@pytest.mark.parametrize("text", ['{"topology": "v5p:2x2x2"}', "[1]", "{", '{"config": "kimi_k3"}'])
def test_what_is_no_plan(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match=r"is no plan.json of k3jax.plan"):
        from_plan.read(tmp_path / "plan.json")
