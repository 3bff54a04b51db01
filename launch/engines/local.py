"""This machine: a bash script that starts the processes, and stops them all when one fails."""

import shlex

from k3jax.config import require
from launch import storage
from launch.command import Rendered, command, exports
from launch.spec import RunSpec

SCRIPT = """\
set -uo pipefail
logs={logs}
mkdir -p "$logs"
port=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
declare -A running
for ((process = 0; process < {processes}; process++)); do
  {command} --coordinator "localhost:$port" --processes {processes} --process "$process" \\
    > >(tee -a "$logs/$process.log" | sed -u "s/^/[$process] /") 2>&1 &
  running[$!]=$process
done
trap 'kill -TERM "${{!running[@]}}" 2> /dev/null' INT TERM
code=0
while ((${{#running[@]}})); do
  wait -n -p finished "${{!running[@]}}"
  result=$?
  [[ -n ${{finished:-}} ]] || continue  # a signal came, and was passed on
  if ((result != 0 && code == 0)); then
    code=$result
    echo "process ${{running[$finished]}} left with exit code $result: stopping the others"
    unset "running[$finished]"
    kill -TERM "${{!running[@]}}" 2> /dev/null
    (trap 'kill $!; exit' TERM; sleep {grace} & wait $!; kill -KILL "${{!running[@]}}") > /dev/null 2>&1 &
    killer=$!
  else
    unset "running[$finished]"
  fi
done
[[ -z ${{killer:-}} ]] || kill "$killer" 2> /dev/null
exit $code
"""


def render(spec: RunSpec) -> Rendered:
    """A script for bash 5.1 or newer.

    Raises:
      ConfigError: several hosts of real devices, a bucket, or an image.
    """
    there = spec.machines
    require(
        there.kind == "cpu" or spec.hosts == 1,
        f"local is one machine, but {spec.topology} has {spec.hosts} hosts; cpu:{spec.hosts}x{spec.devices_per_host} "
        "would simulate them",
    )
    data = spec.data and storage.absolute(spec.data, "local")
    run = command(spec, runs=storage.absolute(spec.runs, "local"), data=data)
    head = [
        "#!/usr/bin/env bash",
        f"# {spec.name}: {spec.hosts} process(es) with {spec.devices_per_host} device(s) of {there.kind} each, here.",
        *exports(spec),
        *spec.setup,
    ]
    if spec.hosts == 1:
        body = f"exec {shlex.join(run)}\n"
    else:
        logs = shlex.quote(f"{spec.runs}/{spec.name}/logs")
        body = SCRIPT.format(logs=logs, processes=spec.hosts, command=shlex.join(run), grace=spec.grace_seconds)
    return Rendered("\n".join(head) + "\n" + body, ".sh", "bash {file}")
