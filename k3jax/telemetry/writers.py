"""Who gets the metrics lines of a run: the JSON lines file always, and any trackers that were asked for."""

import contextlib
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from absl import logging

from k3jax import run_folder
from k3jax.metrics import MetricsWriter, iterate_metrics, plain
from k3jax.telemetry import trackers
from k3jax.telemetry.clock import Clock

FILE = "metrics.jsonl"
STATE = "trackers.json"
NOWHERE = [-1, 0]


type Places = dict[str, list[int]]  # by kind: the step of its newest line, and how many lines it has at that step


class Writers:
    """Takes the lines of a run, as a context manager; where several processes train together, the first one writes.

    Each line gets the time of day and the run's account (`k3jax.telemetry.clock`).

    A run that goes on after ``resume_step`` keeps its lines up to there and its account, and says so in an event. The
    trackers go on with the same run and the same steps: what one of them has been told already, by kind of line, it is
    not told again, since a step made again gives the same numbers. One that is new to the run, or comes back to it,
    begins with what is written from then on; a warning says what it lacks. A tracker that cannot be opened or raises is
    left out from then on, with a warning: no tracker ends a run.

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
        self._clock, self._metrics, self._trackers = clock, None, {}
        if jax.process_index() > 0:
            return
        run = pathlib.Path(run)
        path, self._memory = run / FILE, run / STATE
        before = resume_step is not None and path.exists()
        reached: Places = {}
        if before:
            clock.resume(path, resume_step)
            reached = _places(path)
        self._state = run_folder.read_json(self._memory)
        if names or self._state:
            self._remember(names, reached)  # before the lines that tell are removed
        self._metrics = MetricsWriter(path, resume_step=resume_step)
        self._places = _places(path) if names else {}
        for name in names:
            self._open(name, run, config or {})
        if before:
            again = max((step for step, _ in reached.values()), default=0) - resume_step
            self.write({"step": resume_step, "kind": "event", "event": "resume", "steps_again": again})
        else:
            self.write({"step": resume_step or 0, "kind": "event", "event": "start"})

    def write(self, line: dict[str, Any]) -> None:
        """Writes one line (schema: `k3jax.metrics`). Raises ValueError for one without an integer step and a kind."""
        if self._metrics is None:
            return
        line = plain(line | {"unix": time.time(), "clock": self._clock.totals()})
        self._metrics.write(line)
        _advance(self._places, line)
        if line["kind"] == "event" or not self._trackers:
            return
        place, scalars = self._places[line["kind"]], trackers.scalars(line)
        for name, tracker in list(self._trackers.items()):
            told = self._state["told"].setdefault(name, {})
            if place <= told.get(line["kind"], NOWHERE):
                continue
            with self._without(name):
                tracker.write(line["step"], scalars)
                told[line["kind"]] = place

    def close(self) -> None:
        """Puts everything on the disk; closing twice is harmless."""
        if self._metrics is not None:
            self._metrics.close()
        for name, tracker in list(self._trackers.items()):
            with self._without(name):
                tracker.close()
        self._trackers = {}

    def __enter__(self) -> "Writers":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _remember(self, names: Sequence[str], reached: Places) -> None:
        """Notes on the disk what every tracker has been told: those of the process before, all that is in the file."""
        told = self._state.get("told", {}) if reached else {}
        for name in self._state.get("active", ()) if reached else ():
            known = told.setdefault(name, {})
            for kind in reached.keys() - {"event"}:
                known[kind] = max(known.get(kind, NOWHERE), reached[kind])
        self._state |= {"told": told, "active": list(names)}
        run_folder.write_json(self._memory, self._state)

    def _open(self, name: str, run: pathlib.Path, config: dict[str, Any]) -> None:
        with self._without(name):
            self._trackers[name] = trackers.open_tracker(name, run, self._state, config)
            last, _ = self._places.get("train", NOWHERE)
            told, _ = self._state["told"].get(name, {}).get("train", NOWHERE)
            if told < last:
                logging.warning(
                    "%s lacks the lines after step %d up to step %d, which %s has", name, max(told, 0), last, FILE
                )
        run_folder.write_json(self._memory, self._state)

    @contextlib.contextmanager
    def _without(self, name: str) -> Iterator[None]:
        """Goes on without the tracker if it raises inside."""
        try:
            yield
        except Exception as error:  # whatever a tracker raises: the run is worth more
            logging.warning("%s is left out from now on: %s: %s", name, type(error).__name__, error)
            self._trackers.pop(name, None)
            self._state["active"].remove(name)
            run_folder.write_json(self._memory, self._state)


def _advance(places: Places, line: dict[str, Any]) -> None:
    step, count = places.get(line["kind"], NOWHERE)
    places[line["kind"]] = [line["step"], count + 1 if step == line["step"] else 1]


def _places(path: pathlib.Path) -> Places:
    places: Places = {}
    for line in iterate_metrics(path, damaged=[]):
        _advance(places, line)
    return places
