"""The loop from configuration to report: resuming, refusals, and a run that breaks."""

import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import config as c
from k3jax import train
from k3jax.checkpoint import CheckpointError, Checkpoints
from k3jax.metrics import read_metrics


@pytest.fixture(scope="module")
def finished(micro, tmp_path_factory):
    """A run that was never stopped."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    train.train(micro, run)
    return run


def state_of(run):
    with Checkpoints(run) as checkpoints:
        return checkpoints.load()


def test_a_run_leaves_what_it_promises(micro, finished):
    for name in (
        "config.json",
        "environment.json",
        "metrics.jsonl",
        "summary.json",
        "sample.txt",
        "loss.png",
        "report.html",
    ):
        assert (finished / name).stat().st_size > 0, name
    lines = read_metrics(finished / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, micro.steps + 1))
    last = [line for line in lines if line["kind"] == "train"][-1]
    assert len(last["balance"]["max_over_mean"]) == len(last["balance"]["dead_share"]) == 2
    assert last["update_rms"].keys() >= {"experts", "heads", "matrix", "router", "embedding", "norm"}
    assert json.loads((finished / "summary.json").read_text())["baselines"].keys() == {"gzip", "xz"}


def test_resuming_equals_never_having_stopped(micro, finished, tmp_path):
    """Bit for bit: the last checkpoint and everything after the one before are taken away, and the run goes on."""
    run = tmp_path / "resumed"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoints" / str(micro.steps))
    train.train(micro, run)
    (_, expected), (_, state) = state_of(finished), state_of(run)
    for old, new in zip(jax.tree.leaves(expected), jax.tree.leaves(state)):
        np.testing.assert_array_equal(old, new)
    losses = [
        [line["loss"] for line in read_metrics(r / "metrics.jsonl") if line["kind"] == "train"] for r in (finished, run)
    ]
    assert losses[0] == losses[1]


def test_another_configuration_is_refused_field_by_field(micro, finished):
    with pytest.raises(CheckpointError, match=r"seq_len was 40 and is now 48"):
        train.train(c.replace(micro, seq_len=48), finished)


def test_fewer_steps_than_made_are_refused(micro, finished):
    with pytest.raises(CheckpointError, match=r"steps was 6 and is now 4"):
        train.train(c.replace(micro, steps=4), finished)


def test_another_corpus_is_refused(micro, finished, tmp_path):
    run = tmp_path / "moved"
    shutil.copytree(finished, run)
    path = run / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"corpus": "0123"}))
    with pytest.raises(CheckpointError, match="was trained on the corpus 0123"):
        train.train(micro, run)


def test_reading_leaves_no_trace(tmp_path):
    with pytest.raises(CheckpointError, match="not the folder of a run"):
        Checkpoints(tmp_path / "absent", create=False)
    assert not list(tmp_path.iterdir())


def test_a_missing_checkpoint_is_named(tmp_path):
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoints.load()


def test_an_unknown_step_is_named(finished):
    with Checkpoints(finished) as checkpoints, pytest.raises(CheckpointError, match=r"no step 5; it has \[3, 6\]"):
        checkpoints.load(5)


def test_a_truncated_checkpoint_is_named(finished, tmp_path):
    run = tmp_path / "cut"
    shutil.copytree(finished, run)
    data = [path for path in (run / "checkpoints" / "6" / "state").rglob("*") if path.is_file() and path.stat().st_size]
    for path in data:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"(?s)checkpoints/6 is damaged.*to go on from step 3$"):
        state_of(run)


def test_a_run_that_breaks_names_step_layers_and_checkpoint(micro, tmp_path, monkeypatch):
    def broken(config):
        state = init(config)
        layer = state.weights.params["segments"][0][1]["ffn"]
        layer["gate"] = layer["gate"].at[...].set(jnp.nan)
        return state

    init = train.init_state
    monkeypatch.setattr(train, "init_state", broken)
    with pytest.raises(train.NonFiniteError) as caught:
        train.train(micro, tmp_path / "broken")
    message = str(caught.value)
    assert message.startswith("step 1: the loss or the gradient is not finite")
    assert "first layer not finite in the forward pass: 2" in message
    assert "last good checkpoint: none yet" in message


def test_a_run_that_breaks_later_names_the_checkpoint_before(micro, tmp_path, monkeypatch):
    def broken(config, state, batch):
        factor = jnp.where(state.step == 4, jnp.nan, 1.0)
        return step(config, state, batch._replace(weights_BT=factor * batch.weights_BT))

    step = train.train_step
    monkeypatch.setattr(train, "train_step", broken)
    with pytest.raises(train.NonFiniteError, match=r"(?s)^step 5: .*last good checkpoint: .*checkpoints/3$"):
        train.train(micro, tmp_path / "broken")


def test_a_finished_run_is_left_as_it_is(micro, finished):
    before = (finished / "metrics.jsonl").read_bytes()
    assert train.train(micro, finished) == json.loads((finished / "summary.json").read_text())
    assert (finished / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "nanoo"], "nano"),
        (["--set", "model.dmi=3"], "did you mean 'dim'"),
        (["--set", "model.dim=wide"], "model.dim"),
        (["tiny"], "'tiny' belongs to no flag"),
    ],
)
def test_bad_arguments_are_one_line(arguments, expected, tmp_path):
    command = [sys.executable, "-m", "k3jax.train", "--run", str(tmp_path / "run"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
