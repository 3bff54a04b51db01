"""The checks before a run, on its machines and without the run: the same job with `--preflight_only`.

    python -m launch.preflight run.json --to slurm
    python -m launch.preflight run.json --to local

What is checked is in `k3jax.preflight` and `k3jax.preflight_devices`. A local run's checks are made at once; for
another engine the file is written, and the command that submits it said. Every training run makes the same checks as it
starts.
"""

import dataclasses
import pathlib
import sys

from absl import app, flags

from k3jax.config import ConfigError, require
from k3jax.exits import Exit
from launch import spec as specs
from launch.render import ENGINES, make, run_here
from launch.spec import Preflight, RunSpec, Train


def preflight_of(spec: RunSpec) -> RunSpec:
    """The checks of a run as a run of their own, beside its folder.

    Raises:
      ConfigError: a study, whose runs are checked as they start.
    """
    require(isinstance(spec.job, Train), f"{spec.name} is a study: its runs are checked as they start")
    name = f"{spec.name[:30].rstrip('-')}-preflight"
    return dataclasses.replace(spec, name=name, job=Preflight(spec.job.config), retries=0)


def main(argv: list[str]) -> None:
    given = flags.FLAGS
    try:
        if len(argv) != 2:
            raise app.UsageError(f"one spec is needed, got {len(argv) - 1}")
        path = make(preflight_of(specs.load(argv[1])), given.to, pathlib.Path(argv[1]).parent)
    except ConfigError as error:
        print(f"launch.preflight: {error}", file=sys.stderr)
        raise SystemExit(int(Exit.CONFIGURATION)) from None
    if given.to == "local":
        run_here(path)


if __name__ == "__main__":
    flags.DEFINE_enum("to", None, list(ENGINES), "the engine")
    flags.mark_flag_as_required("to")
    app.run(main)
