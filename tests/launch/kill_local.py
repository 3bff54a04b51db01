"""Kills one process of a local run with SIGKILL again and again, and compares its end with that of a run left alone.

    PYTHONPATH=. python tests/launch/kill_local.py --processes 2 --kills 20

The launcher is started once, as the spec is rendered: it must notice, stop the other processes and start all again.
Half of the moments lie inside the writing of a checkpoint, the others anywhere from a start on. The exit code is 0 if
all parameters, and everything else of the train state, are equal bit for bit at the end.
"""

import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np
import psutil
from absl import app, flags, logging

from k3jax import config_io, presets
from launch import render
from launch.spec import RunSpec, Train

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent / "train"))

import kill_run  # noqa: E402

LAYOUTS = {2: "fsdp=2", 4: "fsdp=2,expert=2"}
SETTINGS = ("seq_len=32", "batch=4", "eval_every=1000", "sample_tokens=0")
SMALL = ("model.layers=1", "model.full_attention=[1]", "model.dense_layers=1", "seq_len=16", "loss_chunk=16")


def spec_of(folder: pathlib.Path, name: str, processes: int) -> RunSpec:
    """The run on one simulated device a process. Its configuration lies in the folder."""
    return RunSpec(
        name=name,
        job=Train(str(folder / "config.json")),
        topology=f"cpu:{processes}x1",
        hosts=processes,
        devices_per_host=1,
        layout=LAYOUTS[processes],
        runs=str(folder),
        env=("XLA_FLAGS=--xla_backend_optimization_level=0",),
        retries=1000,
        grace_seconds=60,
    )


def write_config(folder: pathlib.Path, preset: str, settings: tuple[str, ...]) -> None:
    text = kill_run.write_text(folder / "text")
    data = f"data=TextFolder(path={str(text)!r}, held_out=0.3)"
    config = config_io.override(presets.load(preset), [*SETTINGS, *settings, data])
    config_io.save_json(config, folder / "config.json")


def start(spec: RunSpec, folder: pathlib.Path) -> subprocess.Popen:
    """The launcher of a run; what it says is in NAME.txt."""
    script = render.make(spec, "local", folder)
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PATH": path}
    with open(folder / f"{spec.name}.txt", "w") as screen:
        return subprocess.Popen(["bash", script], cwd=ROOT, env=env, stdout=screen, stderr=subprocess.STDOUT)


def finish(launcher: subprocess.Popen, folder: pathlib.Path, name: str, timeout: float) -> None:
    if launcher.wait(timeout=timeout):
        raise RuntimeError(f"{name} ended with {launcher.returncode}:\n{(folder / f'{name}.txt').read_text()[-4000:]}")


def children(launcher: subprocess.Popen) -> dict[int, psutil.Process]:
    """The processes of the run by number."""
    found = {}
    for child in psutil.Process(launcher.pid).children():
        try:
            line = child.cmdline()
            found[int(line[line.index("--process") + 1])] = child
        except (psutil.Error, ValueError):
            continue
    return found


def kill_one(
    launcher: subprocess.Popen, run: pathlib.Path, number: int, chance: random.Random, *, saving: bool, patience: float
) -> str:
    """Kills a process at a random moment, and returns when the launcher has stopped the others. Says what it did."""
    while number not in (there := children(launcher)):
        if launcher.poll() is not None:
            return "never: the run was over"
        time.sleep(0.05)
    began, folder = time.monotonic(), run / "checkpoints"
    if saving:
        seen: set[str] = set()
        skipped = chance.randrange(2)  # saves to let pass
        while len(seen) <= skipped and there[number].is_running() and launcher.poll() is None:
            seen |= {path.name for path in folder.glob("*.orbax-checkpoint-tmp*")} if folder.exists() else set()
            time.sleep(0.001)
        where = f"while writing {max(seen, default='nothing')}"
    else:
        steps, wait = max(kill_run.training_steps(run), default=0), chance.uniform(0, patience)
        more = chance.randrange(1, 8)
        while time.monotonic() - began < wait and launcher.poll() is None:
            if max(kill_run.training_steps(run), default=0) >= steps + more:
                break
            time.sleep(0.01)
        where = f"{time.monotonic() - began:.1f} s after its start"
    try:
        there[number].kill()
    except psutil.NoSuchProcess:
        return "never: it had ended by itself"
    psutil.wait_procs(list(there.values()), timeout=120)
    return f"process {number} {where}"


def compare(
    folder: pathlib.Path, *, processes: int, kills: int, preset: str, settings: tuple[str, ...], patience: float,
    seed: int = 0,
) -> list[str]:  # fmt: skip
    """Names of the arrays that differ at the end. Prints a line for each kill."""
    write_config(folder, preset, settings)
    whole, killed = (spec_of(folder, name, processes) for name in ("whole", "killed"))
    began = time.monotonic()
    finish(start(whole, folder), folder, "whole", 3600)
    print(f"the run left alone took {time.monotonic() - began:.0f} s", flush=True)
    run, chance, launcher = folder / "killed", random.Random(seed), start(killed, folder)
    kill = 0
    while kill < kills and launcher.poll() is None:
        number = chance.randrange(processes)
        what = kill_one(launcher, run, number, chance, saving=kill % 2 == 0, patience=patience)
        if what.startswith("never"):
            continue
        reached, stands = max(kill_run.training_steps(run), default=0), kill_run.resumed_from(run)
        kill += 1
        print(f"{kill:4}  killed {what:60} logged step {reached:4}  goes on from {stands}", flush=True)
    finish(launcher, folder, "killed", 3600)
    if kill < kills:
        raise RuntimeError(f"the run was over after {kill} kills: give it more --steps")
    expected, found = kill_run.arrays(folder / "whole"), kill_run.arrays(run)
    assert expected.keys() == found.keys()
    return [name for name in expected if not np.array_equal(expected[name], found[name], equal_nan=True)]


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    given, folder = flags.FLAGS, pathlib.Path(tempfile.mkdtemp(prefix="kill_local_"))
    settings = (f"steps={given.steps}", f"checkpoint_every={given.checkpoint_every}", *given["set"].value)
    differ = compare(
        folder, processes=given.processes, kills=given.kills, preset=given.config, settings=settings,
        patience=given.patience, seed=given.seed,
    )  # fmt: skip
    starts = (folder / "killed.txt").read_text().count("starting all again")
    print(f"started again {starts} times")
    print("all arrays of the train state are equal bit for bit" if not differ else f"DIFFERENT: {differ}")
    if not differ:
        shutil.rmtree(folder)
    raise SystemExit(1 if differ else 0)


if __name__ == "__main__":
    flags.DEFINE_string("config", "nano", "the preset")
    flags.DEFINE_multi_string("set", [], "path.to.field=value of it; repeat for several")
    flags.DEFINE_integer("processes", 2, "2 or 4")
    flags.DEFINE_integer("kills", 20, "how often", lower_bound=1)
    flags.DEFINE_integer("steps", 60, "of the run", lower_bound=10)
    flags.DEFINE_integer("checkpoint_every", 3, "steps", lower_bound=1)
    flags.DEFINE_float("patience", 60.0, "seconds after a start in which it is killed, half of the times")
    flags.DEFINE_integer("seed", 0, "of the moments")
    app.run(main)
