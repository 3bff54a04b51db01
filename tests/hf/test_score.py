"""``k3jax.score``: the command on a golden, the loss over blocks, and ids that are refused."""

import os
import subprocess
import sys

import numpy as np
import pytest

from k3jax import score
from k3jax.hf import load_hf
from k3jax.model.weights import Weights


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "k3jax.score", *args], capture_output=True, text=True, check=False, env=os.environ
    )


def test_the_command_writes_logits_and_prints_the_loss(goldens, tmp_path):
    folder = goldens / "kimi_linear_tiny"
    expected = np.load(folder / "expected.npz")
    np.save(tmp_path / "ids.npy", expected["input_ids"])
    done = run("--hf", str(folder), "--ids", str(tmp_path / "ids.npy"), "--out", str(tmp_path / "logits.npy"))
    assert done.returncode == 0, done.stderr
    logits = np.load(tmp_path / "logits.npy")
    assert logits.dtype == np.float32
    assert np.abs(logits - expected["logits"]).max() <= 2e-4
    assert abs(float(done.stdout.split()[1]) - expected["loss"]) <= 1e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.npy", "logits.npy"]


def test_the_command_refuses_in_one_line(tmp_path):
    np.save(tmp_path / "ids.npy", np.zeros((1, 2), np.int32))
    done = run("--hf", str(tmp_path), "--ids", str(tmp_path / "ids.npy"))
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == f"k3jax.score: {tmp_path / 'config.json'} is missing or not a file"
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def linear(goldens):
    model, params, router = load_hf(goldens / "kimi_linear_tiny")
    return model, Weights(params, router)


def test_blocks_change_nothing(goldens, linear, monkeypatch):
    expected = np.load(goldens / "kimi_linear_tiny" / "expected.npz")
    ids = expected["input_ids"]
    monkeypatch.setattr(score, "BLOCK", 16)
    out = np.empty((*ids.shape, 256), np.float32)
    assert abs(score.score(*linear, ids, out) - expected["loss"]) <= 1e-5
    assert np.abs(out - expected["logits"]).max() <= 2e-4


def test_one_token_has_no_loss(linear, monkeypatch):
    monkeypatch.setattr(score, "_hidden", lambda model, weights_, ids_BT: np.ones((*ids_BT.shape, 64), np.float32))
    out = np.empty((1, 1, 256), np.float32)
    assert score.score(*linear, np.array([[7]]), out) is None
    assert np.isfinite(out).all()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros((2, 3)), r"integers \[B, T\], at least one, but are float64 \[2, 3\]"),
        (np.zeros(3, np.int32), r"but are int32 \[3\]"),
        (np.zeros((0, 3), np.int32), r"but are int32 \[0, 3\]"),
        (np.array([[0, 256]]), "ids go from 0 to 256, but the vocabulary is 0 to 255"),
        (np.array([[-1, 3]]), "ids go from -1 to 3"),
    ],
)
def test_ids_that_are_refused(linear, ids, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        score.score(*linear, ids)
    with pytest.raises(ValueError, match=message):
        score.score_to_file(*linear, ids, tmp_path / "out.npy")
    assert not list(tmp_path.iterdir())
