"""Kills a short run with SIGKILL again and again, and compares what it ends with with a run left alone.

    PYTHONPATH=. python tests/train/kill_run.py --kills 20

Half of the moments lie inside the writing of a checkpoint, the others anywhere from the start of the process on. The
table says where each process was killed and where the next one went on; the exit code is 0 if all parameters, and
everything else of the train state, are equal bit for bit at the end.
"""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from absl import app, flags, logging

from k3jax.checkpoint import Checkpoints
from k3jax.metrics import read_metrics

SETTINGS = (
    "model.layers=1",
    "model.full_attention=[]",
    "model.dense_layers=0",
    "seq_len=24",
    "batch=2",
    "checkpoint_every=3",
    "eval_every=1000",
    "sample_tokens=0",
)


def command(run: pathlib.Path, text: pathlib.Path, steps: int) -> list[str]:
    settings = [*SETTINGS, f"steps={steps}", f"data=TextFolder(path={str(text)!r}, held_out=0.3)"]
    flags_ = [part for setting in settings for part in ("--set", setting)]
    return [sys.executable, "-m", "k3jax.train", "--config", "tiny", "--run", str(run), "--mesh", "", *flags_]


def write_text(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"file {number}: " + "some words again and again " * (number + 3))
    return folder


def environment() -> dict[str, str]:
    """One device, whatever the caller has."""
    return {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}


def finish(run: pathlib.Path, text: pathlib.Path, steps: int) -> None:
    done = subprocess.run(command(run, text, steps), env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the run ended with {done.returncode}:\n{done.stderr}")


def kill_once(run: pathlib.Path, text: pathlib.Path, steps: int, chance: random.Random, *, saving: bool) -> str:
    """Starts the run and kills it at a random moment. Returns what it was doing."""
    process = subprocess.Popen(
        command(run, text, steps), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    folder = run / "checkpoints"
    skipped = chance.randrange(4)  # saves of this process to let pass
    if saving:
        seen: set[str] = set()
        while process.poll() is None:
            seen |= {path.name for path in folder.glob("*.orbax-checkpoint-tmp*")} if folder.exists() else set()
            if len(seen) > skipped:
                break
        where = f"while writing {max(seen, default='nothing')}"
    else:
        lines = len(training_steps(run)) + chance.randrange(1, 8)
        begun, patience = time.monotonic(), chance.uniform(0, 12)
        while process.poll() is None and time.monotonic() - begun < patience and len(training_steps(run)) < lines:
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.05))
        where = f"{time.monotonic() - begun:.1f} s after its start"
    process.send_signal(signal.SIGKILL)
    process.wait()
    return where if process.returncode == -signal.SIGKILL else f"never: it was over with {process.returncode}"


def training_steps(run: pathlib.Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [line["step"] for line in read_metrics(path) if line["kind"] == "train"] if path.exists() else []


def resumed_from(run: pathlib.Path) -> int | None:
    """The newest checkpoint a start would find."""
    steps = [int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdecimal()]
    return max(steps, default=None)


def arrays(run: pathlib.Path) -> dict[str, np.ndarray]:
    with Checkpoints(run, create=False) as checkpoints:
        _, state = checkpoints.load()
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def compare(folder: pathlib.Path, *, kills: int, steps: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Lines of the table, and names of the arrays that differ at the end."""
    text, chance = write_text(folder / "text"), random.Random(seed)
    whole, killed = folder / "whole", folder / "killed"
    finish(whole, text, steps)
    table = []
    for number in range(kills):
        where = kill_once(killed, text, steps, chance, saving=number % 2 == 0)
        reached, stands = max(training_steps(killed), default=0), resumed_from(killed)
        table.append(f"{number + 1:4}  killed {where:60} logged step {reached:4}  goes on from {stands}")
        print(table[-1], flush=True)
    finish(killed, text, steps)
    expected, found = arrays(whole), arrays(killed)
    assert expected.keys() == found.keys()
    differ = [name for name in expected if not np.array_equal(expected[name], found[name], equal_nan=True)]
    return table, differ


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kill_run_"))
    _, differ = compare(folder, kills=flags.FLAGS.kills, steps=flags.FLAGS.steps, seed=flags.FLAGS.seed)
    summary = json.loads((folder / "killed" / "summary.json").read_text())
    shutil.rmtree(folder)
    print(f"goodput of the killed run: {summary['goodput']:.2f}")
    print("all arrays of the train state are equal bit for bit" if not differ else f"DIFFERENT: {differ}")
    raise SystemExit(1 if differ else 0)


if __name__ == "__main__":
    flags.DEFINE_integer("kills", 20, "how often", lower_bound=1)
    flags.DEFINE_integer("steps", 120, "of the run", lower_bound=10)
    flags.DEFINE_integer("seed", 0, "of the moments")
    app.run(main)
