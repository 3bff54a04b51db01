"""Whether a run can be gone on with exactly: replays one step from a checkpoint and compares bits.

    python -m k3jax.resume_check runs/nano
    python -m k3jax.resume_check runs/nano --step 180

The step after a checkpoint is always logged. Its loss and its norms of gradients, parameters and updates depend on
every bit of the weights, the optimizer state, the router biases and the batch, so that equal numbers mean that the
checkpoint holds all of them. The step is made twice, which tells a checkpoint that lacks something from a machine that
does not compute the same twice.
"""

import pathlib
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import Mesh

from k3jax import layouts, placement, runtime
from k3jax.checkpoint import CheckpointError, Checkpoints
from k3jax.config_layout import ALONE, Layout
from k3jax.exits import Exit
from k3jax.loop import Rows, compile_step, fresh_guard
from k3jax.metrics import iterate_metrics, plain
from k3jax.run_folder import read_json
from k3jax.step import TrainState
from k3jax.train import OpenData

FIELDS = ("loss", "accuracy", "grad_norm", "grad_norm_by_role", "param_norm_by_role", "update_rms")


class Replay(NamedTuple):
    """step: the one replayed. logged, seen: its numbers by name, as the run logged them and now. arrays_that_differ:
    names of the arrays of the state that differ between two replays."""

    step: int
    logged: dict[str, float]
    seen: dict[str, float]
    arrays_that_differ: tuple[str, ...]

    @property
    def exact(self) -> bool:
        return self.logged == self.seen and not self.arrays_that_differ


def replay(run: pathlib.Path, *, step: int | None = None, mesh: Mesh | None = None, layout: Layout = ALONE) -> Replay:
    """Makes the step after the checkpoint of ``step`` (by default the newest one that was gone on from) twice.

    Raises:
      CheckpointError: there is no such checkpoint, it is damaged, or the step after it was never logged.
    """
    logged = {line["step"]: line for line in iterate_metrics(run / "metrics.jsonl") if line["kind"] == "train"}
    with Checkpoints(run, create=False) as checkpoints:
        steps = [known for known in checkpoints.steps() if known + 1 in logged]
        chosen = max(steps, default=None) if step is None else step
        if chosen is None or chosen + 1 not in logged:
            raise CheckpointError(
                f"{run} has checkpoints of steps {checkpoints.steps()}, but metrics.jsonl has no line of the step "
                f"after {'any of them' if step is None else step}"
            )
        config = checkpoints.config(chosen)
        shardings = None if mesh is None else placement.state_shardings(config, mesh, layout)
        _, first = checkpoints.load(chosen, shardings=shardings)
    number = config.stage_number(chosen)
    stage, (start, _) = config.at(number), config.bounds(number)
    if number and chosen == start:
        first = first._replace(guard=fresh_guard(config, shardings))
    second = jax.tree.map(jnp.copy, first)  # a step takes its state away
    rows = Rows(stage, mesh)
    batch = rows.place(rows.local(OpenData(config)(number).batches)[chosen - start])
    compiled = compile_step(stage, first, batch, shardings, layout)
    first, seen = compiled(first, batch)
    second, _ = compiled(second, batch)
    names = _numbers(logged[chosen + 1])
    return Replay(chosen + 1, names, _numbers(plain(jax.device_get(seen)._asdict())), _differences(first, second))


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a metrics line that a replay must repeat, by dotted name."""
    found = {}
    for name in FIELDS:
        value = line[name]
        found |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return found


def _differences(first: TrainState, second: TrainState) -> tuple[str, ...]:
    pairs = zip(jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(second))
    return tuple(
        jax.tree_util.keystr(path, simple=True, separator=".")
        for (path, a), b in pairs
        if not np.array_equal(np.asarray(a), np.asarray(b), equal_nan=a.dtype.kind == "f")
    )


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        raise app.UsageError("python -m k3jax.resume_check RUN [--step N]")
    runtime.start()
    run, args = pathlib.Path(argv[1]), flags.FLAGS
    try:
        text = read_json(run / "environment.json").get("layout", "") if args.layout is None else args.layout
        layout = layouts.load(text)
        mesh = placement.make_mesh(layout.sizes) if text else None
        found = replay(run, step=args.step, mesh=mesh, layout=layout)
    except (CheckpointError, ValueError, OSError) as error:
        print(f"k3jax.resume_check: {error}", file=sys.stderr)
        raise SystemExit(int(Exit.CHECKPOINT)) from error
    for name, value in found.logged.items():
        verdict = "equal" if found.seen[name] == value else "DIFFERS"
        print(f"{name:36} logged {value!r:24} replayed {found.seen[name]!r:24} {verdict}")
    for name in found.arrays_that_differ:
        print(f"two replays differ in {name}")
    print(f"step {found.step}: {'exact' if found.exact else 'NOT exact'}")
    raise SystemExit(0 if found.exact else 1)


if __name__ == "__main__":
    flags.DEFINE_integer("step", None, "the checkpoint to begin from; default: the newest that was gone on from")
    flags.DEFINE_string("layout", None, "a name or axis=size,...; default: the run's own")
    app.run(main)
