"""The checks before a run, on its machines and without the run: the same job with `--preflight_only`.

    python -m launch.preflight run.json --to slurm
    python -m launch.preflight run.json --to local

What is checked is in `k3jax.preflight` and `k3jax.preflight_devices`. A local run's checks are made at once; for
another engine the file is written, and the command that submits it said. Every training run makes the same checks as it
starts.
"""

import dataclasses
import pathlib

from absl import flags

from k3jax.config import require
from launch import cli
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
    return dataclasses.replace(spec, name=name, job=Preflight(spec.job.config, run=spec.name), retries=0)


def main(argv: list[str]) -> None:
    given, source = flags.FLAGS, cli.only_argument(argv, "spec")
    path = make(preflight_of(specs.load(source)), given.to, pathlib.Path(source).parent, source=source)
    if given.to == "local":
        run_here(path)


if __name__ == "__main__":
    flags.DEFINE_enum("to", None, list(ENGINES), "the engine")
    flags.mark_flag_as_required("to")
    cli.start(main, "python -m launch.preflight SPEC --to ENGINE")
