"""The numbers and words that a page begins with: how a run stands, and what it came to."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Literal

import numpy as np

from k3jax.report.marks import describe, is_done
from k3jax.report.run import Run, last_value

QUIET_SECONDS = 300  # a run that has not logged for so long, and for five times its usual pause, has ended
MISSING = "–"


@dataclasses.dataclass(frozen=True)
class Status:
    word: Literal["finished", "running", "stopped"]
    text: str


@dataclasses.dataclass(frozen=True)
class Number:
    """One row of the table of results. better: which of several runs' values is marked."""

    name: str
    value: Callable[[Run], float | None]
    show: Callable[[float], str]
    better: Literal["low", "high", ""] = ""

    def text(self, run: Run) -> str:
        """The value as shown, or a dash."""
        value = self.value(run)
        return MISSING if value is None or not math.isfinite(value) else self.show(value)


def status(run: Run, now: float | None = None) -> Status:
    """Whether a run goes on, from its summary, its last event, and the time since it last logged."""
    where = f"step {run.step:,}" + (f" of {run.steps:,}" if run.steps else "")
    last = run.events[-1] if run.events else None
    if run.summary or (last is not None and last.step >= run.step and is_done(last)):
        return Status("finished", f"at {where}")
    if last is not None and last.step >= run.step and last.name.startswith(("stop", "preempt", "end", "interrupt")):
        return Status("stopped", f"at {where}: {describe(last) or last.name}")
    age = (time.time() if now is None else now) - run.written
    if age <= max(QUIET_SECONDS, 5 * (_pause(run) or 0)):
        return Status("running", f"at {where}, {_left(run)}last line {duration(max(age, 0))} ago")
    return Status("stopped", f"at {where}: no line for {duration(age)}, and no word about an end")


def count(value: float) -> str:
    """1234 is 1,234 and 5312448 is 5.31 M."""
    for size, unit in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= size and value >= 10**4:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """The two largest units."""
    if seconds < 9.5:
        return f"{seconds:.2g} s"
    seconds = round(seconds)
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            return f"{seconds // size} {unit} {seconds % size // smaller:02d} {name}"
    return f"{seconds} s"


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _left(run: Run) -> str:
    pause = _pause(run, per_step=True)
    return "" if pause is None or not run.steps else f"about {duration(pause * max(run.steps - run.step, 0))} left, "


def _pause(run: Run, *, per_step: bool = False) -> float | None:
    """Seconds between the last training lines, or per step."""
    field = run.train.get("seconds")
    if field is None or len(field.steps) < 2:
        return None
    seconds, steps = field.values[-20:], field.steps[-20:]
    pauses = np.diff(seconds) / (np.maximum(np.diff(steps), 1) if per_step else 1)
    pauses = pauses[np.isfinite(pauses) & (pauses > 0)]
    return float(np.median(pauses)) if len(pauses) else None


def _best(run: Run) -> float | None:
    field = run.evals.get("bits_per_byte")
    return None if field is None or not np.isfinite(field.values).any() else float(np.nanmin(field.values))


def _typical(name: str) -> Callable[[Run], float | None]:
    """The median over the second half of the run."""

    def value(run: Run) -> float | None:
        field = run.train.get(name)
        if field is None or field.values.ndim > 1:
            return None
        late = field.values[len(field.values) // 2 :]
        return float(np.nanmedian(late)) if np.isfinite(late).any() else None

    return value


def _goodput(run: Run) -> float | None:
    final = run.summary.get("goodput")
    return final if final is not None else last_value(run.train.get("goodput"))


def _device_hours(run: Run) -> float | None:
    devices = str(run.environment.get("device", "")).split(" x ")[0]
    return run.seconds * int(devices) / 3600 if devices.isdigit() and run.seconds is not None else None


def _happened(name: str) -> Callable[[Run], float | None]:
    return lambda run: sum(event.name.startswith(name) for event in run.events) if run.events else None


NUMBERS = (
    Number("held-out bits per byte", lambda run: run.bits_per_byte, "{:.3f}".format, "low"),
    Number("best held-out", _best, "{:.3f}".format, "low"),
    Number("training loss, nats per token", lambda run: run.loss, "{:.3f}".format, "low"),
    Number("steps", lambda run: run.step, "{:,}".format),
    Number("tokens", lambda run: run.tokens, count),
    Number("wall-clock time", lambda run: run.seconds, duration),
    Number("device hours", _device_hours, "{:,.3g}".format),
    Number("tokens per second", _typical("tokens_per_second"), count, "high"),
    Number("FLOP utilization", _typical("mfu"), percent, "high"),
    Number("goodput", _goodput, percent, "high"),
    Number("skipped steps", _happened("skip"), "{:,}".format),
    Number("restarts", _happened("resume"), "{:,}".format),
    Number("parameters", lambda run: run.summary.get("parameters"), count),
    Number("active per token", lambda run: run.summary.get("active_parameters"), count),
)
