"""What happened during a run, as marks on its curves and as words."""

import dataclasses
from typing import Literal

import numpy as np

from k3jax.report.axis import Axis
from k3jax.report.run import Event, Run

Kind = Literal["bad", "stop", "stage", "other"]
QUIET = ("checkpoint", "start", "end")  # too ordinary for a mark
NAMES: dict[Kind, str] = {"bad": "skipped step", "stop": "stop or restart", "stage": "new stage", "other": "event"}


@dataclasses.dataclass(frozen=True)
class Mark:
    """A place on the horizontal axis. kind: bad (skipped steps and the like), stop (restarts), stage (new settings)."""

    x: float
    kind: Kind


def marks(run: Run, axis: Axis) -> list[Mark]:
    """The events of a run that deserve one, in order."""
    shown = [event for event in run.events if not event.name.startswith(QUIET)]
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


def describe(event: Event) -> str:
    """The details of an event in one line."""
    return ", ".join(f"{key.replace('_', ' ')} {_short(value)}" for key, value in event.details.items())


def _short(value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
