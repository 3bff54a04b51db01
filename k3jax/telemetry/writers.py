"""Who gets the metrics lines of a run: the JSON lines file always, and any trackers that were asked for."""

import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
from absl import logging

from k3jax import run_folder
from k3jax.metrics import MetricsWriter, iterate_metrics, plain
from k3jax.telemetry import trackers
from k3jax.telemetry.clock import Clock

FILE = "metrics.jsonl"
STATE = "trackers.json"


class Writers:
    """Takes the lines of a run, as a context manager; where several processes train together, the first one writes.

    Each line gets the time of day and the run's account (`k3jax.telemetry.clock`).

    A run that goes on after ``resume_step`` keeps its lines up to there and its account, and says so in an event. The
    trackers go on with the same run and the same steps: what they have seen already, they are not told again, since a
    step made again gives the same numbers. A tracker that raises is left out from then on, with a warning: no tracker
    ends a run.

    Args:
      run: the run's folder.
      names: of trackers (:func:`k3jax.telemetry.trackers.parse`).
      clock: the run's account; takes over what the processes before have spent.
      resume_step: the step that training goes on after; None for a run that has not begun.
      config: the configuration, for the trackers.

    Raises:
      FileExistsError: there are lines already and ``resume_step`` is None.
      OSError: a line cannot be written to the JSON lines file.
    """

    def __init__(
        self,
        run: str | os.PathLike,
        names: Sequence[str] = (),
        *,
        clock: Clock,
        resume_step: int | None = None,
        config: dict[str, Any] | None = None,
    ):
        self._clock, self._metrics, self._trackers, self._sent = clock, None, {}, -1
        if jax.process_index() > 0:
            return
        run = pathlib.Path(run)
        path, seen = run / FILE, 0
        before = resume_step is not None and path.exists()
        if before:
            clock.resume(path, resume_step)
            seen = max((line["step"] for line in iterate_metrics(path, damaged=[])), default=0)
        if names:
            state = run_folder.read_json(run / STATE)
            self._sent = max(state.get("sent", -1), seen) if before else -1
            self._trackers = {name: trackers.open_tracker(name, run, state, config or {}) for name in names}
            run_folder.write_json(run / STATE, state | {"sent": self._sent})
        self._metrics = MetricsWriter(path, resume_step=resume_step)
        if before:
            self.write({"step": resume_step, "kind": "event", "event": "resume", "steps_again": seen - resume_step})
        else:
            self.write({"step": resume_step or 0, "kind": "event", "event": "start"})

    def write(self, line: dict[str, Any]) -> None:
        """Writes one line (schema: `k3jax.metrics`). Raises ValueError for one without an integer step and a kind."""
        if self._metrics is None:
            return
        line = plain(line | {"unix": time.time(), "clock": self._clock.totals()})
        self._metrics.write(line)
        if line["kind"] == "event" or line["step"] <= self._sent:
            return
        scalars = trackers.scalars(line)
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, lambda tracker=tracker: tracker.write(line["step"], scalars))

    def close(self) -> None:
        """Puts everything on the disk; closing twice is harmless."""
        if self._metrics is not None:
            self._metrics.close()
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, tracker.close)
        self._trackers = {}

    def __enter__(self) -> "Writers":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _attempt(self, name: str, action) -> None:
        try:
            action()
        except Exception as error:  # whatever a tracker raises: the run is worth more
            logging.warning("%s is left out from now on: %s: %s", name, type(error).__name__, error)
            self._trackers.pop(name, None)
