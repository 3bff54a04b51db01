"""A checkpoint evaluated from the command line on, and every way to ask for one that is not there."""

import json
import pathlib
import subprocess
import sys

import pytest

from k3jax import config as c
from k3jax import config_data as cd
from k3jax import config_tasks as ct
from k3jax import evaluate, presets, step
from k3jax.checkpoint import CheckpointError, Checkpoints
from k3jax.config import ConfigError
from k3jax.data import DataError
from k3jax.data.load import load_data


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(8):
        (folder / f"{number}.txt").write_text(f"file {number} has a few words, and then no more\n" * (number + 1))
    recall = ct.MultiQueryRecall(vocab=64, lengths=(32, 64), pairs=(2, 8))
    parts = (
        cd.Weighted(source=cd.TextFolder(path=str(folder), held_out=0.3), weight=1.0, name="words"),
        cd.Weighted(source=recall, weight=1.0, name="recall"),
    )
    return c.replace(presets.tiny(), data=cd.Mixture(parts=parts))


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    """A run that has made no step."""
    run = tmp_path_factory.mktemp("runs") / "tiny"
    run.mkdir()
    data = load_data(config.data, config.tokenizer, vocab=config.model.vocab, seed=config.seed)
    with Checkpoints(run) as checkpoints:
        checkpoints.save(config, step.init_state(config), {"corpus": data.fingerprint})
    return run


def test_a_checkpoint_is_evaluated_on_the_tasks_and_the_text_of_its_run(config, run):
    record = evaluate.evaluate_run(run, examples=5)
    assert json.loads((run / "evaluation.json").read_text()) == record
    assert (run / "evaluation.png").stat().st_size > 5000
    assert record["step"] == 0 and record["sources"].keys() == {"words"}
    words = record["sources"]["words"]
    assert words["bits_per_byte"] == pytest.approx(8, abs=0.3), "weights at random know nothing"
    assert words["bytes"] > 50
    (task,) = record["tasks"]
    assert task["task"] == "MultiQueryRecall" and task["settings"]["lengths"] == [32, 64]
    assert [(cell["pairs"], cell["answers"]) for cell in task["cells"]] == [(2, 10), (8, 40)]
    assert all(cell["accuracy"] < 0.3 and 5 < cell["nats"] < 6.5 for cell in task["cells"])

    again = evaluate.evaluate_run(run, examples=5, max_bytes=30)
    assert again["tasks"] == record["tasks"] and again["sources"]["words"]["bytes"] <= words["bytes"]


def test_the_command_prints_a_table(run):
    command = [sys.executable, "-m", "k3jax.evaluate", str(run), "--tasks", "Palindrome(lengths=(8,16))"]
    done = subprocess.run([*command, "--examples", "2"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "bits per byte" in done.stdout and "Palindrome (2 examples each, chance 0.0159)" in done.stdout
    assert json.loads((run / "evaluation.json").read_text())["tasks"][0]["cells"][1]["length"] == 16


@pytest.mark.parametrize(
    "text, words",
    [
        ("Nedle", r"no 'Nedle'.*MultiQueryRecall or Palindrome or Copy or .*did you mean 'Needle'"),
        ("Needle(vocab=300)", "Needle has no field 'vocab'"),
        ("MultiQueryRecall(lengths=(64,), pairs=(32,))", "32 pairs do not fit 64 tokens"),
        ("Palindrome(lengths=(7,))", r"\[7\] are odd"),
        ("3", "must be MultiQueryRecall or"),
    ],
)
def test_bad_tasks_are_named(text, words):
    with pytest.raises(ConfigError, match=words):
        evaluate.parse_tasks(text)


def test_tasks_are_written_as_in_configurations():
    assert evaluate.parse_tasks("") == ()
    found = evaluate.parse_tasks("Needle, PermutationTracking(degree=2)")
    assert found == (ct.Needle(), ct.PermutationTracking(degree=2))


def test_a_task_with_more_tokens_than_the_model_is_refused(config):
    with pytest.raises(ConfigError, match=r"MultiQueryRecall uses 8192 tokens.*only 258"):
        evaluate.evaluate(config, None, tasks=(ct.MultiQueryRecall(),))


def test_text_that_changed_since_the_training_is_refused_unless_allowed(config, run, monkeypatch):
    """Tasks, which depend on nothing outside the configuration, are not compared."""
    monkeypatch.setattr(evaluate, "_sources", lambda *_: {})
    more = pathlib.Path(config.data.parts[0].source.path, "more.txt")
    assert evaluate.evaluate_run(run, tasks=())["step"] == 0
    more.write_text("more")
    try:
        with pytest.raises(DataError, match=r"trained on the corpus \w+, but the files now are .*--allow_change=data"):
            evaluate.evaluate_run(run, tasks=())
        assert evaluate.evaluate_run(run, tasks=(), allow=("data",))["step"] == 0
    finally:
        more.unlink()
    only_tasks = c.replace(config, data=ct.Copy(vocab=16, lengths=(8,), examples=4))
    assert evaluate.evaluate(only_tasks, None, tasks=(), corpus="another") == {"sources": {}, "tasks": []}


def test_runs_and_steps_that_are_not_there_are_named(run, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere is not the folder of a run"):
        evaluate.evaluate_run(tmp_path / "nowhere")
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        evaluate.evaluate_run(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"no step 7; it has \[0\]"):
        evaluate.evaluate_run(run, step=7)
