"""This machine: a bash script that makes the environment and starts `launch.local`."""

import shlex

from k3jax.config import require
from launch import storage
from launch.command import Rendered, command, exports
from launch.spec import RunSpec


def render(spec: RunSpec) -> Rendered:
    """A script for bash, to be started from the repository's root.

    Raises:
      ConfigError: several hosts of TPUs, a bucket, or an image.
    """
    there = spec.machines
    require(
        not there.is_tpu or spec.hosts == 1,
        f"local is one machine, but {spec.topology} has {spec.hosts} hosts; cpu:{spec.hosts}x{spec.devices_per_host} "
        "would simulate them",
    )
    require(
        not spec.image, f"local starts no container, but RunSpec.image = {spec.image!r}; leave it out, and name setup"
    )
    data = spec.data and storage.absolute(spec.data, "local")
    run = command(spec, runs=storage.absolute(spec.runs, "local"), data=data)
    options = [f"--processes={spec.hosts}", f"--logs={spec.runs}/{spec.name}/logs"]
    options += [f"--gpus={spec.devices_per_host}"] if there.is_gpu else []
    options += [f"--retries={spec.retries}", f"--grace={spec.grace_seconds}"]
    lines = [
        "#!/usr/bin/env bash",
        f"# {spec.name}: {spec.hosts} process(es) with {spec.devices_per_host} device(s) of {there.kind} each, here.",
        "set -e",
        *exports(spec),
        *spec.setup,
        f"exec python -m launch.local {shlex.join(options)} -- \\",
        f"  {shlex.join(run)}",
    ]
    return Rendered("\n".join(lines) + "\n", ".sh", "bash {file}")
