"""Stands for training, in seconds: processes add up what each of them has, step by step, and keep every sum.

    python tests/launch/adding_up.py FOLDER STEPS DIES --coordinator HOST:PORT --processes N --process I

Process I dies by SIGKILL after step DIES, once.
"""

import os
import pathlib
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax import distributed

folder, steps, dies = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
coordinator, processes, process = sys.argv[5], int(sys.argv[7]), int(sys.argv[9])
distributed.join_processes(coordinator, processes, process)
mesh = Mesh(np.array(jax.devices()), ("data",))
spread, alike = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
own = jax.make_array_from_callback((64,), spread, lambda index: np.random.default_rng(0).normal(size=64)[index])
step = jax.jit(lambda total, own: jnp.cos(total + (own * total).sum()), out_shardings=alike)
saved = sorted(int(path.stem) for path in folder.glob("*.npy"))
first = saved[-1] if saved else 0
total = jax.device_put(np.load(folder / f"{first}.npy") if saved else np.ones(()), alike)
print(f"begins after step {first}", flush=True)
for number in range(first + 1, steps + 1):
    total = step(total, own)
    value = np.asarray(total.addressable_data(0))
    if process == 0:
        np.save(folder / f"{number}.new", value)
        os.replace(folder / f"{number}.new.npy", folder / f"{number}.npy")
    if process == 1 and number == dies and not (folder / "dead").exists():
        (folder / "dead").touch()
        os.kill(os.getpid(), signal.SIGKILL)
