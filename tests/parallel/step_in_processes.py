"""Two steps of a small run on eight devices, which may belong to several processes.

As a program, one of several processes, which prints the losses and writes the parameters:

    python tests/parallel/step_in_processes.py FILE COORDINATOR PROCESSES PROCESS
"""

import json
import sys

import jax
import numpy as np
import small_run
from jax.experimental import multihost_utils

from k3jax import config as c
from k3jax import distributed, layouts, loop, placement, runtime
from k3jax.roles import path_name

# The expert axis comes first on this mesh, and lies across two processes: tokens, parameters, gradients, the matrices
# of Muon and the balancer's counts travel over it.
LAYOUT = layouts.load("expert=2,context=2,tensor=2")
CONFIG = small_run.run_of(1, (1,), experts=c.QuantileBalancing(bins=50))


def two_steps() -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses, and all weights after the second step by path."""
    mesh = placement.make_mesh(LAYOUT.sizes)
    shardings = placement.state_shardings(CONFIG, mesh, LAYOUT)
    state = placement.put(small_run.state_of(CONFIG), shardings)
    part, parts = placement.rows_of_this_process(small_run.B, mesh)
    size = small_run.B // parts
    rows = jax.tree.map(lambda x: x[part * size : (part + 1) * size], small_run.batch())
    batch = placement.put_batch(rows, mesh, part, parts)
    step, losses = loop.lower_step(CONFIG, state, batch, shardings, LAYOUT).compile(), []
    for _ in range(2):
        state, seen = step(state, batch)
        losses.append(float(seen.loss))
    fetch = jax.device_get if jax.process_count() == 1 else multihost_utils.process_allgather
    leaves = jax.tree_util.tree_leaves_with_path(state.weights)
    whole = fetch([x for _, x in leaves], **({} if jax.process_count() == 1 else {"tiled": True}))
    return losses, {path_name(path): np.asarray(x) for (path, _), x in zip(leaves, whole)}


if __name__ == "__main__":
    file, coordinator, processes, process = sys.argv[1:]
    runtime.start()
    distributed.join_processes(coordinator, int(processes), int(process))
    losses, weights = two_steps()
    np.savez(file, **weights)
    print(json.dumps({"losses": losses, "processes": jax.process_count(), "devices": jax.local_device_count()}))
