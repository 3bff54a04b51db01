"""Layouts: from text and back, what they refuse before anything compiles, and what a device holds."""

import pytest

from k3jax import config as c
from k3jax import layout_report, layouts, placement, presets
from k3jax.config import ConfigError
from k3jax.config_layout import Layout
from k3jax.describe import describe
from k3jax.parallel.context import Zigzag
from k3jax.parallel.transport import Balanced, RaggedAllToAll


@pytest.mark.parametrize("name", sorted(layouts.LAYOUTS))
def test_named_layouts_are_read_from_their_text(name):
    layout = layouts.load(name)
    assert layouts.load(layouts.text(layout)) == layout


def test_fields_follow_a_name():
    layout = layouts.load("kimi_k3_v5p,transport=RaggedAllToAll(factor=2.0),mla=Zigzag")
    assert layout == c.replace(layouts.LAYOUTS["kimi_k3_v5p"], transport=RaggedAllToAll(2.0), mla=Zigzag())
    assert layouts.load("expert=4,transport=Balanced") == Layout(expert=4, transport=Balanced())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kimi_k3_v5", "no layout and not .* did you mean 'kimi_k3_v5p'"),
        ("date=2", "there is no axis 'date'; did you mean 'data'.*; the axes are data, fsdp"),
        ("pipeline=2", "reserved"),
        ("transprot=Balanced", r"--layout=.*no axis 'transprot'; did you mean 'transport'.*transport, mla, dense"),
        ("transport=Balance", r"--layout=transport=Balance: .*Balanced"),
        ("transport='Balanced'", "without quotes"),
        ("dense=('tensor',)", "dense"),
        ("dense=('expert','expert')", "may name each of fsdp, expert once"),
        ("optimizer=('data','data')", "may name each of data, fsdp, expert, context once"),
    ],
)
def test_impossible_layouts_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        layouts.load(text)


K3_REFUSALS = [
    ("expert=60", r"'experts' of size 896 does not divide over the mesh axis expert = 60; 56 or 64 devices would"),
    ("tensor=5", r"does not divide over the mesh axis tensor = 5"),
    ("tensor=64", r"'heads' of size 96 does not divide over the mesh axis tensor = 64; 48 or 96 devices"),
    ("tensor=3", r"parameter embed: its dimension 'vocab' of size 163840 .* tensor = 3; 2 or 4 .* of 163839 or 163842"),
]


@pytest.mark.parametrize(("text", "message"), K3_REFUSALS)
def test_what_must_be_split_has_to_divide(text, message):
    with pytest.raises(ConfigError, match=message):
        layout_report.state(presets.load("kimi_k3"), layouts.load(text))


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("data=3", {}, "3 would|6 would"),
        ("context=16,tensor=4", {"seq_len": 40}, r"rows of 40 tokens do not divide over context x tensor = 64 devices"),
        ("context=16", {"seq_len": 32}, r"2 tokens on each, shorter than the 3 .* context must be at most 10"),
    ],
)
def test_batches_that_do_not_divide_are_refused(text, settings, message):
    config = c.replace(presets.load("nano"), **settings)
    with pytest.raises(ConfigError, match=message):
        placement.check_batch(config, layout_report.mesh_of(layouts.load(text)))


FITS = [
    ("nano", "nano_8"),
    ("attnres_194m", "attnres_16"),
    ("attnres_528m", "attnres_16"),
    ("attnres_436m", "attnres_64"),
    ("kimi_linear_48b", "kimi_linear_48b_v5p"),
    ("kimi_k3", "kimi_k3_v5p"),
    ("kimi_k3", "kimi_k3_tpu7x"),
]


@pytest.mark.parametrize(("name", "layout"), FITS)
def test_shipped_layouts_fit(name, layout):
    config, layout = presets.load(name), layouts.load(layout)
    placement.check_batch(config, layout_report.mesh_of(layout))
    placed = layout_report.state(config, layout)
    held, total = sum(one.bytes for one in placed), sum(one.bytes * layout.devices // one.copies for one in placed)
    assert held < 3 * total / layout.devices


def test_a_description_lists_what_is_held_alike():
    text = describe(presets.load("kimi_k3"), layout=layouts.load("kimi_k3_v5p"))
    assert "head: 18 MB on each of 16 devices" in text
    assert "spread at rest over expert" in text
    with pytest.raises(ConfigError, match="do not divide"):
        describe(presets.load("nano"), layout=Layout(data=3))
