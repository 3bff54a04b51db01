"""The horizontal axis that all charts of a page share: steps, tokens or seconds."""

import dataclasses
from typing import Literal

import numpy as np

from k3jax.report.run import ReportError, Run

Quantity = Literal["step", "tokens", "seconds"]


@dataclasses.dataclass(frozen=True)
class Axis:
    """quantity: what is counted. span: from the first to the last place of all runs, never empty."""

    quantity: Quantity
    span: tuple[float, float]

    def places(self, run: Run, steps: np.ndarray) -> np.ndarray:
        """Where these steps [N] of a run lie."""
        return places(run, steps, self.quantity)


def make(runs: list[Run], quantity: Quantity) -> Axis:
    """The axis of several runs; raises ReportError where one does not say its tokens or seconds."""
    ends = [places(run, run.train["loss"].steps[[0, -1]], quantity) for run in runs]
    low, high = min(end[0] for end in ends), max(end[1] for end in ends)
    return Axis(quantity, (float(low), float(high if high > low else low + 1)))


def places(run: Run, steps: np.ndarray, quantity: Quantity) -> np.ndarray:
    if quantity == "step":
        return np.asarray(steps, np.float64)
    field = run.train.get(quantity)
    if field is not None and field.values.ndim == 1 and np.isfinite(field.values).any():
        known = np.isfinite(field.values)
        return np.interp(steps, field.steps[known], _ascending(field.values[known]))
    per_step = None if run.tokens is None else run.tokens / run.step
    if quantity == "seconds" or per_step is None:
        raise ReportError(f"{run.folder / 'metrics.jsonl'} does not say its {quantity}: no axis of {quantity}")
    return np.asarray(steps, np.float64) * per_step


def _ascending(values: np.ndarray) -> np.ndarray:
    """A clock that starts anew with every process, as one that goes on."""
    drops = np.minimum(np.diff(values, prepend=values[0]), 0.0)
    resets = np.where(drops < 0, np.append(0.0, values[:-1]), 0.0)
    return values + np.cumsum(resets)
