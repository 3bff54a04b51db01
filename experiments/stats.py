"""Means with standard errors, paired differences over seeds, and their 95 % intervals."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# The 97.5 % quantile of Student's t by degrees of freedom; beyond 30 the last one is a little too wide.
_T = (
    math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class Mean(NamedTuple):
    """Mean of ``count`` values, its standard error, and half the width of its 95 % interval; both NaN for one value."""

    mean: float
    error: float
    half: float
    count: int


def mean(values: Sequence[float]) -> Mean:
    """Of one value per seed."""
    count = len(values)
    if count == 0:
        raise ValueError("the mean of no values")
    error = float(np.std(values, ddof=1) / math.sqrt(count)) if count > 1 else math.nan
    t = _T[min(count, len(_T)) - 1]
    return Mean(float(np.mean(values)), error, t * error, count)


def paired(values: dict[int, float], control: dict[int, float]) -> Mean | None:
    """The mean difference to the control over the seeds that both have with a finite value; None without one."""
    common = [seed for seed in sorted(values.keys() & control.keys()) if math.isfinite(values[seed] + control[seed])]
    return mean([values[seed] - control[seed] for seed in common]) if common else None
