"""How a list of layers becomes a few scans: compile time follows the distinct kinds of blocks, not the depth.

A *run* is a number of consecutive layers of one kind; a *segment* is a short list of runs repeated some times. K3's 93
layers ``K K K M  K K K M ... M`` with a dense first layer become ``[K-dense KK] 22 x [M KKK] [MM]``: five layer bodies
in all.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from k3jax.config import LayerKind


class Run(NamedTuple):
    """``count`` consecutive layers of one kind."""

    kind: LayerKind
    count: int


class Segment(NamedTuple):
    """``runs``, in order, ``repeats`` times over."""

    runs: tuple[Run, ...]
    repeats: int


class Slot(NamedTuple):
    """Where one layer's parameters live: ``segments[segment][run]``, leading indices ``[repeat, index]``."""

    segment: int
    run: int
    repeat: int
    index: int


class _Plan(NamedTuple):
    """A decomposition and its price: layer bodies in all, bodies inside repeated segments, number of segments."""

    cost: tuple[int, int, int]
    segments: tuple[Segment, ...]


def _runs(kinds: Sequence[LayerKind]) -> tuple[Run, ...]:
    return tuple(Run(kind, len(list(group))) for kind, group in groupby(kinds))


def _repeats(kinds: Sequence[LayerKind], start: int, period: int) -> int:
    """How often the ``period`` layers from ``start`` on stand one behind the other."""
    pattern, count = kinds[start : start + period], 1
    while kinds[start + count * period : start + (count + 1) * period] == pattern:
        count += 1
    return count


@lru_cache
def plan(kinds: tuple[LayerKind, ...], *, longest_period: int = 16) -> tuple[Segment, ...]:
    """The decomposition with the fewest layer bodies; among those, the one with the smallest loop bodies."""
    best: dict[int, _Plan] = {len(kinds): _Plan((0, 0, 0), ())}
    for start in reversed(range(len(kinds))):
        candidates = []
        for period in range(1, min(longest_period, len(kinds) - start) + 1):
            runs = _runs(kinds[start : start + period])
            for repeats in {1, _repeats(kinds, start, period)}:
                rest = best[start + period * repeats]
                price = (len(runs), len(runs) if repeats > 1 else 0, 1)
                cost = tuple(a + b for a, b in zip(price, rest.cost))
                candidates.append(_Plan(cost, (Segment(runs, repeats), *rest.segments)))
        best[start] = min(candidates, key=lambda candidate: candidate.cost)
    return best[0].segments


def unrolled(kinds: tuple[LayerKind, ...]) -> tuple[Segment, ...]:
    """One segment per layer: the same network without a scan, for tests and debugging."""
    return tuple(Segment((Run(kind, 1),), 1) for kind in kinds)


def slots(segments: Sequence[Segment]) -> Iterator[Slot]:
    """The slot of every layer, first layer first."""
    for s, segment in enumerate(segments):
        for repeat in range(segment.repeats):
            for r, run in enumerate(segment.runs):
                for index in range(run.count):
                    yield Slot(s, r, repeat, index)
