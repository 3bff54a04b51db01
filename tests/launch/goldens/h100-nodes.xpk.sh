#!/usr/bin/env bash
xpk \
  workload \
  create \
  --cluster=gpus \
  --project=project \
  --zone=us-central1-a \
  --workload=h100-nodes \
  --device-type=h100-mega-80gb-8 \
  --num-nodes=2 \
  --docker-image=us-docker.pkg.dev/project/k3/k3jax:cuda13 \
  --max-restarts=10 \
  --restart-on-exit-codes=1,9,10,75 \
  --termination-grace-period-seconds=120 \
  --storage=h100-nodes-runs \
  --env=JAX_PLATFORMS=cuda,cpu \
  --spot \
  '--command=pip install -r requirements-cuda13.txt && export JAX_COORDINATOR_ADDRESS=$JAX_COORDINATOR_ADDRESS:$JAX_COORDINATOR_PORT JAX_NUM_PROCESSES=$NNODES JAX_PROCESS_ID=$NODE_RANK && exec python -m k3jax.train --config attnres_194m --run /mnt/runs/h100-nodes --expect h100:8 --hang_after 1800 --layout attnres_16'
