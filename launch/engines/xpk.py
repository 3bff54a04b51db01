"""xpk: the command that makes a workload on a cluster that xpk made."""

import shlex

from k3jax.config import ConfigError, require
from k3jax.exits import Exit
from launch import storage
from launch.command import Rendered, command, environment, require_image
from launch.machines import Gpu, Tpu, tpu_or_gpu
from launch.spec import Preflight, RunSpec

# Besides those, xpk starts anew after 42 and 127 to 255. 1 is an error that has no code of its own.
AGAIN = (1, Exit.PEERS, Exit.HUNG, Exit.PREEMPTED)
# xpk gives GPU hosts the coordinator's name and port apart.
NUMBERS = (
    "export JAX_COORDINATOR_ADDRESS=$JAX_COORDINATOR_ADDRESS:$JAX_COORDINATOR_PORT JAX_NUM_PROCESSES=$NNODES "
    "JAX_PROCESS_ID=$NODE_RANK"
)


def render(spec: RunSpec) -> Rendered:
    """A script with one command.

    Raises:
      ConfigError: a topology that xpk does not have, no image or cluster, or storage without credentials.
    """
    names, where = tpu_or_gpu(spec.machines, "xpk"), spec.kubernetes
    require_image(spec, "xpk")
    for field in ("cluster", "project", "location"):
        require(getattr(where, field) != "", f"xpk needs kubernetes.{field}, and it is empty")
    _check_hosts(spec)
    paths, before, stores = _storage(spec)
    arguments = [
        "xpk", "workload", "create", f"--cluster={where.cluster}", f"--project={where.project}",
        f"--zone={where.location}", f"--workload={spec.name}", *_devices(spec, names),
        f"--docker-image={spec.image}", f"--max-restarts={spec.retries}",
        f"--restart-on-exit-codes={','.join(str(int(code)) for code in AGAIN)}",
        f"--termination-grace-period-seconds={spec.grace_seconds}", *[f"--storage={name}" for name in stores],
        *[f"--env={name}={value}" for name, value in environment(spec).items()], *(["--spot"] if spec.spot else []),
        f"--command={_inner(spec, paths)}",
    ]  # fmt: skip
    text = "#!/usr/bin/env bash\n" + " \\\n  ".join(shlex.quote(argument) for argument in arguments) + "\n"
    notes = ("xpk workloads take no labels: those of the spec are left out",) if spec.labels else ()
    return Rendered(text, ".sh", "bash {file}", before=tuple(before), notes=notes)


def _check_hosts(spec: RunSpec) -> None:
    """Raises ConfigError for a host with eight chips: xpk's have four."""
    chips = spec.devices_per_host // spec.machines.cores
    require(
        not spec.machines.is_tpu or chips <= 4,
        f"{spec.hosts} hosts with {spec.devices_per_host} devices each, but xpk makes {spec.topology} of hosts with "
        f"{4 * spec.machines.cores}",
    )


def _devices(spec: RunSpec, names: Tpu | Gpu) -> list[str]:
    if isinstance(names, Tpu):
        return [f"--tpu-type={names.xpk}-{spec.machines.size}", f"--num-slices={spec.slices}"]
    kind = (spec.kubernetes.accelerator or names.gke).removeprefix("nvidia-")
    return [f"--device-type={kind}-{spec.devices_per_host}", f"--num-nodes={spec.hosts}"]


def _inner(spec: RunSpec, paths: dict[str, str]) -> str:
    """The command in the container. With `exec` the signal of a preemption comes to the process that saves."""
    numbers = [NUMBERS] if spec.machines.is_gpu and spec.hosts > 1 else []
    inner = " && ".join([*spec.setup, *numbers, f"exec {shlex.join(command(spec, **paths))}"])
    if spec.machines.is_gpu and set(inner) & set('"\\'):
        raise ConfigError(
            f"xpk puts a GPU workload's command into double quotes, and it has some of its own: {inner}; name the data "
            "in the configuration, with RunSpec.data empty"
        )
    return inner


def _storage(spec: RunSpec) -> tuple[dict[str, str], list[str], list[str]]:
    """Folders in the container, commands that attach the buckets to the cluster, and the names they get: those of the
    run for its preflight, too, so that they are attached once."""
    owner = spec.job.run if isinstance(spec.job, Preflight) and spec.job.run else spec.name
    paths, before, stores = {"runs": "", "data": ""}, [], []
    for name, text, path in (("runs", spec.runs, storage.RUNS), ("data", spec.data, storage.DATA)):
        if not (place := storage.parse(text)):
            continue
        storage.refuse_path(place, "xpk")
        require(place.kind == "gs", f"xpk cannot mount {text!r}; give gs://bucket/folder")
        storage.check_credentials(place)
        where, store = spec.kubernetes, f"{owner}-{name}"
        before.append(
            shlex.join([
                "xpk", "storage", "attach", store, "--type=gcsfuse", f"--bucket={place.owner}", "--size=1",
                f"--cluster={where.cluster}", f"--project={where.project}", f"--zone={where.location}",
                f"--mount-point={path}", f"--readonly={str(name == 'data').lower()}", "--auto-mount=false",
                f"--mount-options={storage.fuse_options(place)}",
            ])
        )  # fmt: skip
        stores.append(store)
        paths[name] = path
    return paths, before, stores
