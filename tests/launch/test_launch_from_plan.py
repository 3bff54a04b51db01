"""From a plan to the spec of its run."""

import json
import subprocess
import sys

import pytest

from k3jax import presets
from k3jax.config import ConfigError
from launch import from_plan, spec

PLAN = {
    "topology": "tpu7x:16x16x16",
    "layout": "fsdp=16,expert=64,tensor=8,dense=('expert',)",
    "layers": 93,
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
    "change, config, message",
    [
        ({"memory": {"total": 120e9, "hbm": 100e9, "fits": False}}, "kimi_k3", r"does not fit: 120.0 GB of 100.0 GB"),
        ({}, "nano", r"--config=nano has 13 layers, but the plan is of one with 93"),
    ],
)
def test_plans_that_are_none_of_this_run(change, config, message):
    with pytest.raises(ConfigError, match=message):
        from_plan.spec_of(PLAN | change, config=config, name="k3", runs="gs://r")


def test_the_cost_is_steps_times_chips():
    steps = presets.load("kimi_k3").steps
    assert f"at least {steps * 36 / 3600 * 4096:,.1f} chip-hours" in from_plan.cost(PLAN, presets.load("kimi_k3"))


def test_the_commands(tmp_path):
    """One command from plan to spec, one from spec to manifest; what cannot be is one line and exit code 2."""
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))

    def call(*arguments):
        return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=600)

    made = call("launch.from_plan", tmp_path / "plan.json", "--config", "kimi_k3", "--runs", "gs://bucket/runs",
                "--out", tmp_path / "k3.json", "--set", "image=r/k3jax:tpu",
                "--set", "kubernetes.service_account=trainer")  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert spec.load(tmp_path / "k3.json").kubernetes.service_account == "trainer"
    refused = call("launch.render", tmp_path / "k3.json", "--to", "skypilot")
    assert (
        refused.returncode == 2 and refused.stderr == "launch.render: SkyPilot 0.14.1 has no tpu7x; gke and xpk have\n"
    )


def test_what_is_no_plan(tmp_path):
    (tmp_path / "plan.json").write_text('{"topology": "v5p:2x2x2"}')
    with pytest.raises(ConfigError, match=r"is no plan.json of k3jax.plan"):
        from_plan.read(tmp_path / "plan.json")
