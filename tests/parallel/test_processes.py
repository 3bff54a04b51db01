"""Eight devices of two processes give what eight devices of one do."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import step_in_processes

HERE = pathlib.Path(__file__).parent


def test_two_processes_with_four_devices_equal_one_with_eight(tmp_path):
    """Losses of two steps, and all weights after them; what crosses between the processes goes over sockets (gloo)."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(HERE.parent.parent)}
    processes = [
        subprocess.Popen(
            [sys.executable, HERE / "step_in_processes.py", tmp_path / f"{number}.npz", coordinator, "2", str(number)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    losses, weights = step_in_processes.two_steps()
    for number, process in enumerate(processes):
        printed, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        found = json.loads(printed.splitlines()[-1])
        assert (found["processes"], found["devices"]) == (2, 4)
        np.testing.assert_allclose(found["losses"], losses, rtol=1e-6)
        arrays = np.load(tmp_path / f"{number}.npz")
        assert set(arrays) == set(weights)
        for name, value in weights.items():
            np.testing.assert_allclose(arrays[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert losses[1] < losses[0]
