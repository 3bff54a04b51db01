"""Where the wall time of a run goes: every second is booked in exactly one class, across restarts.

    useful      steps that were applied, waiting for the device included
    skipped     steps that the guards refused
    compile     tracing and compiling
    restore     reading a checkpoint
    data        waiting for the next batch, and preparing the data
    checkpoint  what saving keeps the loop from
    evaluation  held-out text
    lost        steps that were made again after a restart, steps never finished, and the time between the last sign of
                life of a process that died and the start of the next one
    other       everything else: imports, weights, sampling, the report

Goodput is the useful share. The totals ride on every metrics line with the time of day, so that the next process finds
in the file what the one before it had spent (:meth:`Clock.resume`) however that one ended.

The classes add up to the time in which the run was alive or should have been: from its first start to now, without the
pauses that somebody wanted. Such a pause begins with an event "stopped" because the run was done or was asked to stop,
as the last line of a process, and ends with the start of the next one. After a kill, a crash, or a stop by the guards
the run should have been alive.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from k3jax.metrics import iterate_metrics

CLASSES = ("useful", "skipped", "compile", "restore", "data", "checkpoint", "evaluation", "lost", "other")
WANTED = ("done", "preempted", "interrupted")  # reasons of an event "stopped" after which nothing is lost
BOOKABLE = ("device", "compile", "restore", "data", "checkpoint", "evaluation", "other")


class StepTime(NamedTuple):
    """Seconds of one or more steps: waiting for data, waiting for the device, anything else of the loop."""

    data: float = 0.0
    device: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.data + self.device + self.host


class Pace(NamedTuple):
    """How many steps, and their seconds in all."""

    steps: int
    time: StepTime


class Clock:
    """The account of a run, for one thread.

    Time belongs to ``other`` until it is booked. Inside :meth:`steps` it belongs to the step under way, whose class is
    known only when it is settled.

    Args:
      began: seconds since 1970 at which this process started, for the time before the clock was made; None is now.
    """

    def __init__(self, *, began: float | None = None):
        self._totals = dict.fromkeys(CLASSES, 0.0)
        self._step, self._pace = dict.fromkeys(StepTime._fields, 0.0), Pace(0, StepTime())
        self._class, self._since = "other", time.monotonic()
        self._began = time.time() if began is None else began
        self._totals["other"] = max(0.0, time.time() - self._began)

    @contextlib.contextmanager
    def book(self, name: str) -> Iterator[None]:
        """Books the time inside in one of :data:`BOOKABLE`, less what is booked within. ``device`` is the part of a
        step that waits for the device."""
        if name not in BOOKABLE:
            raise ValueError(f"time is booked as one of {', '.join(BOOKABLE)}, not as {name!r}")
        before = self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    @contextlib.contextmanager
    def steps(self) -> Iterator[None]:
        """Around the loop over steps. What is not settled at its end is lost."""
        before = self._switch("host")
        self._step = dict.fromkeys(StepTime._fields, 0.0)
        try:
            yield
        finally:
            self._switch(before)
            self._totals["lost"] += self._step["device"] + self._step["host"]
            self._step = dict.fromkeys(StepTime._fields, 0.0)

    def settle(self, *, useful: bool) -> StepTime:
        """Says what the time since the last call was good for. Returns it."""
        self._switch(self._class)
        spent = StepTime(**self._step)
        self._totals["useful" if useful else "skipped"] += spent.device + spent.host
        self._step = dict.fromkeys(StepTime._fields, 0.0)
        self._pace = Pace(self._pace.steps + 1, StepTime(*map(sum, zip(self._pace.time, spent))))
        return spent

    def pace(self) -> Pace:
        """The steps settled since the last call."""
        found, self._pace = self._pace, Pace(0, StepTime())
        return found

    def totals(self) -> dict[str, float]:
        """Seconds by class up to now; they add up to the time since the first start of the run, less wanted pauses.
        Steps not settled yet count as ``other``."""
        self._switch(self._class)
        totals = dict(self._totals)
        totals["other"] += self._step["device"] + self._step["host"]
        return totals

    def doing(self) -> tuple[str, float]:
        """What time is booked as now, and for how many seconds. Another thread may ask: it never sees a new name with
        an old time."""
        return self._class, time.monotonic() - self._since

    def resume(self, path: str | os.PathLike, step: int) -> None:
        """Takes over the account of the processes before, from the run's metrics file, when training goes on after
        ``step``. What they spent on later steps is lost, and so is the time since their last line, unless that says
        that they were meant to stop.

        What was spent up to ``step`` is taken from the newest line that is not later, of any kind: exact where the loop
        logged an event as it saved that step, otherwise the steps between count as lost."""
        last, useful, skipped = None, 0.0, 0.0
        for line in iterate_metrics(path, damaged=[]):
            if "clock" not in line:
                continue
            last = line
            if line["step"] <= step:
                useful, skipped = line["clock"]["useful"], line["clock"]["skipped"]
        if last is None:
            return
        clock = last["clock"]
        again = clock["useful"] - useful + clock["skipped"] - skipped
        # The operating system knows the start of a process to a second: it may seem to lie before the last line.
        gap = self._began - last["unix"]
        self._totals["other"] = max(0.0, self._totals["other"] + min(0.0, gap))
        for name in CLASSES:
            self._totals[name] += clock.get(name, 0.0)
        self._totals["useful"] -= clock["useful"] - useful
        self._totals["skipped"] -= clock["skipped"] - skipped
        wanted = last.get("event") == "stopped" and last.get("reason") in WANTED
        self._totals["lost"] += again + (0.0 if wanted else max(0.0, gap))

    def _switch(self, name: str) -> str:
        """Charges the time since the last switch to the class of then. Returns that class."""
        now = time.monotonic()
        spent, before = now - self._since, self._class
        if before in self._step:
            self._step[before] += spent
        if before in self._totals:
            self._totals[before] += spent
        self._since, self._class = now, name  # in this order, for doing()
        return before


def goodput(totals: dict[str, float]) -> float:
    """Useful share of the wall time."""
    return totals["useful"] / max(sum(totals.values()), 1e-9)
