"""The runs of a variant: search, seeds, skipping, refusing; and real ones that repeat bit for bit."""

import json
from dataclasses import replace

import pytest

from experiments import folder, group, measures
from experiments.folder import Run
from experiments.group import perform, run_group
from k3jax import config as c
from k3jax import config_io, step
from k3jax.config import ConfigError
from k3jax.loop import NonFiniteError
from k3jax.metrics import read_metrics
from k3jax.run_folder import read_json, write_json


def test_rates_first_then_seeds_at_the_best(study, fake_training, tmp_path):
    results = run_group(study, "small", "swiglu", seeds=3, root=tmp_path)
    made = [(found["rate"], found["seed"]) for found in results]
    assert made == [(1e-3, 0), (1e-2, 0), (1e-3, 1), (1e-3, 2)]
    assert len(fake_training) == 4
    kept = read_json(tmp_path / "toy/small/swiglu/lr0.001_seed1" / folder.RESULT)
    assert kept == results[2] and kept["cost"]["tokens"] == 4 * 2 * 16 and kept["commit"]
    diff = read_json(tmp_path / "toy/small/swiglu/lr0.001_seed1/diff.json")
    assert set(diff) == {"model.activation", "optimizer.schedule.schedule.peak", "seed"}


def test_finished_runs_are_not_made_again(study, fake_training, tmp_path):
    run_group(study, "small", "control", seeds=2, root=tmp_path)
    (tmp_path / "toy/small/control/lr0.001_seed1" / folder.RESULT).unlink()
    before = len(fake_training)
    run_group(study, "small", "control", seeds=2, root=tmp_path)
    assert len(fake_training) == before + 1


def test_runs_differ_in_what_is_no_part_of_their_program(study):
    low, high = (Run(study, "small", "control", rate, seed).config for rate, seed in ((1e-3, 0), (1e-2, 5)))
    other = Run(study, "small", "swiglu", 1e-3, 0).config
    assert step.program(low) == step.program(high) != step.program(other)


def test_a_folder_of_another_run_is_refused(study, fake_training, tmp_path):
    run = Run(study, "small", "control", 1e-3, 0)
    perform(run, tmp_path)
    config_io.save_json(replace(run.config, batch=8), run.folder(tmp_path) / "config.json")
    with pytest.raises(ConfigError, match=r"lr0.001_seed0 holds another run: batch = 8 and not 2"):
        perform(run, tmp_path)


def test_a_metric_that_no_run_measures(study, fake_training, tmp_path):
    broken = replace(study, metric=replace(study.metric, name="accuracy"))
    with pytest.raises(ConfigError, match=r"no run measures 'accuracy' \(measured: bits_per_byte, loss, skipped\)"):
        run_group(broken, "small", "control", seeds=1, root=tmp_path)
    assert not list(tmp_path.rglob(folder.RESULT))


def test_files_that_were_cut_off(study, fake_training, tmp_path):
    run = Run(study, "small", "control", 1e-3, 0)
    place = run.folder(tmp_path)
    perform(run, tmp_path)
    text = (place / folder.RESULT).read_text()
    (place / folder.RESULT).write_text(text[: len(text) // 2])
    with pytest.raises(ConfigError, match=r"result.json is cut off or damaged .*; remove it and run the study again"):
        perform(run, tmp_path)
    (place / folder.RESULT).write_text(text.replace('"rate": 0.001', '"rate": 0.01'))
    with pytest.raises(ConfigError, match=r"result.json is the result of another run: .*'rate': 0.01, 'seed': 0"):
        perform(run, tmp_path)
    write_json(place / "summary.json", {"bits_per_byte": 1.0, "steps": 4})
    with pytest.raises(ConfigError, match=r"metrics.jsonl ends at step 1 of 4: .* move .*lr0.001_seed0 away"):
        measures.measures(place)
    (place / "metrics.jsonl").write_text('{"step": 1, "ki\n{"step": 4, "kind": "train", "loss": 1.0}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 1 is damaged"):
        measures.measures(place)


def test_the_cost_counts_what_was_spent_before_a_run_was_cut(study, fake_training, tmp_path):
    run = Run(study, "small", "control", 1e-3, 0)
    run.folder(tmp_path).mkdir(parents=True)
    clock = {"useful": 30.0, "lost": 7200.0, "compile": 10.0}
    line = {"step": 1, "kind": "train", "loss": 1.0, "clock": clock}
    (run.folder(tmp_path) / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert 40 <= perform(run, tmp_path)["seconds"] < 100


def test_a_run_that_diverges_loses(study, fake_training, tmp_path, monkeypatch):
    calm = group.train

    def train(config, place, options):
        if config.optimizer.schedule.schedule.peak < 5e-3:
            raise NonFiniteError("step 3: the loss is not finite\ntable")
        calm(config, place, options)

    monkeypatch.setattr(group, "train", train)
    results = run_group(study, "small", "control", seeds=2, root=tmp_path)
    assert [(found["rate"], found["seed"]) for found in results] == [(1e-3, 0), (1e-2, 0), (1e-2, 1)]
    assert results[0]["metrics"] == {"bits_per_byte": None, "diverged": "step 3: the loss is not finite"}


def test_maxima_are_measured_at_the_end(study, tmp_path):
    """No product of the clamped activation is larger than the limit times 0.2785, the largest magnitude of SiLU below
    zero."""
    clamped = {"model.activation": c.ClampedSwiGLU(0.01)}
    maxima = replace(study, variants={"control": {}, "clamped": clamped}, shown=("activation_max", "hidden_max"))
    found = perform(Run(maxima, "small", "clamped", 1e-2, 0), tmp_path)["metrics"]
    assert 0 < found["activation_max"] <= 0.01 * 0.2785 and found["hidden_max"] > 0


def test_runs_repeat_bit_for_bit_whatever_ran_before_them(study, copy_task, tmp_path):
    """A real group, with a task measured at the end, and one of its runs alone, in another folder."""
    measured = replace(study, tasks=(copy_task,), examples=2, rates=(1e-2, 1e-3), shown=("accuracy", "recall@8-15"))
    run_group(measured, "small", "control", seeds=1, root=tmp_path / "all")
    alone = perform(Run(measured, "small", "control", 1e-3, 0), tmp_path / "alone")
    kept = folder.result(Run(measured, "small", "control", 1e-3, 0), tmp_path / "all")
    assert kept["metrics"] == alone["metrics"] and "accuracy@16" in kept["metrics"]

    def losses(root):
        path = Run(measured, "small", "control", 1e-3, 0).folder(tmp_path / root) / "metrics.jsonl"
        return [(line["lr"], line["loss"]) for line in read_metrics(path) if line["kind"] == "train"]

    assert losses("all") == losses("alone") and len(losses("all")) == 4
    other = folder.result(Run(measured, "small", "control", 1e-2, 0), tmp_path / "all")
    assert other["metrics"]["loss"] != kept["metrics"]["loss"]
