"""What needs other environments or an index of packages: run where they are, as in CI, and skipped elsewhere."""

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest

from launch import spec as specs
from launch.machines import TPUS

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parent.parent


def loaded(engine: str, tmp_path: pathlib.Path) -> dict[str, dict]:
    """What the engine's own loader makes of its goldens, by the name of their spec."""
    variable = f"K3JAX_{engine.upper()}_PYTHON"
    if not (python := os.environ.get(variable)):
        pytest.skip(f"{variable} names no Python with {engine}: python -m venv X; X/bin/pip install {engine}")
    (tmp_path / "key.json").touch()
    env = os.environ | {"HOME": str(tmp_path), "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "key.json")}
    paths = sorted((FOLDER / "goldens").glob(f"*.{engine}.*"))
    command = [python, FOLDER / "their_loaders.py", engine, *paths]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(paths) > 0
    return {path.name.split(".")[0]: line for path, line in zip(paths, lines)}


def test_skypilot_reads_its_tasks(tmp_path):
    found = loaded("skypilot", tmp_path)
    assert found == {
        "h100-nodes": {"nodes": 2, "accelerators": {"H100": 8}, "spot": True},
        "ladder-v6e": {"nodes": 1, "accelerators": {"tpu-v6e-16": 1}, "spot": True},
    }


def test_xpk_reads_its_commands(tmp_path):
    """Their count of hosts and chips is ours, and so is the label of the nodes."""
    for name, line in loaded("xpk", tmp_path).items():
        spec = specs.load(FOLDER / "specs" / f"{name}.json")
        assert line["hosts"] == spec.hosts and line["chips"] * spec.hosts == spec.machines.chips * spec.slices
        label = TPUS[spec.machines.kind].gke if spec.machines.is_tpu else spec.kubernetes.accelerator
        assert line["label"] == label
        assert shlex.split(line["command"])[-2:] in (
            ["--layout", spec.layout],
            ["--set", "data=TokenRecords(path='/mnt/data')"],
        )


@pytest.mark.parametrize("python", ["3.12", "3.13"])
@pytest.mark.parametrize("kind", ["", "-tpu", "-cuda13"])
def test_requirements_resolve(kind, python):
    """For Linux on x86-64 with glibc 2.31, from wheels alone; nothing is installed."""
    uv = shutil.which("uv", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if uv is None:
        pytest.skip("no uv to resolve for other versions of Python: pip install uv")
    command = [
        uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--only-binary=:all:",
        "--python-platform=x86_64-manylinux_2_31", f"--python-version={python}", ROOT / f"requirements{kind}.txt",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    names = {line.partition("==")[0] for line in done.stdout.splitlines()}
    assert {"jax", {"": "flax", "-tpu": "libtpu", "-cuda13": "jax-cuda13-plugin"}[kind]} <= names
