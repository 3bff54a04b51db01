#!/usr/bin/env bash
xpk \
  workload \
  create \
  --cluster=pods \
  --project=project \
  --zone=us-west4-a \
  --workload=three-slices \
  --tpu-type=v5litepod-4x4 \
  --num-slices=3 \
  --docker-image=us-docker.pkg.dev/project/k3/k3jax:tpu \
  --max-restarts=10 \
  --restart-on-exit-codes=1,9,10,75 \
  --termination-grace-period-seconds=120 \
  --storage=three-slices-runs \
  --env=JAX_PLATFORMS=tpu,cpu \
  --spot \
  '--command=exec python -m k3jax.train --config attnres_528m --run /mnt/runs/three-slices --expect v5e:4 --hang_after 1800 --layout data=3,fsdp=2,expert=8'
