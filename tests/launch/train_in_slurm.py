"""Trains in a Slurm of this machine, is preempted again and again, and ends like a run that was left alone.

    PYTHONPATH=. python tests/launch/train_in_slurm.py --preemptions 2

Two tasks with one simulated device each. It needs Debian's packages `slurm-wlm` and `munge`, and root. The exit code is
0 if everything in the train state is equal bit for bit at the end.
"""

import dataclasses
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import kill_local
import numpy as np
import slurm_cluster
from absl import app, flags
from kill_local import ROOT, kill_run

from launch import render

SETTINGS = ("steps=40", "checkpoint_every=1000")  # only a preemption saves in between


def train(folder: pathlib.Path, name: str, env: dict[str, str], preemptions: int, patience: float) -> pathlib.Path:
    """Submits the run and waits for its end, which it must come to by itself. Returns its folder."""
    setup = (f"export PYTHONPATH={ROOT} PATH={pathlib.Path(sys.executable).parent}:$PATH",)
    spec = dataclasses.replace(kill_local.spec_of(folder, name, 2), setup=setup, retries=0)
    job = slurm_cluster.submit(render.make(spec, "slurm", folder), env, folder)
    run, done, deadline = folder / name, 0, time.monotonic() + patience
    while (state := slurm_cluster.state(job, env))["JobState"] not in ("COMPLETED", "FAILED", "CANCELLED"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} is {state['JobState']} after {patience:.0f} s; its log is in {folder}")
        steps = max(kill_run.training_steps(run), default=0)
        if done < preemptions and state["JobState"] == "RUNNING" and steps >= 10 * (done + 1):
            subprocess.run(["scancel", "--signal=TERM", job], env=env, check=True, timeout=60)
            done += 1
            print(f"{name}: preempted at step {steps}", flush=True)
        time.sleep(0.5)
    print(f"{name}: {state['JobState']}, exit code {state['ExitCode']}, requeued {state['Restarts']} times", flush=True)
    if (state["JobState"], state["Restarts"]) != ("COMPLETED", str(preemptions)):
        raise RuntimeError((folder / f"{name}-{job}.log").read_text()[-4000:])
    return run


def main(_) -> None:
    given, folder = flags.FLAGS, pathlib.Path(tempfile.mkdtemp(prefix="train_in_slurm_"))
    kill_local.write_config(folder, given.config, SETTINGS)
    with slurm_cluster.cluster(folder) as env:
        expected = kill_run.arrays(train(folder, "whole", env, 0, given.patience))
        found = kill_run.arrays(train(folder, "preempted", env, given.preemptions, given.patience))
    assert expected.keys() == found.keys()
    differ = [name for name in expected if not np.array_equal(expected[name], found[name], equal_nan=True)]
    print(f"all {len(expected)} arrays are equal bit for bit" if not differ else f"DIFFERENT: {differ}")
    if not differ:
        shutil.rmtree(folder)
    raise SystemExit(1 if differ else 0)


if __name__ == "__main__":
    flags.DEFINE_string("config", "tiny", "the preset")
    flags.DEFINE_integer("preemptions", 2, "how often, from step 10 on at every tenth", lower_bound=1, upper_bound=3)
    flags.DEFINE_float("patience", 1200.0, "seconds for each of the two runs")
    app.run(main)
