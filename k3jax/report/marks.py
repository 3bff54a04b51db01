"""What happened during a run, as marks on its curves and as words."""

import dataclasses
from typing import Literal

import numpy as np

from k3jax.report.axis import Axis
from k3jax.report.run import Event, Run

Kind = Literal["bad", "stop", "stage", "other"]
QUIET = ("checkpoint", "saved", "data", "start", "end")  # too ordinary for a mark
NAMES: dict[Kind, str] = {"bad": "skipped step", "stop": "stop or restart", "stage": "new stage", "other": "event"}


@dataclasses.dataclass(frozen=True)
class Mark:
    """A place on the horizontal axis. kind: bad (skipped steps and the like), stop (restarts), stage (new settings)."""

    x: float
    kind: Kind


def marks(run: Run, axis: Axis) -> list[Mark]:
    """The events of a run that deserve one, in order."""
    shown = [event for event in run.events if not (event.name.startswith(QUIET) or is_done(event))]
    places = axis.places(run, np.array([event.step for event in shown], np.float64)) if shown else []
    return [Mark(float(x), kind_of(event)) for x, event in zip(places, shown)]


def kind_of(event: Event) -> Kind:
    """How an event is marked."""
    words = {
        "bad": ("skip", "spike", "non_finite", "damaged", "error"),
        "stop": ("start", "resume", "preempt", "stop", "interrupt", "end"),
        "stage": ("stage",),
    }
    return next((kind for kind, known in words.items() if event.name.startswith(known)), "other")


def is_done(event: Event) -> bool:
    """Whether this is the end of a run that came to its last step."""
    return event.name.startswith("stop") and event.details.get("reason") == "done"


def describe(event: Event) -> str:
    """The details of an event in one line."""
    words = ("" if key == "reason" else f"{key.replace('_', ' ')} " for key in event.details)
    return ", ".join(f"{word}{_short(value)}" for word, value in zip(words, event.details.values()))


def _short(value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value.replace("_", " ") if isinstance(value, str) else str(value)
