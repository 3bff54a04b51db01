"""Makes one finished run of a study anew, in a folder that is removed afterwards, and compares what it finds.

    python -m experiments.again s07_activation d64 situ --rate 0.01 --seed 0

The exit code is 0 where all numbers are equal, bit for bit, and 1 where one differs. Numbers are those of the result
and the loss of the last step. Equal bits are to be expected of the same commit and libraries on the same machine, with
as many cores (no `taskset`): the number of threads decides in which order long sums are added up.
"""

import pathlib
import tempfile
from typing import Any

from absl import app, flags

from experiments import files, folder
from experiments.folder import Run
from experiments.group import perform
from experiments.run import groups
from experiments.study import load
from k3jax import runtime
from k3jax.config import require
from k3jax.exits import leave
from k3jax.train import CODES, exit_code

Numbers = dict[str, Any]


def numbers(run: Run, root: pathlib.Path) -> Numbers:
    """What a finished run found, and the last loss that it logged.

    Raises:
      ConfigError: it is not finished, or one of its files is cut off.
    """
    found = folder.result(run, root)
    require(found is not None, f"{run.folder(root)} holds no finished run to compare with")
    steps = None if "diverged" in found["metrics"] else run.config.steps
    losses = [line["loss"] for line in files.lines(run.folder(root), steps=steps) if line["kind"] == "train"]
    return {"loss of the last step": losses[-1], **found["metrics"]}


def main(argv: list[str]) -> None:
    args, root = flags.FLAGS, pathlib.Path(flags.FLAGS.root)
    runtime.start()
    try:
        require(len(argv) == 4 and args.rate is not None, f"give a study, a rung, a variant and --rate, got {argv[1:]}")
        study, _ = load(argv[1])
        ((rung, variant),) = groups(study, argv[2:3], argv[3:])
        run = Run(study, rung, variant, args.rate, args.seed)
        kept = numbers(run, root)
        with tempfile.TemporaryDirectory() as place:
            perform(run, pathlib.Path(place))
            made = numbers(run, pathlib.Path(place))
    except tuple(CODES) as error:
        leave(f"experiments.again: {error}", exit_code(error))
    different = [name for name in kept | made if repr(kept.get(name)) != repr(made.get(name))]
    for name in kept | made:
        verdict = "DIFFERS" if name in different else "equal"
        print(f"{name:24} kept {kept.get(name)!r:24} made {made.get(name)!r:24} {verdict}")
    raise SystemExit(bool(different))


if __name__ == "__main__":
    flags.DEFINE_float("rate", None, "the learning rate of the run")
    flags.DEFINE_integer("seed", 0, "the seed of the run")
    flags.DEFINE_string("root", str(folder.ROOT), "where the folders of runs lie")
    app.run(main)
