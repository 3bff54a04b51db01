"""Where a run of a study lies, whether it is over, and whether it is the run that it is taken for."""

import dataclasses
import pathlib
from typing import Any

from experiments import files
from experiments.study import Study
from k3jax import config_io
from k3jax.config import ConfigError, require
from k3jax.run_config import TrainConfig

ROOT = pathlib.Path("runs/studies")
RESULT = "result.json"


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run of a study."""

    study: Study
    rung: str
    variant: str
    rate: float
    seed: int

    @property
    def config(self) -> TrainConfig:
        return self.study.config(self.rung, self.variant, rate=self.rate, seed=self.seed)

    @property
    def identity(self) -> dict[str, Any]:
        """What its result says of which run it is."""
        return dict(study=self.study.name, rung=self.rung, variant=self.variant, rate=self.rate, seed=self.seed)

    def folder(self, root: pathlib.Path = ROOT) -> pathlib.Path:
        return root / self.study.name / self.rung / self.variant / f"lr{self.rate:g}_seed{self.seed}"

    @property
    def diff(self) -> dict[str, Any]:
        """What this run changes in that of its rung, as JSON types."""
        base, config = self.study.rungs[self.rung].config, self.config
        return {path: [str(old), str(new)] for path, (old, new) in config_io.diff(base, config).items()}


def check(run: Run, root: pathlib.Path = ROOT) -> None:
    """Raises ConfigError when the folder of a run holds a run of another configuration: what it found is not an answer
    to this study as it is now."""
    path = run.folder(root) / "config.json"
    if not path.exists():
        return
    try:
        kept = config_io.load_json(TrainConfig, path)
    except ConfigError as error:
        raise ConfigError(f"{path} is of another version of the program ({error}); move the folder away") from error
    differences = config_io.diff(kept, run.config)
    if differences:
        listed = ", ".join(f"{name} = {old!r} and not {new!r}" for name, (old, new) in list(differences.items())[:3])
        raise ConfigError(f"{run.folder(root)} holds another run: {listed}; move the folder away to run it anew")


def result(run: Run, root: pathlib.Path = ROOT) -> dict[str, Any] | None:
    """What a finished run found, or None.

    Raises:
      ConfigError: see :func:`check`; or the result is cut off, or of another run.
    """
    check(run, root)
    path = run.folder(root) / RESULT
    found = files.read(path)
    if not found:
        return None
    here = run.identity
    kept = {name: found.get(name) for name in here}
    require(kept == here, f"{path} is the result of another run: {kept} and not {here}; move its folder away")
    return found
