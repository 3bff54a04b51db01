"""Many points as few: what falls on one pixel column becomes its lowest, highest and mean value, so spikes stay."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Buckets:
    """x: [N] mean place of a bucket's points. low, high, mean: [..., N], NaN where a bucket holds no number."""

    x: np.ndarray
    low: np.ndarray
    high: np.ndarray
    mean: np.ndarray


def bucket(x: np.ndarray, values: np.ndarray, span: tuple[float, float], columns: int) -> Buckets:
    """Points [..., N] at places x [N], ascending, in at most `columns` equal parts of `span`; empty parts are left out.

    With no more points than columns every point is its own bucket.
    """
    if x.shape[0] <= columns:
        return Buckets(x, values, values, values)
    starts = np.flatnonzero(np.diff(_column(x, span, columns), prepend=-1))
    known = np.isfinite(values)
    count = np.add.reduceat(known, starts, axis=-1, dtype=np.int64)
    total = np.add.reduceat(np.where(known, values, 0.0), starts, axis=-1)
    sizes = np.diff(np.append(starts, x.shape[0]))
    empty = count == 0
    return Buckets(
        x=np.add.reduceat(x, starts) / sizes,
        low=np.where(empty, np.nan, np.minimum.reduceat(np.where(known, values, np.inf), starts, axis=-1)),
        high=np.where(empty, np.nan, np.maximum.reduceat(np.where(known, values, -np.inf), starts, axis=-1)),
        mean=np.where(empty, np.nan, total / np.maximum(count, 1)),
    )


def raster(x: np.ndarray, values: np.ndarray, span: tuple[float, float], columns: int) -> np.ndarray:
    """Values [..., N] at places x [N], ascending, as equal columns of `span`, each the value nearest to its middle."""
    middles = span[0] + (np.arange(columns) + 0.5) * (span[1] - span[0]) / columns
    right = np.clip(np.searchsorted(x, middles), 1, max(len(x) - 1, 1))
    right = np.minimum(right, len(x) - 1)
    left = np.maximum(right - 1, 0)
    nearest = np.where(middles - x[left] <= x[right] - middles, left, right)
    return values[..., nearest]


def smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a centered window of 3 % of the points, narrower at the steep start; NaN does not count."""
    known = np.isfinite(values)
    total = np.append(0.0, np.cumsum(np.where(known, values, 0.0)))
    count = np.append(0, np.cumsum(known))
    places = np.arange(len(values))
    half = np.minimum(places, len(values) * 3 // 200)
    low, high = places - half, np.minimum(places + half + 1, len(values))
    number = count[high] - count[low]
    return np.where(number > 0, (total[high] - total[low]) / np.maximum(number, 1), np.nan)


def _column(x: np.ndarray, span: tuple[float, float], columns: int) -> np.ndarray:
    width = span[1] - span[0] or 1.0
    return np.clip(((x - span[0]) / width * columns).astype(np.int64), 0, columns - 1)
