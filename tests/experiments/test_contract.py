"""Every variant of every study is a train step that can be lowered."""

from typing import Any

import pytest

from experiments.plan import layout_of
from experiments.study import Study, changed, studies
from k3jax import config_io, layout_report, layouts, placement, presets, runtime, step
from k3jax.config_optim import Tunable
from k3jax.run_config import TrainConfig


def small(config: TrainConfig) -> TrainConfig:
    """The same parts in a step of few tokens, with one layer of each mixer (of MLA, as many as share their keys), on
    data that needs no reading."""
    kinds = config.model.kinds
    mixers = {kind.mixer for kind in kinds}
    kda, mla = int("kda" in mixers), config.model.mla.share if "mla" in mixers else 0
    layers = {
        "model.layers": kda + mla,
        "model.full_attention": tuple(range(kda + 1, kda + mla + 1)),
        "model.dense_layers": 0 if any(kind.ffn == "moe" for kind in kinds) else kda + mla,
        "model.vocab": max(config.model.vocab, 258),
    }
    sizes = {"batch": 2, "seq_len": 32, "loss_chunk": 32, "data": presets.tiny().data}
    return step.program(changed(config, layers | sizes))


def parts(value: Any) -> Any:
    """What of a configuration decides which code is traced: types and choices, and of numbers whether they are one."""
    if isinstance(value, dict):
        return tuple((key, parts(item)) for key, item in value.items())
    if isinstance(value, list):
        return len(value) > 1
    return value if value is None or isinstance(value, (str, bool)) else min(value, 2)


def distinct(every: dict[str, Study]) -> dict[Any, tuple[str, TrainConfig]]:
    """One configuration for each set of parts, by the layers' kinds and those parts."""
    found: dict[Any, tuple[str, TrainConfig]] = {}
    for study in every.values():
        rung = study.run_here[0]
        for variant in study.variants:
            config = small(study.config(rung, variant))
            kinds = frozenset(config.model.kinds)
            found.setdefault((kinds, parts(config_io.to_dict(config))), (f"{study.name} {variant}", config))
    return found


def test_one_step_of_every_variant_lowers():
    every = studies()
    for name, config in distinct(every).values():
        with runtime.collection_paused():
            outputs = step.lower_train_step(config).out_info
        assert outputs[1].loss.shape == (), name


@pytest.mark.parametrize("name", studies())
def test_every_rung_and_variant_resolves(name):
    """Published sizes too, whose layouts and rates are their own."""
    study = studies()[name]
    for rung in study.rungs.values():
        assert rung.planned or isinstance(rung.config.optimizer.schedule, Tunable)
    for rung in study.rungs:
        for variant in study.variants:
            assert study.config(rung, variant, seed=1).seed == 1
    if len(study.rates) > 1:
        assert list(study.rates) == sorted(set(study.rates))
    assert {name for published in study.published for name in published.numbers} - set(study.variants) <= {"15to1"}


@pytest.mark.parametrize("devices", [8, 16])
@pytest.mark.parametrize("name", studies())
def test_every_rung_has_a_layout_for_a_slice(name, devices):
    """Four rows on eight devices too, and a rung whose own layout is for sixteen."""
    for rung in studies()[name].rungs.values():
        layout = layouts.load(layout_of(rung, devices))
        mesh = layout_report.mesh_of(layout)
        placement.check_model(rung.config.model, mesh)
        placement.check_batch(rung.config, mesh)
        assert layout.devices == devices
