"""Studies as data: diffs, names, and what is refused."""

import importlib
import sys
from dataclasses import replace

import pytest

from experiments import study as module
from experiments.run import fitting, groups
from experiments.study import FOLDER, Metric, Rung, changed, load, studies
from k3jax import config as c
from k3jax import presets
from k3jax.config_optim import Cosine


def test_changes_apply_at_once_and_leave_the_rest():
    tiny = presets.tiny()
    moe = c.replace(tiny.model.moe, latent=None)
    new = changed(tiny, {"model.moe": moe, "model.moe.experts": 32, "model.moe.active": 9, "seed": 3})
    assert (new.model.moe.experts, new.model.moe.active, new.model.moe.latent, new.seed) == (32, 9, None, 3)
    assert changed(tiny, {}) == tiny and new.model.kda == tiny.model.kda


@pytest.mark.parametrize(
    "diff, message",
    [
        (
            {"model.residul": c.PlainResidual()},
            "ModelConfig has no field 'residul'; did you mean 'residual'",
        ),
        ({"model.dim.size": 3}, r"model.dim.size: int has no field 'size' \(fields: none\)"),
        ({"model.residual": "plain"}, "model.residual = 'plain', but it must be"),
        ({"model.kda.decay": c.NoGate()}, "model.kda.decay"),
        ({"batch": 0}, "TrainConfig.batch = 0"),
    ],
)
def test_bad_diffs_are_named(diff, message):
    with pytest.raises(c.ConfigError, match=message):
        changed(presets.tiny(), diff)


def test_a_variant_with_a_path_that_does_not_exist(study):
    broken = replace(study, variants={"control": {}, "typo": {"model.kda.deccay": c.NoDecay()}})
    with pytest.raises(c.ConfigError, match=r"study toy, variant typo: model.kda.deccay: KDA has no field 'deccay'"):
        groups(broken, [], [])
    assert broken.config("small", "control").seed == 0


def test_resolved_runs(study):
    config = study.config("small", "swiglu", rate=3e-3, seed=2)
    assert (config.optimizer.schedule.schedule.peak, config.seed) == (3e-3, 2)
    assert config.model.activation == c.SwiGLU()
    wide = replace(study, variants={"control": lambda run: {"model.dim": 2 * run.model.dim}})
    assert wide.config("small", "control").model.dim == 2 * study.rungs["small"].config.model.dim


def test_what_a_study_must_have(study):
    with pytest.raises(c.ConfigError, match="control 'other' is none of its variants"):
        replace(study, control="other")
    with pytest.raises(c.ConfigError, match="no learning rates"):
        replace(study, rates=())
    with pytest.raises(c.ConfigError, match="study toy: seeds = 1, but an interval needs at least two"):
        replace(study, seeds=1)
    with pytest.raises(c.ConfigError, match="study toy: no run measures 'los'; did you mean 'loss'"):
        replace(study, shown=("los",))
    assert replace(study, shown=("Copy.accuracy@8", "recall@8-15", "nats@64")).measured[0] == "bits_per_byte"
    fixed = changed(study.rungs["small"].config, {"optimizer.schedule": Cosine()})
    with pytest.raises(c.ConfigError, match="must be Tunable"):
        replace(study, rungs={"small": Rung(fixed)})


def test_asking_for_what_is_not_there(study):
    with pytest.raises(c.ConfigError, match="there is no variant 'swigl'; did you mean 'swiglu'"):
        groups(study, [], ["swigl"])
    with pytest.raises(c.ConfigError, match="there is no rung 'large'"):
        groups(study, ["large"], [])
    with pytest.raises(c.ConfigError, match="rung 'published' is planned, not run here"):
        groups(study, ["published"], [])
    assert groups(study, [], []) == [("small", "control"), ("small", "swiglu")]
    assert ("published", "swiglu") in groups(study, [], [], planned=True)
    with pytest.raises(c.ConfigError, match="there is no study 's01_kda_ancestor_'"):
        load("s01_kda_ancestor_")


def test_jobs_are_bounded_by_the_memory():
    assert (fitting(4, 7 << 30), fitting(1, 1 << 30), fitting(2, 100 << 30)) == (2, 1, 2)


def test_the_studies_that_there_are():
    names = list(studies())
    assert len(names) >= 12 and names == sorted(names)
    for name in names:
        assert (FOLDER / name / "README.md").exists(), f"the folder of {name} has another name, or no README"
    assert load("s01")[0].name == "s01_kda_ancestors"


def test_two_studies_with_one_name(monkeypatch):
    original = importlib.import_module("experiments.s01_kda_ancestors.study")
    monkeypatch.setitem(sys.modules, "experiments.s99_copy.study", original)
    monkeypatch.setattr(module, "folders", lambda: iter([FOLDER / "s01_kda_ancestors", FOLDER / "s99_copy"]))
    with pytest.raises(c.ConfigError, match=r"s01_kda_ancestors and .*s99_copy both hold a study named"):
        studies()


def test_best_of_a_metric():
    assert Metric("loss", "lower").best([3.0, 1.0, 2.0]) == 1 and Metric("accuracy", "higher").best([3.0, 1.0]) == 0
    diverged = {"metrics": {"loss": None, "accuracy": None}}
    assert Metric("loss", "lower").of(diverged) == float("inf")
    assert Metric("loss", "lower").of({"metrics": {"loss": float("nan")}}) == float("inf")
    assert Metric("accuracy", "higher").of(diverged) == -float("inf")
