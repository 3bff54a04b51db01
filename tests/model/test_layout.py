"""The decomposition of a list of layers into scans."""

import itertools
import random

import pytest

from k3jax.config import LayerKind, every_fourth
from k3jax.model import layout
from k3jax.model.layout import Run, Segment

KD, K, MD, M = (LayerKind(mixer, ffn) for mixer, ffn in itertools.product(("kda", "mla"), ("dense", "moe")))


def _k3_like(layers: int, *, last: bool = True, dense: int = 1) -> tuple[LayerKind, ...]:
    full = every_fourth(layers, last=last)
    return tuple(LayerKind("mla" if i + 1 in full else "kda", "dense" if i < dense else "moe") for i in range(layers))


def _bodies(segments) -> int:
    return sum(len(segment.runs) for segment in segments)


def _kinds_by_slot(segments) -> list[LayerKind]:
    return [segments[slot.segment].runs[slot.run].kind for slot in layout.slots(segments)]


ALL_KINDS = [
    _k3_like(93),
    _k3_like(27),
    _k3_like(13),
    _k3_like(12),
    _k3_like(1),
    _k3_like(5, dense=0),
    _k3_like(13, dense=6),
    (M,) * 9,
    (MD,),
    (K,) * 40,
    (K, M) * 5 + (K,),
    (KD, M, K, K, M, MD, K),
]


@pytest.mark.parametrize("kinds", ALL_KINDS, ids=len)
@pytest.mark.parametrize("decompose", [layout.plan, layout.unrolled])
def test_every_layer_has_one_slot_in_order(kinds, decompose):
    segments = decompose(kinds)
    slots = list(layout.slots(segments))
    assert _kinds_by_slot(segments) == list(kinds)
    assert len(set(slots)) == len(kinds)
    for slot in slots:
        segment = segments[slot.segment]
        assert slot.repeat < segment.repeats and slot.index < segment.runs[slot.run].count
    assert slots == sorted(slots, key=lambda slot: (slot.segment, slot.repeat, slot.run, slot.index))


def test_k3_is_five_layer_bodies():
    assert layout.plan(_k3_like(93)) == (
        Segment((Run(KD, 1), Run(K, 2)), 1),
        Segment((Run(M, 1), Run(K, 3)), 22),
        Segment((Run(M, 2),), 1),
    )


def test_bodies_do_not_grow_with_depth():
    assert {_bodies(layout.plan(_k3_like(4 * n + 1))) for n in range(3, 30)} == {5}
    assert {_bodies(layout.plan(_k3_like(4 * n + 3))) for n in range(3, 30)} == {6}


@pytest.mark.parametrize("kinds", [(M,), (KD,), (M,) * 93], ids=["one MLA", "one KDA", "93 MLA"])
def test_one_kind_is_one_body(kinds):
    segments = layout.plan(kinds)
    assert _bodies(segments) == 1 and _kinds_by_slot(segments) == list(kinds)


def test_longest_period_bounds_a_segment():
    kinds = (K, K, K, M) * 6
    assert layout.plan(kinds) == (Segment((Run(K, 3), Run(M, 1)), 6),)
    short = layout.plan(kinds, longest_period=3)
    assert _kinds_by_slot(short) == list(kinds)
    assert all(sum(run.count for run in segment.runs) <= 3 for segment in short)


def _fewest_bodies(kinds: tuple[LayerKind, ...]) -> int:
    """By trying every first segment, with every number of repeats."""
    if not kinds:
        return 0
    best = len(kinds)
    for period in range(1, len(kinds) + 1):
        pattern = kinds[:period]
        bodies = len(list(itertools.groupby(pattern)))
        repeats = 0
        while kinds[repeats * period : (repeats + 1) * period] == pattern:
            repeats += 1
            best = min(best, bodies + _fewest_bodies(kinds[repeats * period :]))
    return best


def test_no_decomposition_has_fewer_bodies():
    draw = random.Random(0)
    for _ in range(30):
        kinds = tuple(draw.choice((K, M)) for _ in range(draw.randint(1, 11)))
        assert _bodies(layout.plan(kinds)) == _fewest_bodies(kinds), kinds
