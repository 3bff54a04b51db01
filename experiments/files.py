"""The files of a run as they may be found: whole, cut off, or gone."""

import pathlib
from typing import Any

from k3jax.config import ConfigError, require
from k3jax.metrics import iterate_metrics, read_metrics
from k3jax.run_folder import read_json


def read(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file, or an empty one where there is no file.

    Raises:
      ConfigError: the file is cut off or damaged.
    """
    try:
        return read_json(path)
    except ValueError as error:
        raise ConfigError(
            f"{path} is cut off or damaged ({error}); remove it and run the study again, which makes what is missing"
        ) from error


def lines(folder: pathlib.Path, *, steps: int | None) -> list[dict[str, Any]]:
    """The metric lines of a run.

    Raises:
      ConfigError: there are none, one is damaged, or the last step that they tell of is not ``steps`` (None for a run
        that stopped itself, where any step will do).
    """
    path = folder / "metrics.jsonl"
    try:
        found = read_metrics(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{error}; move {folder} away and run the study again") from error
    last = max((line["step"] for line in found if line["kind"] == "train"), default=0)
    require(
        steps is None or last == steps,
        f"{path} ends at step {last} of {steps}: it is cut off; move {folder} away and run the study again",
    )
    return found


def seconds_before(folder: pathlib.Path) -> float:
    """What earlier processes spent on a run, without the time in which none was alive, and steps that were lost."""
    path, clock = folder / "metrics.jsonl", {}
    if path.exists():
        for line in iterate_metrics(path, damaged=[]):
            clock = line.get("clock", clock)
    return sum(seconds for name, seconds in clock.items() if name != "lost")
