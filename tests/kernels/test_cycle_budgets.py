"""Every kernel compiles for four generations of TPU, within a budget of cycles; and how cycles are counted."""

import importlib.metadata
import json

import pytest
from schedule_targets import BUDGETS, LIBTPU, kernels, measure

from pallas_kernels import schedule

TOLERANCE = 1.03
LISTING = """
     0   :  { %s1 = vmov 0 ;;  %s2 = vmov 1 }
   0x1 LB: > { %v3 = vld [vmem:[%s1]] }
   0x2   : >> { %v4 = vadd.f32 %v3, %v3 }
   0x3   : > { %p5 = scmp.ge.s32.totalorder %s1, 10 /* loop exit test */ }
   0x4   : > {}
   0x5   :  { %s6 = vmov 2 }
"""


def over(cycles: dict, budget: dict) -> dict:
    """Programs beyond their budget, and those that have none or are gone."""
    changed = {name: (cycles.get(name), budget.get(name)) for name in cycles.keys() ^ budget.keys()}
    late = {name: (cycles[name], budget[name]) for name in cycles.keys() & budget.keys()}
    return changed | {name: x for name, x in late.items() if x[0] > TOLERANCE * x[1]}


def installed_compiler() -> str | None:
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


@pytest.mark.skipif(
    installed_compiler() != LIBTPU, reason=f"budgets are of libtpu {LIBTPU}, and here is {installed_compiler()}"
)
@pytest.mark.parametrize("topology", schedule.TOPOLOGIES)
def test_kernels_compile_within_their_budget(topology):
    assert not over(measure(topology), json.loads(BUDGETS.read_text())[topology])


def test_every_kernel_has_a_budget_on_every_chip():
    labels = {label for label, *_ in kernels()}
    budgets = json.loads(BUDGETS.read_text())
    assert budgets.keys() == set(schedule.TOPOLOGIES) and all(budgets[t].keys() == labels for t in budgets)


def test_a_slower_kernel_is_noticed():
    assert over({"a": 104, "b": 100}, {"a": 100, "b": 100}) == {"a": (104, 100)}
    assert over({"a": 100}, {"a": 100, "b": 1}) == {"b": (None, 1)}


def test_cycles_count_loops_as_often_as_they_run():
    assert schedule.cycles(LISTING) == 2 + 10 * 4
    assert schedule.cycles(LISTING.replace(", 10 ", ", %s2 ")) == 2 + 4
