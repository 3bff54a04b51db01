#!/usr/bin/env bash
# nano-here: 2 process(es) with 4 device(s) of cpu each, here.
export JAX_PLATFORMS=cpu
export XLA_FLAGS='--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0'
source .venv/bin/activate
set -uo pipefail
logs=/shared/runs/nano-here/logs
mkdir -p "$logs"
port=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
declare -A running
for ((process = 0; process < 2; process++)); do
  python -m k3jax.train --config nano --run /shared/runs/nano-here --layout nano_8 --coordinator "localhost:$port" --processes 2 --process "$process" \
    > >(tee -a "$logs/$process.log" | sed -u "s/^/[$process] /") 2>&1 &
  running[$!]=$process
done
trap 'kill -TERM "${!running[@]}" 2> /dev/null' INT TERM
code=0
while ((${#running[@]})); do
  wait -n -p finished "${!running[@]}"
  result=$?
  [[ -n ${finished:-} ]] || continue  # a signal came, and was passed on
  if ((result != 0 && code == 0)); then
    code=$result
    echo "process ${running[$finished]} left with exit code $result: stopping the others"
    unset "running[$finished]"
    kill -TERM "${!running[@]}" 2> /dev/null
    (trap 'kill $!; exit' TERM; sleep 120 & wait $!; kill -KILL "${!running[@]}") > /dev/null 2>&1 &
    killer=$!
  else
    unset "running[$finished]"
  fi
done
[[ -z ${killer:-} ]] || kill "$killer" 2> /dev/null
exit $code
