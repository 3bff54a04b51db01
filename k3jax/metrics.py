"""Metrics as JSON lines: one object per line in `metrics.jsonl`, appended as the run goes.

Two kinds of line. Every `train` field but `step`, `kind`, `loss` and `seconds` may be left out:

    {"step": int, "kind": "train", "loss": nats per token, "bits_per_byte": float, "grad_norm": float,
     "update_rms": {role: float}, "lr": float, "tokens_per_second": float,
     "balance": {"max_over_mean": [one per MoE layer], "dead_share": [one per MoE layer]},
     "seconds": wall-clock seconds since the start}
    {"step": int, "kind": "eval", "bits_per_byte": float, "bytes": int}

Numbers that are not finite are written as null, because JSON has no other word for them.
"""

import errno
import json
import math
import os
import pathlib

import numpy as np


class MetricsWriter:
    """Appends lines to a file. Each line reaches the operating system in one write, so a killed process leaves at most
    one cut line, at the end.

    With `resume_step`, lines of later steps and a cut last line are removed first, so that a resumed run leaves the
    file that an uninterrupted one would have left. Without it, an existing file is an error.
    """

    def __init__(self, path: str | os.PathLike, *, resume_step: int | None = None):
        self._path = pathlib.Path(path)
        if resume_step is not None and self._path.exists():
            kept = [line for line in read_metrics(self._path) if line["step"] <= resume_step]
            _replace(self._path, "".join(_encode(line) for line in kept))
        elif self._path.exists():
            raise FileExistsError(f"{self._path} exists already; resume the run or choose another folder")
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, line: dict) -> None:
        """Appends one line; JAX and NumPy scalars and arrays become numbers and lists.

        Raises ValueError for a line without an integer `step` and a `kind`, which readers rely on.
        """
        if not isinstance(line.get("step"), int) or line.get("kind") not in ("train", "eval"):
            raise ValueError(f"a metrics line needs an integer step and kind 'train' or 'eval', got {line}")
        data = _encode(line).encode()
        if os.write(self._descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, "no space left for a whole metrics line", str(self._path))

    def close(self) -> None:
        """Puts the lines on the disk and closes the file; closing twice is harmless."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """All complete lines. A last line cut by a crash is left out.

    Raises FileNotFoundError when there is no file, ValueError naming the line when one before the last is damaged.
    """
    lines = pathlib.Path(path).read_bytes().split(b"\n")
    found = []
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or not isinstance(line.get("step"), int) or "kind" not in line:
                raise ValueError("not an object with step and kind")
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number} is damaged: {error}") from error
        found.append(line)
    return found


def _encode(line: dict) -> str:
    return json.dumps(_plain(line), separators=(",", ":"), allow_nan=False) + "\n"


def _plain(value):
    """Python numbers, strings, lists and dicts, with null for what is not finite."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return _plain(np.asarray(value).tolist())


def _replace(path: pathlib.Path, text: str) -> None:
    """Writes the whole file beside the old one, then renames, so that a crash leaves one of the two."""
    fresh = path.with_name(path.name + ".new")
    with open(fresh, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
