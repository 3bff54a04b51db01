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
        PLAN | {"topology": topology, "layout": layout}, config="kimi_k3", name="k3", runs="gs://runs"
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
        from_plan.write(plan, given, tmp_path / "k3.json", name="k3", runs="/runs")
    assert not list(tmp_path.iterdir())


def test_what_was_planned_is_what_runs(tmp_path):
    """A preset as it is needs no file; one with changes gets it; what no plan depends on may differ."""

    def write(config, given=""):
        return from_plan.write(PLAN | {"config": config}, given, tmp_path / "k3.json", name="k3", runs="/runs")

    assert write(PLAN["config"]) == "kimi_k3" and [path.name for path in tmp_path.iterdir()] == ["k3.json"]
    changed = config_io.override(PLAN["config"], ["batch=2080", "seed=3"])
    with pytest.raises(ConfigError, match=r"2080 .*divide over"):
        write(changed)
    assert [path.name for path in tmp_path.iterdir()] == ["k3.json"]
    changed = config_io.override(changed, ["batch=1024"])
    path = write(changed)
    assert path == str(tmp_path / "k3.config.json") and presets.load(path) == changed
    assert spec.load(tmp_path / "k3.json").job.config == path
    other = config_io.override(changed, ["steps=10", "optimizer.schedule.peak=1e-3", "data=TextFolder(path='docs')"])
    config_io.save_json(other, path)
    assert write(changed, path) == path and presets.load(path) == other


def test_a_plan_that_does_not_fit_becomes_no_run():
    memory = {"total": 120e9, "hbm": 100e9, "fits": False}
    with pytest.raises(ConfigError, match=r"does not fit: 120.0 GB of 100.0 GB"):
        from_plan.spec_of(PLAN | {"memory": memory}, config="kimi_k3", name="k3", runs="gs://runs")


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


STEP = "seconds.step = '{}', but it must be a number above 0"
NO_PLANS = {
    "half a file": ({"topology": "v5p:2x2x2", "name": "a"}, "it has no layout"),
    "a list": ([1], "it has no name"),
    "no configuration": ({"config": "kimi_k3"}, "configuration = 'kimi_k3', but it must be TrainConfig"),
    "a topology": ({"topology": 3}, "topology = '3', but it must be a text"),
    "a layout": ({"layout": 7}, "layout = '7', but it must be a text"),
    "no memory": ({"memory": 3}, "it has no memory.fits"),
    "no total": ({"memory": {"fits": False, "hbm": 1}}, "it has no memory.total"),
    "an answer": ({"memory": {"fits": "no", "hbm": 1, "total": 2}}, "memory.fits = 'no', but it must be true or false"),
    "a step": ({"seconds": {"step": "x"}}, STEP.format("x")),
    "true": ({"seconds": {"step": True}}, STEP.format("True")),
    "no number": ({"seconds": {"step": float("nan")}}, STEP.format("nan")),
    "no end": ({"seconds": {"step": float("inf")}}, STEP.format("inf")),
    "no time": ({"seconds": {"step": 0}}, STEP.format("0")),
    "before its beginning": ({"seconds": {"step": -1.5}}, STEP.format("-1.5")),
    "a number of many digits": ({"seconds": {"step": 10**400}}, STEP.format("1" + 79 * "0")),
}


@pytest.mark.parametrize("change, message", NO_PLANS.values(), ids=NO_PLANS)
def test_what_is_no_plan(change, message, tmp_path):
    whole = PLAN | {"config": config_io.to_dict(PLAN["config"])}
    plan = whole | change if isinstance(change, dict) and len(change) == 1 else change
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(ConfigError) as caught:
        from_plan.read(tmp_path / "plan.json")
    assert str(caught.value) == f"{str(tmp_path / 'plan.json')!r} is no plan.json of k3jax.plan: {message}"


@pytest.mark.parametrize("content", [b"\x89PNG" + bytes(200_000), b"{", b"[" * 100_000], ids=["a picture", "{", "["])
def test_what_is_no_text_is_one_short_line(content, tmp_path):
    (tmp_path / "plan.png").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^'/.*plan.png' is no plan.json of k3jax.plan: [^\n]{1,120}$"):
        from_plan.read(tmp_path / "plan.png")
