#!/usr/bin/env bash
xpk \
  workload \
  create \
  --cluster=pods \
  --project=project \
  --zone=us-east5-a \
  --workload=k3-v5p \
  --tpu-type=v5p-16x16x16 \
  --num-slices=1 \
  --docker-image=us-docker.pkg.dev/project/k3/k3jax:tpu \
  --max-restarts=50 \
  --restart-on-exit-codes=1,9,10,75 \
  --termination-grace-period-seconds=120 \
  --storage=k3-v5p-runs \
  --storage=k3-v5p-data \
  --env=JAX_PLATFORMS=tpu,cpu \
  '--command=exec python -m k3jax.train --config kimi_k3 --run /mnt/runs/k3-v5p --expect v5p:4 --hang_after 1800 --layout kimi_k3_v5p --set '"'"'data=TokenRecords(path='"'"'"'"'"'"'"'"'/mnt/data'"'"'"'"'"'"'"'"')'"'"''
