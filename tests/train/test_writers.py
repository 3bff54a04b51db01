"""Who gets a run's lines: the JSON lines always, trackers offline, no step twice after a restart, and no tracker ends a
run."""

import ast
import collections
import importlib.util
import json
import pathlib
import sqlite3
import struct

import numpy as np
import pytest
from absl import logging

from k3jax.config import ConfigError
from k3jax.metrics import read_metrics
from k3jax.telemetry import trackers
from k3jax.telemetry.clock import CLASSES, Clock
from k3jax.telemetry.writers import Writers


def loss(step):
    return float(np.float32(2 ** (1 / step)))


def write(writers, steps):
    for step in steps:
        by_layer = {"dead_share": np.array([0.0, 1 / 3], np.float32)}
        line = {"step": step, "kind": "train", "loss": loss(step), "grad_norm": np.nan, "balance": by_layer}
        writers.write(line | {"depth_weights": {"mixer": [[0.5, 0.5]]}})
    writers.write({"step": steps[-1], "kind": "eval", "bits_per_byte": 1.5})


def train_twice(run, names, config=None):
    """Steps 1 to 6; then again from the checkpoint of step 3 to step 9."""
    with Writers(run, names, clock=Clock(), config=config or {}) as writers:
        write(writers, range(1, 7))
    with Writers(run, names, clock=Clock(), resume_step=3, config=config or {}) as writers:
        write(writers, range(4, 10))


def test_lines_carry_the_account_and_a_restart_says_so(tmp_path):
    train_twice(tmp_path, ())
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 10))
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [9], "that of step 6 was made again and moved"
    assert all(set(line["clock"]) == set(CLASSES) and line["unix"] > 1.7e9 for line in lines)
    start, resume = (line for line in lines if line["kind"] == "event")
    assert (start["event"], start["step"]) == ("start", 0)
    assert (resume["event"], resume["step"], resume["steps_again"]) == ("resume", 3, 3)
    spent = [sum(line["clock"].values()) for line in lines]
    assert spent == sorted(spent)
    assert lines[1]["balance"]["dead_share"] == [0.0, 0.3333333]
    assert list(tmp_path.iterdir()) == [tmp_path / "metrics.jsonl"]


def test_lines_without_a_checkpoint_are_made_again(tmp_path):
    with Writers(tmp_path, clock=Clock()) as writers:
        write(writers, range(1, 4))
    with Writers(tmp_path, clock=Clock(), resume_step=0) as writers:
        write(writers, range(1, 3))
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2]
    with pytest.raises(FileExistsError, match="resume the run or choose another folder"):
        Writers(tmp_path, clock=Clock())


def tensorboard_scalars(run):
    """{tag: [(step, value)]} of the event files, read by their framing."""
    event = pytest.importorskip("tensorboardX.proto.event_pb2").Event
    found = collections.defaultdict(list)
    for path in sorted((run / "tensorboard").iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack("<Q", data[at : at + 8])
            parsed = event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
            for value in parsed.summary.value:
                if value.HasField("simple_value"):
                    found[value.tag].append((parsed.step, value.simple_value))
    return found


def test_tensorboard_has_every_number_once(tmp_path):
    train_twice(tmp_path, ("tensorboard",))
    found = tensorboard_scalars(tmp_path)
    assert sorted(found["train/loss"]) == [(step, loss(step)) for step in range(1, 10)]
    assert sorted(found["train/balance/dead_share/01"])[0] == (1, pytest.approx(1 / 3))
    assert sorted(step for step, _ in found["eval/bits_per_byte"]) == [6, 9]
    assert found.keys() > {"train/clock/useful"}
    assert not [tag for tag in found if "grad_norm" in tag or "depth_weights" in tag or "unix" in tag]


def test_two_crashes_in_one_stretch_repeat_no_step(tmp_path):
    """The second process gets less far than the first: the file forgets how far that was, the trackers do not."""
    for resume_step, last in ((None, 6), (2, 4), (2, 8)):
        with Writers(tmp_path, ("tensorboard",), clock=Clock(), resume_step=resume_step) as writers:
            write(writers, range((resume_step or 0) + 1, last + 1))
    steps = [step for step, _ in tensorboard_scalars(tmp_path)["train/loss"]]
    assert sorted(steps) == list(range(1, 9))


def test_a_tracker_that_breaks_is_left_out(tmp_path, monkeypatch):
    told, warned = [], []

    class Breaks:
        def write(self, step, scalars):
            told.append(step)
            raise RuntimeError("no network")

    monkeypatch.setattr(trackers, "open_tracker", lambda *_: Breaks())
    monkeypatch.setattr(logging, "warning", lambda text, *values: warned.append(text % values))
    with Writers(tmp_path, ("wandb",), clock=Clock()) as writers:
        write(writers, range(1, 4))
    assert told == [1] and warned == ["wandb is left out from now on: RuntimeError: no network"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5


def test_names_are_checked_before_anything_starts(monkeypatch):
    assert trackers.parse("") == () and trackers.parse("tensorboard,") == ("tensorboard",)
    with pytest.raises(ConfigError, match="no tracker 'tensorbord'; there are tensorboard, wandb, trackio, mlflow"):
        trackers.parse("tensorboard,tensorbord")
    with pytest.raises(ConfigError, match="tensorboard is named twice"):
        trackers.parse("tensorboard, tensorboard")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="wandb needs a package that is not installed: pip install wandb "):
        trackers.parse("wandb")


def test_no_tracker_is_imported_unless_asked_for():
    imports = [node for node in ast.parse(pathlib.Path(trackers.__file__).read_text()).body if "Import" in str(node)]
    assert len(imports) > 5, "negative control: the imports of the module are seen"
    assert not [text for text in map(ast.unparse, imports) if any(name in text for name in trackers.PACKAGES.values())]


def test_mlflow_goes_on_with_one_run(tmp_path):
    tracking = pytest.importorskip("mlflow.tracking")
    train_twice(tmp_path, ("mlflow",), {"seed": 3})
    run = json.loads((tmp_path / "trackers.json").read_text())["mlflow"]
    client = tracking.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    history = client.get_metric_history(run, "train/loss")
    assert [(m.step, m.value) for m in history] == [(step, loss(step)) for step in range(1, 10)]
    found = client.get_run(run)
    assert (found.info.status, found.data.params["seed"]) == ("FINISHED", "3")


def test_trackio_goes_on_with_one_run(tmp_path, monkeypatch):
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed; importing it would fix its folder")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    train_twice(tmp_path, ("trackio",))
    rows = sqlite3.connect(tmp_path / "trackio" / "k3jax.db").execute("select run_name, step from metrics").fetchall()
    assert {name for name, _ in rows} == {tmp_path.name}
    assert sorted({step for _, step in rows}) == list(range(1, 10))


def test_wandb_writes_offline_under_one_id(tmp_path):
    pytest.importorskip("wandb")
    train_twice(tmp_path, ("wandb",))
    run = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    files = list(tmp_path.glob(f"wandb/offline-run-*-{run}/run-{run}.wandb"))
    assert len(files) >= 1 and all(file.stat().st_size for file in files)


def test_a_damaged_line_does_not_keep_a_run_from_going_on(tmp_path):
    with Writers(tmp_path, clock=Clock()) as writers:
        write(writers, range(1, 6))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"{\n", *lines[3:]]))
    with Writers(tmp_path, clock=Clock(), resume_step=4) as writers:
        write(writers, range(5, 6))
    assert [line["step"] for line in read_metrics(path) if line["kind"] == "train"] == [1, 3, 4, 5]
    assert (tmp_path / "metrics.jsonl.damaged.1").exists()
