"""The metrics file survives cut lines, resumes without duplicates, and refuses what readers could not use."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging

from k3jax.metrics import MetricsWriter, read_metrics
from k3jax.run_folder import write_text


def _train(step, **more):
    return {"step": step, "kind": "train", "loss": 1.0 / (step + 1), "seconds": float(step), **more}


def test_lines_round_trip_with_arrays_and_numbers_that_are_not_finite(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(_train(0, grad_norm=float("nan"), lr=np.float32(0.5), tokens_per_second=jnp.float32(7)))
        writer.write(_train(1, balance={"max_over_mean": jnp.ones(3), "dead_share": np.array([0.0, np.inf])}))
        writer.write({"step": 1, "kind": "eval", "bits_per_byte": 2.25, "bytes": 10})
        assert len(path.read_bytes().splitlines()) == 3, "on disk before the file is closed"
    first, second, third = read_metrics(path)
    assert first["grad_norm"] is None and first["lr"] == 0.5 and first["tokens_per_second"] == 7.0
    assert second["balance"] == {"max_over_mean": [1.0, 1.0, 1.0], "dead_share": [0.0, None]}
    assert third == {"step": 1, "kind": "eval", "bits_per_byte": 2.25, "bytes": 10}
    assert "NaN" not in path.read_text()


def test_every_cut_of_the_last_line_is_tolerated_and_no_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(3):
            writer.write(_train(step))
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for cut in range(start, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert [line["step"] for line in read_metrics(path)] == [0, 1]
    path.write_bytes(whole[: start - 5] + b"\n" + whole[start:])
    with pytest.raises(ValueError, match="line 2 is damaged"):
        read_metrics(path)
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path / "absent.jsonl")


def test_resume_drops_later_steps_and_the_cut_line(tmp_path):
    path, straight = tmp_path / "metrics.jsonl", tmp_path / "straight.jsonl"
    with MetricsWriter(straight) as writer:
        for step in range(6):
            writer.write(_train(step))
    with MetricsWriter(path) as writer:
        for step in range(4):
            writer.write(_train(step))
    with open(path, "ab") as file:
        file.write(b'{"step":4,"ki')
    with MetricsWriter(path, resume_step=2) as writer:
        for step in range(3, 6):
            writer.write(_train(step))
    assert path.read_bytes() == straight.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "straight.jsonl"]


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys; from k3jax.metrics import MetricsWriter; w = MetricsWriter(sys.argv[1]); n = 0\n"
        "while True:\n  w.write({'step': n, 'kind': 'train', 'loss': 1.0, 'seconds': 0.0}); n += 1\n"
        "  if n == 100: print('go', flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    steps = [line["step"] for line in read_metrics(path)]
    assert len(steps) >= 100 and steps == list(range(len(steps)))


def test_bad_use_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        with pytest.raises(ValueError, match="needs an integer step"):
            writer.write({"kind": "train"})
        with pytest.raises(ValueError, match=r"kind train, eval or event, got .*trian"):
            writer.write({"step": 1, "kind": "trian"})
    with pytest.raises(FileExistsError, match="resume the run or choose another folder"):
        MetricsWriter(path)
    path.write_text(json.dumps([1, 2]) + "\n{}\n")
    with pytest.raises(ValueError, match="line 1 is damaged: not an object with step and kind"):
        read_metrics(path)


def test_a_full_disk_names_the_file(tmp_path):
    """A limit on the size of a file stands for the disk where no device that is always full can."""
    path, limits = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsWriter(path) as writer:
        writer.write(_train(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
        try:
            for code in (errno.ENOSPC, errno.EFBIG):  # part of a line, then nothing of one
                with pytest.raises(OSError, match=str(path)) as caught:
                    writer.write(_train(2))
                assert caught.value.errno == code and caught.value.filename == str(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [line["step"] for line in read_metrics(path)] == [1]
    summary = tmp_path / "summary.json"
    summary.write_text("old")
    (tmp_path / "summary.json.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*summary\.json'"):
        write_text(summary, "{}")
    assert summary.read_text() == "old"


def test_damaged_lines_are_named_and_kept_aside_on_resume(tmp_path, monkeypatch):
    path, warned = tmp_path / "metrics.jsonl", []
    monkeypatch.setattr(logging, "warning", lambda text, *values: warned.append(text % values))
    with MetricsWriter(path) as writer:
        for step in range(1, 7):
            writer.write(_train(step))
    lines = path.read_bytes().splitlines(keepends=True)
    for spoilt in (b"\0" * 9 + b"\n", lines[3][:20] + b"\n"):
        path.write_bytes(b"".join([*lines[:3], spoilt, *lines[4:]]))
        before = path.read_bytes()
        with pytest.raises(ValueError, match="line 4 is damaged"):
            read_metrics(path)
        with MetricsWriter(path, resume_step=5):
            pass
        assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 5]
        copy = tmp_path / f"metrics.jsonl.damaged.{len(warned)}"
        assert copy.read_bytes() == before
        assert warned[-1] == f"{path}: damaged and left out: line 4; the file as it was is {copy}"
    with MetricsWriter(path, resume_step=5):
        pass
    assert len(warned) == 2, "negative control: a whole file is no reason to warn"


def test_a_run_killed_at_its_end_does_not_end_twice(tmp_path):
    """What the end of a run added after its last checkpoint is made again; what happened before stays."""
    path = tmp_path / "metrics.jsonl"

    def event(name, **more):
        return {"step": 4, "kind": "event", "event": name, **more}

    periodic, final = ({"step": 4, "kind": "eval", "bits_per_byte": bits} for bits in (2.0, 1.0))
    history = [_train(3), _train(4), periodic, event("saved"), event("stopped", reason="preempted"), event("resume")]
    ending = [final, event("stopped", reason="done")]
    with MetricsWriter(path) as writer:
        for line in [*history, *ending]:
            writer.write(line)
    for _ in range(2):
        with MetricsWriter(path, resume_step=4) as writer:
            for line in ending:
                writer.write(line)
        assert read_metrics(path) == [*history, *ending]
    with MetricsWriter(path, resume_step=3):
        pass
    assert read_metrics(path) == history[:1]
