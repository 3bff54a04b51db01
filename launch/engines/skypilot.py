"""SkyPilot: a task for managed jobs, which finds machines in one's clouds, and others when they are taken back."""

import shlex
from typing import Any

from k3jax.config import ConfigError, require
from k3jax.exits import Exit
from launch import storage
from launch.command import PORT, Rendered, command, environment, labels, require_environment
from launch.machines import Gpu, Tpu, tpu_or_gpu
from launch.manifest import dump
from launch.spec import RunSpec

# SkyPilot asks for a number of chips, and the cloud answers with its usual shape for it.
USUAL = (
    (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16), (8, 16, 16),
    (16, 16, 16),
)  # fmt: skip
COORDINATOR = f'export JAX_COORDINATOR_ADDRESS="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{PORT}"'
NUMBERS = 'export JAX_NUM_PROCESSES="$SKYPILOT_NUM_NODES" JAX_PROCESS_ID="$SKYPILOT_NODE_RANK"'


def render(spec: RunSpec) -> Rendered:
    """A task for ``sky jobs launch``, to be started from the repository's root.

    Raises:
      ConfigError: a topology that SkyPilot cannot ask for, neither image nor setup, or storage without credentials.
    """
    resources = _resources(spec, tpu_or_gpu(spec.machines, "skypilot"))
    require_environment(spec, "skypilot")
    mounts, paths = _mounts(spec)
    several = spec.machines.is_gpu and spec.hosts > 1
    run = [*([COORDINATOR, NUMBERS] if several else []), f"exec {shlex.join(command(spec, **paths))}"]
    task = {
        "name": spec.name,
        "num_nodes": spec.hosts if spec.machines.is_gpu else 1,
        "workdir": ".",
        "resources": resources,
        "envs": environment(spec),
        "file_mounts": mounts,
        "setup": "\n".join(["set -e", *spec.setup]),
        "run": "\n".join(["set -e", *_activation(spec), *run]),
    }
    if not spec.setup:
        del task["setup"]
    return Rendered(dump(task), ".yaml", "sky jobs launch {file}")


def _activation(spec: RunSpec) -> list[str]:
    """SkyPilot runs `setup` and `run` in shells of their own: an environment is activated in both."""
    return [line for line in spec.setup if line.startswith(("source ", ". "))]


def _resources(spec: RunSpec, names: Tpu | Gpu) -> dict[str, Any]:
    recovery = {"max_restarts_on_errors": spec.retries, "recover_on_exit_codes": [int(Exit.PREEMPTED)]}
    found = {"accelerators": _accelerator(spec, names), "use_spot": spec.spot, "job_recovery": recovery}
    if spec.skypilot.infra:
        found = {"infra": spec.skypilot.infra, **found}
    if spec.image:
        found["image_id"] = f"docker:{spec.image}"
    if spec.labels:
        found["labels"] = labels(spec)
    return found


def _accelerator(spec: RunSpec, names: Tpu | Gpu) -> str:
    there = spec.machines
    if isinstance(names, Gpu):
        return f"{names.skypilot}:{spec.devices_per_host}"
    require(names.skypilot != "", f"SkyPilot 0.14.1 has no {there.kind}; gke and xpk have")
    require(spec.slices == 1, f"slices = {spec.slices}, but SkyPilot does not join slices; gke and xpk do")
    if len(there.shape) == 3:
        usual = next((shape for shape in USUAL if there.chips == shape[0] * shape[1] * shape[2]), None)
        instead = f", which is {there.kind}:{'x'.join(map(str, usual))}" if usual else ", and has no usual shape"
        require(
            there.shape == usual,
            f"SkyPilot cannot ask for {there.text}: a cloud gives its usual shape for {there.chips} chips{instead}",
        )
    elif there.shape == (2, 4):
        require(
            spec.devices_per_host == 8,
            f"{spec.hosts} hosts with {spec.devices_per_host} devices each, but SkyPilot's {there.text} is one with 8",
        )
    return f"{names.skypilot}-{there.chips * names.counted}"


def _mounts(spec: RunSpec) -> tuple[dict[str, Any], dict[str, str]]:
    """Buckets by the folder that they appear in, and those folders."""
    mounts, paths = {}, {"runs": "", "data": ""}
    for name, text, path in (("runs", spec.runs, storage.RUNS), ("data", spec.data, storage.DATA)):
        if not (place := storage.parse(text)):
            continue
        storage.refuse_path(place, "skypilot")
        require(place.is_bucket, f"skypilot cannot mount {text!r}; give gs://bucket/folder or s3://bucket/folder")
        if name == "runs" and place.kind == "s3" and spec.hosts > 1:
            raise ConfigError(
                f"skypilot cannot keep the run folder of {spec.hosts} hosts in {text!r}: its mount of s3:// cannot "
                "rename or append, and its cached one is each host's own; give gs://bucket/folder"
            )
        storage.check_credentials(place)
        cached = place.kind == "s3" and name == "runs"
        mounts[path] = {"source": text.rstrip("/"), "mode": "MOUNT_CACHED" if cached else "MOUNT"}
        paths[name] = path
    return mounts, paths
