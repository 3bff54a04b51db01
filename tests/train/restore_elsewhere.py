"""What a run looks like from other devices than it was trained on: held-out loss, and the batch that comes next.

As a program, one of several processes:

    python tests/train/restore_elsewhere.py RUN MESH COORDINATOR PROCESSES PROCESS
"""

import hashlib
import json
import pathlib
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

from k3jax import distributed, layouts, placement, runtime
from k3jax.checkpoint import Checkpoints
from k3jax.loop import Evaluator, Rows
from k3jax.train import OpenData


def look(run: pathlib.Path, mesh: jax.sharding.Mesh | None) -> dict:
    """Held-out nats of the newest checkpoint, and a digest of the batch of the step after it."""
    with Checkpoints(run, create=False) as checkpoints:
        config = checkpoints.config(checkpoints.latest())
        shardings = None if mesh is None else placement.state_shardings(config, mesh)
        state = checkpoints.restore(config, shardings=shardings).state
    data = OpenData(config)(0)
    rows = Rows(config, mesh)
    batch = rows.place(rows.local(data.batches)[int(state.step)])
    if jax.process_count() > 1:
        batch = multihost_utils.process_allgather(batch, tiled=True)
    digest = hashlib.sha256(b"".join(np.asarray(field).tobytes() for field in batch)).hexdigest()
    (make,) = data.held_out.values()
    nats, _ = Evaluator(config, mesh).totals(state.weights, make())
    return {"nats": nats, "batch": digest, "step": int(state.step)}


if __name__ == "__main__":
    run, text, coordinator, processes, process = sys.argv[1:]
    runtime.start()
    distributed.join_processes(coordinator, int(processes), int(process))
    print(json.dumps(look(pathlib.Path(run), placement.make_mesh(layouts.load(text).sizes))))
