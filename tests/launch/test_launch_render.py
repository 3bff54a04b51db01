"""What is rendered: as recorded, valid by the published schemas, refused where an engine cannot, and working scripts.

`K3JAX_RECORD=1 pytest tests/launch` records the goldens anew.
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess

import jsonschema
import pytest
import yaml

from k3jax.config import ConfigError
from k3jax.exits import FINAL, Exit
from launch import spec as specs
from launch.command import command
from launch.preflight import preflight_of
from launch.render import ENGINES, make, summary
from launch.spec import Kubernetes, RunSpec, Study

FOLDER = pathlib.Path(__file__).parent
PAIRS = [
    ("nano-here", "local"), ("nano-here", "slurm"), ("linear-h200", "slurm"), ("k3-v5p", "gke"), ("k3-v5p", "xpk"),
    ("three-slices", "gke"), ("three-slices", "xpk"), ("h100-nodes", "gke"), ("h100-nodes", "xpk"),
    ("h100-nodes", "skypilot"), ("ladder-v6e", "skypilot"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def credentials(monkeypatch, tmp_path):
    (tmp_path / "key.json").touch()
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")


def load(name: str, **changes) -> RunSpec:
    return dataclasses.replace(specs.load(FOLDER / "specs" / f"{name}.json"), **changes)


@pytest.mark.parametrize("name, engine", PAIRS)
def test_goldens(name, engine):
    rendered = ENGINES[engine](load(name))
    golden = FOLDER / "goldens" / f"{name}.{engine}{rendered.suffix}"
    if os.environ.get("K3JAX_RECORD"):
        golden.write_text(rendered.text)
    assert rendered.text == golden.read_text()
    assert summary(load(name), rendered, golden).endswith(rendered.submit.format(file=golden))


def validate(manifest: dict) -> None:
    schema = json.loads((FOLDER / "schemas" / "jobset.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(manifest)


@pytest.mark.parametrize("name", ["k3-v5p", "three-slices", "h100-nodes"])
def test_job_sets_are_valid(name):
    """By the published schemas, and by the numbers that must agree."""
    manifest = yaml.safe_load(ENGINES["gke"](load(name)).text)
    validate(manifest)
    (jobs,) = manifest["spec"]["replicatedJobs"]
    job, spec = jobs["template"]["spec"], load(name)
    assert job["parallelism"] * jobs["replicas"] == spec.hosts
    (container,) = job["template"]["spec"]["containers"]
    (count,) = container["resources"]["limits"].values()
    assert count * spec.hosts == spec.machines.chips * spec.slices
    rule = job["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert rule["values"] == [int(code) for code in FINAL] and rule["containerName"] == container["name"]


def test_a_volume_claim(tmp_path):
    manifest = yaml.safe_load(ENGINES["gke"](load("h100-nodes", runs="pvc://disk/a/b", data="pvc://tokens")).text)
    validate(manifest)
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["volumeMounts"][:2] == [
        {"name": "runs", "mountPath": "/mnt/runs", "subPath": "a/b"},
        {"name": "data", "mountPath": "/mnt/data", "readOnly": True},
    ]


@pytest.mark.parametrize(
    "path, value",
    [
        (("spec", "failurePolicy", "maxRestart"), 3),
        (("spec", "replicatedJobs", 0, "replicas"), "two"),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0, "imagePull"), "Always"),
        (("spec", "replicatedJobs", 0, "template", "spec", "backOffLimit"), 0),
        (("spec", "replicatedJobs", 0, "name"), None),
    ],
)
def test_the_schema_would_notice(path, value):
    """Negative control: misspelt fields and wrong types, at every depth."""
    manifest = yaml.safe_load(ENGINES["gke"](load("three-slices")).text)
    *parents, last = path
    node = manifest
    for part in parents:
        node = node[part]
    node[last] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(manifest)


TPU_2X4 = {"topology": "v6e:2x4", "hosts": 2, "devices_per_host": 4, "layout": "fsdp=2,expert=4", "slices": 1}
REFUSED = {
    "an image": ("gke", "k3-v5p", {"image": ""}, r"gke needs RunSpec.image.*launch/docker/tpu.Dockerfile"),
    "an image of xpk": ("xpk", "h100-nodes", {"image": ""}, r"xpk needs RunSpec.image.*cuda13.Dockerfile"),
    "an environment": ("slurm", "linear-h200", {"image": ""}, r"slurm needs RunSpec.image or RunSpec.setup"),
    "an account": ("gke", "k3-v5p", {"kubernetes": Kubernetes()}, r"needs kubernetes.service_account"),
    "a cluster": ("xpk", "k3-v5p", {"kubernetes": Kubernetes()}, r"xpk needs kubernetes.cluster"),
    "TPUs": ("slurm", "k3-v5p", {}, r"slurm has no v5p:16x16x16"),
    "spot": ("slurm", "linear-h200", {"spot": True}, r"a preemptible partition"),
    "a bucket": ("slurm", "linear-h200", {"data": "gs://tokens"}, r"slurm cannot mount 'gs://tokens'"),
    "a path with a colon": ("slurm", "linear-h200", {"data": "/a:b"}, r"pyxis cannot mount '/a:b', which has"),
    "a relative path": ("slurm", "linear-h200", {"runs": "runs"}, r"'runs' must be an absolute path"),
    "hosts here": ("local", "three-slices", {}, r"but v5e:4x4 has 12 hosts; cpu:12x4 would simulate them"),
    "an image here": ("local", "linear-h200", {}, r"local starts no container, but RunSpec.image = 'registry"),
    "a path": ("gke", "k3-v5p", {"runs": "/runs"}, r"'/runs' would be lost with its machine; give gs://"),
    "another cloud": ("gke", "k3-v5p", {"data": "s3://tokens"}, r"gke cannot mount 's3://tokens'"),
    "a claim": ("skypilot", "ladder-v6e", {"runs": "pvc://a"}, r"skypilot cannot mount 'pvc://a'"),
    "S3 of several": ("skypilot", "h100-nodes", {"runs": "s3://tokens"}, r"cannot keep the run folder of 2 hosts in 's3://tokens'"),
    "simulated devices": ("gke", "nano-here", {}, r"gke has no cpu:2x4"),
    "slices of one host": (
        "gke", "three-slices", {"topology": "v5e:2x2", "hosts": 3, "layout": "data=3,fsdp=4"}, r"of several hosts only",
    ),
    "joined slices": ("skypilot", "three-slices", {}, r"SkyPilot does not join slices"),
    "an unusual slice": (
        "skypilot", "k3-v5p", {"topology": "v5p:4x4x16", "hosts": 64, "layout": "fsdp=4,expert=64"},
        r"cannot ask for v5p:4x4x16: a cloud gives its usual shape for 256 chips, which is v5p:4x8x8",
    ),
    "the newest": (
        "skypilot", "k3-v5p",
        {"topology": "tpu7x:4x4x4", "hosts": 16, "devices_per_host": 8, "layout": "fsdp=4,expert=32"},
        r"SkyPilot 0.14.1 has no tpu7x",
    ),
    "a pair of hosts": ("skypilot", "ladder-v6e", TPU_2X4, r"SkyPilot's v6e:2x4 is one with 8"),
    "a large host": ("xpk", "three-slices", TPU_2X4 | {"hosts": 1, "devices_per_host": 8}, r"of hosts with 4"),
    "quotes": ("xpk", "h100-nodes", {"data": "gs://tokens"}, r"puts a GPU workload's command into double quotes"),
}  # fmt: skip


@pytest.mark.parametrize("engine, name, changes, message", REFUSED.values(), ids=REFUSED)
def test_what_an_engine_cannot_give_is_refused(engine, name, changes, message):
    with pytest.raises(ConfigError, match=message):
        ENGINES[engine](load(name, **changes))


@pytest.mark.parametrize("engine", ["xpk", "skypilot"])
def test_a_bucket_without_credentials_is_refused(engine, monkeypatch):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/no/such/key.json")
    with pytest.raises(ConfigError, match="storage 'gs://k3-runs': GOOGLE_APPLICATION_CREDENTIALS names"):
        ENGINES[engine](load("h100-nodes"))


@pytest.mark.parametrize("name", ["three-slices", "h100-nodes"])
def test_a_preflight_on_xpk_has_the_storage_of_its_run(name):
    """Which is attached once, under one name."""
    run, checks = (ENGINES["xpk"](spec) for spec in (load(name), preflight_of(load(name))))
    assert run.before == checks.before and f"--storage={name}-runs " in checks.text
    assert f"--workload={name}-preflight " in checks.text and f"/mnt/runs/{name}-preflight" in checks.text


def test_a_study_is_one_command():
    spec = RunSpec("ratio", Study("s02_hybrid_ratio", rung="d64"), "cpu:1x1", 1, 1, "", "runs")
    found = command(spec, runs="runs", data="")
    assert found == [
        "python", "-m", "experiments.run", "s02_hybrid_ratio", "--rung", "d64", "--root", "runs/ratio",
    ]  # fmt: skip
    there = (FOLDER.parent.parent / "experiments" / "run.py").read_text()
    assert all(f'"{flag.removeprefix("--")}"' in there for flag in found if flag.startswith("--"))


def test_a_spec_is_not_overwritten(tmp_path):
    """By its own path, another one to the same file, or the name that a rendered file would get."""
    here, name = load("nano-here", runs="runs"), "nano-here.local.sh"
    source = tmp_path / name
    specs.save(here, source)
    (tmp_path / "linked.sh").symlink_to(source)
    for out in (source, f"{tmp_path}/../{tmp_path.name}/{name}", tmp_path / "linked.sh", tmp_path):
        with pytest.raises(
            ConfigError, match=r"is what is read, and would be overwritten; give another file with --out"
        ):
            make(here, "local", out, source=source)
    assert specs.load(source) == here
    assert make(here, "local", tmp_path / "other.sh", source=source).read_text().startswith("#!")


def test_a_folder_to_write_to(tmp_path):
    """A slash at the end means one."""
    assert make(load("nano-here"), "local", f"{tmp_path}/a/b/") == tmp_path / "a" / "b" / "nano-here.local.sh"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write '.*/file/': .*File exists"):
        make(load("nano-here"), "local", f"{tmp_path}/file/")
    with pytest.raises(ConfigError, match=r"cannot write '.*/none/x.sh': .*No such file"):
        make(load("nano-here"), "local", tmp_path / "none" / "x.sh")


def tool(folder: pathlib.Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def run(text: str, folder: pathlib.Path, **environment) -> subprocess.CompletedProcess:
    (folder / "script").write_text(text)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | environment
    return subprocess.run(["bash", folder / "script"], cwd=folder, env=env, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    "code, restarts, requeued",
    [(0, 0, False), (Exit.DATA, 0, False), (Exit.PREEMPTED, 99, True), (1, 2, True), (1, 3, False), (137, 0, True)],
)
def test_slurm_goes_back_into_the_queue(code, restarts, requeued, tmp_path):
    """The whole script with a false Slurm: two tasks are told who they are, and their exit code decides."""
    tool(tmp_path, "scontrol", 'echo "$@" >> calls; [[ $1 != show ]] || printf "node3\\nnode4\\n"')
    tool(tmp_path, "python", f'echo "$JAX_COORDINATOR_ADDRESS $JAX_PROCESS_ID/$JAX_NUM_PROCESSES $@"; exit {code}')
    tool(tmp_path, "srun", 'while [[ $1 == --* ]]; do shift; done; SLURM_PROCID=0 "$@"; SLURM_PROCID=1 exec "$@"')
    text = ENGINES["slurm"](load("nano-here", setup=("true",), retries=3, runs=str(tmp_path))).text
    done = run(text, tmp_path, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="node[3-4]", SLURM_RESTART_COUNT=str(restarts))
    assert ("requeue 7" in (tmp_path / "calls").read_text()) == requeued, done.stderr
    assert requeued or done.returncode == code
    assert "node3:20007 0/2 -m k3jax.train" in done.stdout and "node3:20007 1/2 -m k3jax.train" in done.stdout


@pytest.mark.parametrize("page", sorted(FOLDER.parent.parent.glob("docs/launch_*.md")), ids=lambda page: page.stem)
def test_specs_of_the_pages_are_rendered(page, tmp_path):
    """A page's spec is what its `launch.render` command takes; GKE's comes from a plan."""
    text = re.sub(r"\$(BUCKET|PROJECT|REGION|ZONE)", lambda found: found[1].lower(), page.read_text())
    engine = re.search(r"--to (\w+)", text)[1]
    for spec in re.findall(r"<<'?END'?\n(.*?)\nEND\n", text, re.DOTALL):
        (tmp_path / "spec.json").write_text(spec)
        assert ENGINES[engine](specs.load(tmp_path / "spec.json")).text


def test_the_same_spec_is_rendered_again(tmp_path):
    """Without a file that it comes from, too."""
    loaded = load("nano-here")
    assert make(loaded, "local", tmp_path) == make(loaded, "local", tmp_path)
