"""A rendered script in a real Slurm of this machine: submitted, preempted, requeued, and finished."""

import dataclasses
import os
import pathlib
import subprocess
import time

import pytest
import slurm_cluster

from k3jax.exits import Exit
from launch.engines import slurm
from launch.spec import RunSpec, Train

# Stands for a training process: it says who it is, saves when it is told to stop, and is done when it has saved twice
# before. `fail` in its folder is the exit code to fail with instead.
PYTHON = """#!/bin/bash
cd "$FOLDER"
echo "process $JAX_PROCESS_ID of $JAX_NUM_PROCESSES at $JAX_COORDINATOR_ADDRESS, start $SLURM_RESTART_COUNT"
trap 'echo saved; touch saved$((1 + ${SLURM_RESTART_COUNT:-0})).$JAX_PROCESS_ID; exit 75' TERM
touch up${SLURM_RESTART_COUNT:-0}.$JAX_PROCESS_ID
[[ ! -e fail ]] || exit $(cat fail)
[[ ! -e saved2.0 ]] || exit 0
for _ in {1..60}; do sleep 1 & wait; done  # the signal may end a sleep before it comes here
exit 1
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if problem := slurm_cluster.missing():
        if os.environ.get("K3JAX_NEEDS_SLURM"):
            pytest.fail(problem)
        pytest.skip(problem)
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as env:
        yield env


def submit(folder: pathlib.Path, env: dict[str, str], **fields) -> tuple[str, dict[str, str]]:
    (folder / "bin").mkdir()
    (folder / "bin" / "python").write_text(PYTHON)
    (folder / "bin" / "python").chmod(0o755)
    spec = RunSpec(
        "nano", Train("nano"), "cpu:2x4", 2, 4, "nano_8", str(folder / "runs"), setup=("true",), grace_seconds=5
    )
    script = folder / "nano.sbatch"
    script.write_text(slurm.render(dataclasses.replace(spec, **fields)).text)
    env = env | {"FOLDER": str(folder), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    return slurm_cluster.submit(script, env, folder), env


def wait(what, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def has_ended(job: str, env: dict[str, str]) -> bool:
    return slurm_cluster.state(job, env)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED")


@pytest.mark.xdist_group("slurm")
def test_preempted_requeued_and_finished(cluster, tmp_path):
    """Twice preempted, with no retries for failures."""
    job, env = submit(tmp_path, cluster, retries=0)
    for start in (0, 1):
        wait(lambda start=start: all((tmp_path / f"up{start}.{n}").exists() for n in (0, 1)))
        subprocess.run(["scancel", "--signal=TERM", job], env=env, check=True, timeout=60)
        wait(lambda start=start: all((tmp_path / f"saved{start + 1}.{n}").exists() for n in (0, 1)))
    wait(lambda: has_ended(job, env))
    found = slurm_cluster.state(job, env)
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("COMPLETED", "0:0", "2")
    log = (tmp_path / f"nano-{job}.log").read_text()
    assert log.count("exit code 75: back into the queue") == 2
    port = 20000 + int(job) % 20000
    for number in (0, 1):
        assert f"{number}: process {number} of 2 at {os.uname().nodename.partition('.')[0]}:{port}, start 2" in log


@pytest.mark.xdist_group("slurm")
@pytest.mark.parametrize("code, restarts", [(Exit.DATA, 0), (Exit.PEERS, 1)])
def test_failed(code, restarts, cluster, tmp_path):
    """A final exit code ends the job with it, another one when its retries are used up."""
    (tmp_path / "fail").write_text(str(int(code)))
    job, env = submit(tmp_path, cluster, retries=1)
    wait(lambda: has_ended(job, env))
    found = slurm_cluster.state(job, env)
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("FAILED", f"{int(code)}:0", str(restarts))
