#!/usr/bin/env bash
# nano-here: 2 process(es) with 4 device(s) of cpu each, here.
set -e
export JAX_PLATFORMS=cpu
export XLA_FLAGS='--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0'
source .venv/bin/activate
exec python -m launch.local --processes=2 --logs=/shared/runs/nano-here/logs --retries=10 --grace=120 -- \
  python -m k3jax.train --config nano --run /shared/runs/nano-here --expect cpu:4 --hang_after 1800 --layout nano_8
