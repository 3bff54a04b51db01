"""The command ``k3jax.generate``: what it writes, and requests that it refuses before any work."""

import subprocess
import sys

import numpy as np
import pytest

from k3jax.token_file import read_ids


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "k3jax.generate", *args], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--checkpoint", "x", "--prompt", "a", "--ids", "y"], "--ids and --out go with --hf"),
        (["--hf", "x", "--ids", "y", "--prompt", "a"], "--prompt goes with --checkpoint"),
        (["--checkpoint", "/nonexistent", "--prompt", "a"], "is not the folder of a run"),
    ],
)
def test_requests_that_are_refused(args, expected):
    done = run(*args)
    assert done.returncode == 1
    assert expected in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_ids_go_to_the_file_that_is_named(goldens, tmp_path):
    folder = goldens / "kimi_linear_tiny"
    np.save(tmp_path / "ids.npy", np.arange(10).reshape(2, 5))
    common = ["--hf", str(folder), "--ids", str(tmp_path / "ids.npy"), "--greedy", "--max-new", "1", "--out"]
    done = run(*common, str(tmp_path / "new"))
    assert done.returncode == 0, done.stderr
    assert read_ids(tmp_path / "new").shape == (2, 1)
    assert "there cannot be a file of this name" in run(*common, str(tmp_path)).stderr


def test_what_is_no_npy_file_is_named(tmp_path):
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(6))
    whole = path.read_bytes()
    np.testing.assert_array_equal(read_ids(path), np.arange(6))
    np.savez(tmp_path / "several.npz", a=np.arange(3))
    objects = tmp_path / "objects.npy"
    np.save(objects, np.array([{}], object))
    for content in (
        b"",
        b"text",
        whole[:-8],
        whole[:40],
        (tmp_path / "several.npz").read_bytes(),
        objects.read_bytes(),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"ids\.npy is not a \.npy file of token ids"):
            read_ids(path)
