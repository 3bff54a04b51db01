"""The arithmetic model: its memory against the compiler's, its state and its traffic against what is exact."""

import dataclasses
import json
import math

import measure_compiled
import pytest

from k3jax import layout_report, layouts, presets
from k3jax.config import ConfigError, replace
from k3jax.config_layout import Layout
from k3jax.parallel.transport import Balanced
from k3jax.plan import arithmetic, chips, held, report, traffic, working_set
from k3jax.plan.plans import Remedy

ENTRIES = json.loads(measure_compiled.FILE.read_text())["layouts"]


def predicted(entry: dict, monkeypatch) -> int:
    """Bytes by arithmetic. What layers keep costs seconds of tracing, and is one number for both sides."""
    monkeypatch.setattr(working_set, "kept", lambda config, devices: entry["parts"]["saved"])
    config = measure_compiled.configuration(entry["config"], entry["settings"])
    topology = chips.topology(entry["topology"])
    return arithmetic.unchecked(config, layouts.load(entry["layout"]), topology).memory.total


def test_memory_is_within_a_tenth_of_the_compilers_for_nine_in_ten_layouts(monkeypatch):
    ratios = {
        f"{one['config']} {' '.join(one['settings'])} on {one['topology']} as {one['layout']}": predicted(
            one, monkeypatch
        )
        / one["bytes"]
        for one in ENTRIES
    }
    misses = {name: round(ratio, 3) for name, ratio in ratios.items() if abs(ratio - 1) > 0.1}
    assert len(misses) <= len(ratios) / 10, f"{len(misses)} of {len(ratios)} are further off: {misses}"


def test_the_test_would_notice(monkeypatch):
    """Negative control: without a working set, memory is far off."""
    monkeypatch.setattr(working_set, "moments", lambda *args: [working_set.Moment("", [], True)])
    assert any(abs(predicted(one, monkeypatch) / one["bytes"] - 1) > 0.1 for one in ENTRIES)


@pytest.fixture
def config(micro_model):
    return replace(presets.load("tiny"), batch=16, seq_len=64, model=micro_model)


@pytest.fixture
def nothing_kept(monkeypatch):
    monkeypatch.setattr(working_set, "kept", lambda config, devices: 0)


@pytest.mark.parametrize("layout", ["fsdp=2,expert=2,tensor=2", "data=2,expert=4,optimizer=('data',)"])
def test_the_state_is_that_of_the_described_layout(config, layout, nothing_kept):
    layout = layouts.load(layout)
    memory = arithmetic.plan(config, layout, chips.topology("v5p:2x2x2")).memory
    placed = layout_report.state(config, layout)
    exact = {
        name: sum(one.bytes for one in placed if one.path.startswith(name)) for name in ("weights/params", "opt_state")
    }
    assert memory.parameters == exact["weights/params"]
    assert memory.optimizer == pytest.approx(exact["opt_state"], abs=100)  # counters of steps


def test_more_tokens_need_more_and_more_devices_less(config, nothing_kept):
    def bytes_of(config, layout, topology):
        return arithmetic.plan(config, layouts.load(layout), chips.topology(topology)).memory.total

    small = bytes_of(config, "fsdp=2,expert=4", "v5p:2x2x2")
    assert bytes_of(replace(config, batch=32), "fsdp=2,expert=4", "v5p:2x2x2") > small
    assert bytes_of(config, "fsdp=4,expert=4", "v5p:2x2x4") < small


def test_copies_of_tokens_travel_as_often_as_the_layers_code_says(config):
    """Two trips forward and three back; two more where a layer is computed again and something follows its experts."""
    layout = Layout(expert=4, transport=Balanced())
    sent = {"none": 5, "full": 7}
    for policy, trips in sent.items():
        changed = replace(config, model=replace(config.model, remat=policy))
        parameters = held.parameters(changed.model, layout)
        found = traffic.collectives(changed, layout, parameters, [])
        (copies,) = (one for one in found if one.kind == "ragged-all-to-all")
        layers = sum(kind.ffn == "moe" for kind in changed.model.kinds)
        tokens = changed.batch * changed.seq_len / 4
        assert copies.times == layers * trips
        assert copies.payload == tokens * changed.model.moe.active * changed.model.moe.latent.dim * 4


def test_a_single_device_sends_nothing(config):
    layout = Layout()
    assert traffic.collectives(config, layout, held.parameters(config.model, layout), []) == []


@pytest.mark.parametrize(
    "shape, item, bytes",
    [((896, 400), 4, 896 * 512 * 4), ((3, 12, 128), 2, 3 * 16 * 128 * 2), ((2, 100), 4, 2 * 128 * 4), ((5,), 4, 512)],
)
def test_arrays_lie_in_tiles(shape, item, bytes):
    assert working_set.tiled(*shape, item=item) == bytes


def test_parameters_lie_where_tiles_waste_least():
    assert working_set.compact(896, 12, 128) == 896 * 12 * 128 * 4
    assert working_set.compact(8, 448, 400) == 8 * 512 * 400 * 4


def test_gpus_are_planned_too(config, nothing_kept):
    found = arithmetic.plan(config, Layout(fsdp=2, expert=4), chips.topology("h100:1x8"))
    assert found.times.step > 0 and found.memory.hbm == 80e9
    said = report.text(found)
    assert "chunk form" in said and "cycles" not in said and "tiles" not in said and "float32: 1 x" in said


def test_the_report_says_that_nothing_was_compiled(config, nothing_kept, tmp_path):
    found = arithmetic.plan(config, Layout(fsdp=2, expert=4), chips.topology("v5p:2x2x2"))
    report.write(found, config, "tiny", tmp_path)
    assert (tmp_path / "plan.txt").read_text().startswith("BY ARITHMETIC") and (tmp_path / "plan.png").stat().st_size
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["made"] == "arithmetic"
    assert sum(one["amount"] for one in written["memory_terms"]) == pytest.approx(written["memory"]["other"], abs=1)
    parts = written["seconds"]
    assert math.fsum(one["amount"] for one in written["time_terms"]) == pytest.approx(parts["step"])


def test_a_layout_for_other_devices_is_refused(config):
    with pytest.raises(
        ConfigError, match="fsdp 2 x expert 2 = 4 devices, but v5p:2x2x2 has 8; data = 2 or fsdp = 4 or"
    ):
        arithmetic.plan(config, Layout(fsdp=2, expert=2), chips.topology("v5p:2x2x2"))


def test_rows_that_do_not_divide_are_refused(config):
    with pytest.raises(ConfigError, match="do not divide over data x fsdp x expert = 8 devices; 8 or 16 would"):
        arithmetic.plan(replace(config, batch=12), Layout(fsdp=8), chips.topology("v5p:2x2x2"))


def test_what_does_not_fit_is_said_with_what_would(config, nothing_kept):
    small = dataclasses.replace(chips.topology("v5p:2x2x2"), chip=dataclasses.replace(chips.CHIPS["v5p"], hbm=1e5))
    found = dataclasses.replace(arithmetic.plan(config, Layout(fsdp=8), small), remedies=[Remedy("--batch 8", 500)])
    assert not found.memory.fits and "does not fit" in report.text(found) and "--batch 8" in report.text(found)
