"""Slurm: an sbatch script of one task a node, which is put back into the queue when its run was preempted."""

import shlex

from k3jax.config import ConfigError, require
from k3jax.exits import FINAL, Exit
from launch import storage
from launch.command import Rendered, command, exports, require_environment
from launch.spec import RunSpec

# Slurm sends TERM to the tasks, which save and leave with 75. `trap :` keeps this shell alive to see it. srun must not
# kill the others when the first task leaves: one may still be completing the checkpoint.
SCRIPT = """\
trap : TERM
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export JAX_COORDINATOR_ADDRESS="$head:$((20000 + SLURM_JOB_ID % 20000))"
export JAX_NUM_PROCESSES={hosts}
{devices}srun --label --kill-on-bad-exit=0 --wait={grace}{container} \\
  bash -ec {task} task \\
  {command}
code=$?
case $code in
  0) exit 0 ;;
  {final}) exit $code ;;  # see k3jax/exits.py: something is to be mended first
  {preempted}) ;;  # saved, and goes on when it is started again
  *) ((${{SLURM_RESTART_COUNT:-0}} < {retries})) || exit $code ;;
esac
echo "exit code $code: back into the queue"
scontrol requeue "$SLURM_JOB_ID"
"""


def render(spec: RunSpec) -> Rendered:
    """A script for ``sbatch``, to be submitted from the repository's root.

    Raises:
      ConfigError: TPUs, storage that is no path, or neither image nor setup.
    """
    there = spec.machines
    if there.is_tpu:
        raise ConfigError(f"slurm has no {spec.topology}: TPU slices come from gke, xpk or skypilot")
    require(not spec.spot, "RunSpec.spot is true, but Slurm has no such machines: a preemptible partition is its like")
    require_environment(spec, "slurm")
    runs = storage.absolute(spec.runs, "slurm")
    data = spec.data and storage.absolute(spec.data, "slurm")
    # Within Slurm JAX takes one GPU a task unless it is told otherwise.
    local = ",".join(map(str, range(spec.devices_per_host)))
    script = SCRIPT.format(
        hosts=spec.hosts,
        devices=f"export JAX_LOCAL_DEVICE_IDS={local}\n" if there.is_gpu else "",
        grace=spec.grace_seconds,
        container=_container(spec, [runs, *([data] if data else [])]),
        task=shlex.quote("\n".join([*spec.setup, 'JAX_PROCESS_ID=$SLURM_PROCID exec "$@"'])),
        command=shlex.join(command(spec, runs=runs, data=data)),
        final="|".join(str(int(code)) for code in FINAL),
        preempted=int(Exit.PREEMPTED),
        retries=spec.retries,
    )
    lines = ["#!/usr/bin/env bash", *_directives(spec), *exports(spec), f"mkdir -p {shlex.quote(runs)}"]
    return Rendered("\n".join(lines) + "\n" + script, ".sbatch", "sbatch {file}")


def _directives(spec: RunSpec) -> list[str]:
    options = [f"--job-name={spec.name}", f"--ntasks={spec.hosts}"]
    if spec.machines.is_gpu:
        options += [
            f"--nodes={spec.hosts}", "--ntasks-per-node=1", f"--gpus-per-node={spec.devices_per_host}", "--exclusive",
        ]  # fmt: skip
    options += [
        f"--output={spec.name}-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=TERM@{spec.grace_seconds}",
    ]
    given = {"partition": spec.slurm.partition, "account": spec.slurm.account, "time": spec.slurm.time}
    options += [f"--{name}={value}" for name, value in given.items() if value]
    options += [f"--comment={','.join(spec.labels)}"] if spec.labels else []
    return [f"#SBATCH {option}" for option in [*options, *spec.slurm.options]]


def _container(spec: RunSpec, folders: list[str]) -> str:
    """Options of pyxis, the container plugin of Slurm, which separates folders by commas and colons."""
    if not spec.image:
        return ""
    for folder in folders:
        require(not set(folder) & set(",:"), f"pyxis cannot mount {folder!r}, which has a comma or a colon")
    mounts = ",".join(f"{folder}:{folder}" for folder in dict.fromkeys(folders))
    parts = [f"--container-image={spec.image}", f"--container-mounts={mounts}", "--container-workdir=/k3jax"]
    return " " + shlex.join(parts)
