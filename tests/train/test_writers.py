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


def test_a_tracker_that_cannot_be_opened_is_left_out(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX")
    warned = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: warned.append(text % values))
    (tmp_path / "tensorboard").write_text("a file where the folder belongs")
    with Writers(tmp_path, ("tensorboard",), clock=Clock()) as writers:
        write(writers, range(1, 4))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5
    assert len(warned) == 1 and warned[0].startswith("tensorboard is left out from now on: NotADirectoryError: ")


@pytest.fixture
def told(monkeypatch):
    """What a tracker that only listens is told: (name, kind, step); and a way to break it."""

    class Told(list):
        broken = False

    heard = Told()

    class Listener:
        def __init__(self, name):
            self._name = name

        def write(self, step, scalars):
            if heard.broken:
                raise RuntimeError("no network")
            heard.append((self._name, min(scalars).split("/")[0], step))

        def close(self):
            pass

    heard.warned = []
    monkeypatch.setattr(trackers, "open_tracker", lambda name, *_: Listener(name))
    monkeypatch.setattr(logging, "warning", lambda text, *values: heard.warned.append(text % values))
    return heard


def log(run, names, resume_step, *lines):
    """One life of a run: lines as "train 3", "eval 3", "saved 3"."""
    with Writers(run, names, clock=Clock(), resume_step=resume_step) as writers:
        for kind, step in (line.split() for line in lines):
            fields = {"loss": 1.0} if kind in ("train", "eval") else {"event": kind}
            writers.write({"step": int(step), "kind": kind if "loss" in fields else "event", **fields})


def test_a_tracker_is_told_every_line_once_whenever_the_run_is_killed(tmp_path, told):
    a = ("a",)
    log(tmp_path, a, None, "data 1")  # killed in the first step
    log(tmp_path, a, 0, "data 1", "train 1", "train 2", "train 10", "eval 10", "saved 10")  # in the final evaluation
    log(tmp_path, a, 10, "eval 10", "stopped 10")  # before the summary
    log(tmp_path, a, 10, "eval 10", "stopped 10")
    whole = [
        ("a", kind, step) for kind, step in (("train", 1), ("train", 2), ("train", 10), ("eval", 10), ("eval", 10))
    ]
    assert told == whole and not told.warned
    log(tmp_path, a, 2, "train 4", "train 10", "eval 10", "saved 10", "eval 10", "train 12")
    assert told == [*whole, ("a", "train", 12)], "steps made again give the same numbers"


def test_a_tracker_that_joins_later_hears_what_is_written_from_then_on(tmp_path, told):
    log(tmp_path, (), None, "train 1", "train 2", "train 3", "train 5")
    assert not (tmp_path / "trackers.json").exists()
    log(tmp_path, ("a",), 2, "train 3", "train 4")
    assert told == [("a", "train", 3), ("a", "train", 4)]
    assert told.warned == ["a lacks the lines after step 0 up to step 2, which metrics.jsonl has"]
    log(tmp_path, ("b",), 4, "train 5")
    log(tmp_path, ("b", "a"), 4, "train 5", "train 6")
    assert told[2:] == [("b", "train", 5), ("a", "train", 5), ("b", "train", 6), ("a", "train", 6)]


def test_a_tracker_that_broke_comes_back_after_what_it_was_told(tmp_path, told):
    log(tmp_path, ("a",), None, "train 1", "train 2")
    told.broken = True
    log(tmp_path, ("a",), 2, "train 3", "train 4", "eval 4")
    told.broken = False
    log(tmp_path, ("a",), 3, "train 4", "eval 4")
    assert told == [("a", "train", 1), ("a", "train", 2), ("a", "train", 4), ("a", "eval", 4)]
    assert told.warned == [
        "a is left out from now on: RuntimeError: no network",
        "a lacks the lines after step 2 up to step 3, which metrics.jsonl has",
    ]


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
