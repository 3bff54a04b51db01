"""The loop from configuration to report: resuming, refusals, and a run that breaks."""

import json
import pathlib
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
from k3jax.config_data import TextFolder
from k3jax.data.order import Batches
from k3jax.exits import Exit
from k3jax.loop import NonFiniteError
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


@pytest.mark.xdist_group("finished")
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


@pytest.mark.xdist_group("finished")
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


@pytest.mark.xdist_group("finished")
def test_another_configuration_is_refused_field_by_field(micro, finished):
    with pytest.raises(CheckpointError, match=r"seq_len was 40 and is now 48\n.*--allow_change=seq_len"):
        train.train(c.replace(micro, seq_len=48), finished)


@pytest.mark.xdist_group("finished")
def test_fewer_steps_than_made_are_refused(micro, finished):
    with pytest.raises(CheckpointError, match=r"steps was 6 and is now 4"):
        train.train(c.replace(micro, steps=4), finished)


@pytest.mark.xdist_group("finished")
def test_another_corpus_is_refused(micro, text, finished, tmp_path):
    """Unless it is allowed: the new text then goes on at the same step."""
    run, moved = tmp_path / "moved", tmp_path / "text"
    shutil.copytree(finished, run)
    shutil.copytree(text, moved)
    (moved / "more.txt").write_text("one more file\n")
    config = c.replace(micro, data=TextFolder(path=str(moved), held_out=0.2))
    with pytest.raises(CheckpointError, match=r"(?s)data.path was .*--allow_change=data.path"):
        train.train(config, run)
    with pytest.raises(CheckpointError, match=r"was trained on the corpus .*--allow_change=data"):
        train.train(config, run, train.Options(allow=("data.path",)))
    train.train(config, run, train.Options(allow=("data",)))


def test_reading_leaves_no_trace(tmp_path):
    with pytest.raises(CheckpointError, match="not the folder of a run"):
        Checkpoints(tmp_path / "absent", create=False)
    assert not list(tmp_path.iterdir())


def test_a_missing_checkpoint_is_named(tmp_path):
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoints.load()


@pytest.mark.xdist_group("finished")
def test_an_unknown_step_is_named(finished):
    with Checkpoints(finished) as checkpoints, pytest.raises(CheckpointError, match=r"no step 5; it has \[3, 6\]"):
        checkpoints.load(5)


def data_files(run, step):
    folder = run / "checkpoints" / str(step) / "state"
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1000]


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.xdist_group("finished")
@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [(cut, r"has [\d,]+ bytes instead of"), (flip, "the checksum of .* is wrong"), (pathlib.Path.unlink, "is missing")],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(micro, finished, tmp_path, spoil, complaint):
    """And nothing is lost: the damaged one is set aside, the run ends as if nothing had happened."""
    run = tmp_path / "spoilt"
    shutil.copytree(finished, run)
    spoil(data_files(run, 6)[0])
    with pytest.raises(CheckpointError, match=rf"checkpoints/6 is damaged: .*{complaint}.*steps \[3\] are left"):
        state_of(run)
    if spoil is not flip:
        return
    train.train(micro, run)
    assert (run / "damaged" / "6.0").is_dir()
    events = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "event"]
    assert any(line["event"] == "damaged_checkpoint" and "checkpoints/6" in line["reason"] for line in events)
    (_, expected), (_, state) = state_of(finished), state_of(run)
    for old, new in zip(jax.tree.leaves(expected), jax.tree.leaves(state)):
        np.testing.assert_array_equal(old, new)


@pytest.mark.xdist_group("finished")
def test_no_good_checkpoint_at_all_lists_what_is_wrong_with_each(micro, finished, tmp_path):
    run = tmp_path / "spoilt"
    shutil.copytree(finished, run)
    for step in (3, 6):
        cut(data_files(run, step)[0])
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint of the run is whole:.*checkpoints/6.*checkpoints/3"):
        train.train(micro, run)
    assert (run / "checkpoints" / "6").is_dir()


def test_a_run_that_breaks_names_step_layers_and_checkpoint(micro, tmp_path, monkeypatch):
    def broken(config):
        state = init(config)
        layer = state.weights.params["segments"][0][1]["ffn"]
        layer["gate"] = layer["gate"].at[...].set(jnp.nan)
        return state

    init = train.init_state
    monkeypatch.setattr(train, "init_state", broken)
    with pytest.raises(NonFiniteError) as caught:
        train.train(micro, tmp_path / "broken")
    message = str(caught.value)
    assert message.startswith("step 4, number 4 in a row: the loss or the gradient is not finite")
    assert "first layer not finite in the forward pass: 2" in message
    assert "first layer not finite in the backward pass" in message
    assert "checkpoints/3" in message


def test_skipped_steps_are_logged_and_one_too_many_stops_the_run(micro, tmp_path, monkeypatch):
    """Steps 1 and 3 to 6 are bad: 1 and 3 to 5 are skipped, at 6 the run stops with the weights of step 2."""

    def broken(self, step):
        batch = read(self, step)
        return batch if step == 1 else batch._replace(weights_BT=np.nan * batch.weights_BT)

    read = Batches.__getitem__
    monkeypatch.setattr(Batches, "__getitem__", broken)
    run = tmp_path / "broken"
    with pytest.raises(
        NonFiniteError, match=r"(?s)^step 6, number 4 in a row: .*last good checkpoint: .*checkpoints/3$"
    ):
        train.train(micro, run)
    lines = read_metrics(run / "metrics.jsonl")
    skipped = [(line["step"], line["in_a_row"]) for line in lines if line.get("event") == "skipped"]
    assert skipped == [(1, 1), (3, 1), (4, 2), (5, 3), (6, 4)]
    assert [line["reason"] for line in lines if line.get("event") == "stopped"] == ["non_finite"]


@pytest.mark.xdist_group("finished")
def test_a_finished_run_is_left_as_it_is(micro, finished):
    before = (finished / "metrics.jsonl").read_bytes()
    assert train.train(micro, finished) == json.loads((finished / "summary.json").read_text())
    assert (finished / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "nanoo"], "nano"),
        (["--set", "model.dmi=3"], "did you mean 'dim'"),
        (["tiny"], "'tiny' belongs to no flag"),
        (["--mesh", "data=8"], "8 or 16 would"),
    ],
)
def test_bad_arguments_are_one_line(arguments, expected, tmp_path):
    command = [sys.executable, "-m", "k3jax.train", "--run", str(tmp_path / "run"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == (1 if arguments == ["tiny"] else Exit.CONFIGURATION)
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
