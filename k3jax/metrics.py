"""Metrics as JSON lines: one object per line in `metrics.jsonl`, appended as the run goes.

Every line has "step" (int, the last step it includes), "kind", "unix" (seconds since 1970 when it was made) and "clock"
(seconds of wall time of the whole run so far by class, restarts included: `k3jax.telemetry.clock`). All other fields
may be left out, except the loss of a `train` line. Numbers that are not finite are written as null.

`train`, at most one a step:

    loss                  nats per predicted token
    bits_per_token        the same in bits
    bits_per_byte         the same over the mean bytes per token of the training text; EOS is charged, and has no byte
    accuracy              share of the tokens predicted with the largest logit
    lr, grad_norm         base learning rate; norm of the whole gradient before clipping
    grad_norm_by_role     {role: norm}, before clipping
    param_norm_by_role    {role: norm}, after the step
    update_rms            {role: RMS of what the step added}
    tokens_per_second     over the steps since the line before, evaluations and checkpoints left out
    mfu                   model FLOP utilization over the same steps (`k3jax.telemetry.line`)
    step_seconds          {"data", "device", "host"}: mean seconds of those steps that the loop waited for data, waited
                          for the device, and did other things; they add up to a step
    goodput               share of "clock" in useful steps
    memory                {"bytes", "peak_bytes", "limit_bytes", "of": "device" or "process"}
    seconds               of wall time since the first start of the run, without pauses that somebody wanted
    balance               {"max_over_mean", "dead_share", "margin", "bias_drift"}: [one per MoE layer]
    max_attention_logit   [one per MLA layer]
    kda                   {"log_decay_mean", "log_decay_min", "log_decay_max", "state_norm"}: [one per KDA layer]
    depth_weights         {"mixer", "ffn"}: [one per layer] of [one per source], the running sum last

`eval`:

    bits_per_byte, bytes  on held-out text, and how many bytes that was; other fields as the evaluation has them

`event`, what the run did or decided:

    event                 "start", "resume", "skipped", "saved" (a checkpoint of this step), "stopped" (with a reason,
                          "done" at the end) and the like; other fields as it has them
"""

import errno
import itertools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from absl import logging

from k3jax.run_folder import naming

KINDS = ("train", "eval", "event")


class MetricsWriter:
    """Appends lines to a file. Each line reaches the operating system in one write, so a killed process leaves at most
    one cut line, at the end.

    With `resume_step`, what the resumed run makes again is removed first (:func:`lines_to_keep`), and so is a cut last
    line, so that it leaves the lines that an uninterrupted run would have left. Other damaged lines go too, with a
    warning that names them; the file as it was is then kept beside it, as `metrics.jsonl.damaged.N`. Without
    `resume_step`, an existing file is an error.
    """

    def __init__(self, path: str | os.PathLike, *, resume_step: int | None = None):
        self._path = pathlib.Path(path)
        if resume_step is not None and self._path.exists():
            _prepare(self._path, resume_step)
        elif self._path.exists():
            raise FileExistsError(f"{self._path} exists already; resume the run or choose another folder")
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, line: dict) -> None:
        """Appends one line; JAX and NumPy scalars and arrays become numbers and lists.

        Raises ValueError for a line without an integer `step` and a `kind`, which readers rely on; OSError, which names
        the file, where the disk is full.
        """
        if not isinstance(line.get("step"), int) or line.get("kind") not in KINDS:
            raise ValueError(f"a metrics line needs an integer step and kind train, eval or event, got {line}")
        data = _encode(line).encode()
        with naming(self._path):
            written = os.write(self._descriptor, data)
        if written != len(data):
            raise OSError(errno.ENOSPC, "no space left for a whole metrics line", str(self._path))

    def close(self) -> None:
        """Puts the lines on the disk and closes the file; closing twice is harmless."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with naming(self._path):
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """All complete lines. A last line cut by a crash is left out.

    Raises FileNotFoundError when there is no file, ValueError naming the line when one before the last is damaged.
    """
    return list(iterate_metrics(path))


def iterate_metrics(path: str | os.PathLike, *, damaged: list[int] | None = None) -> Iterator[dict]:
    """The lines of :func:`read_metrics` one by one, for files larger than memory. Given a list ``damaged``, appends the
    numbers of damaged lines to it and goes on, rather than raising."""
    with open(path, "rb") as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
                if not isinstance(line, dict) or not isinstance(line.get("step"), int) or "kind" not in line:
                    raise ValueError("not an object with step and kind")
            except ValueError as error:
                if not text.endswith(b"\n"):
                    return
                if damaged is None:
                    raise ValueError(f"{path}, line {number} is damaged: {error}") from error
                damaged.append(number)
                continue
            yield line


def lines_to_keep(lines: Iterable[dict], step: int) -> Iterator[dict]:
    """The lines that still hold when a run goes on after ``step``: those up to the event "saved" of that step, and of
    the same step after it all but what ending the run there added: evaluations, and "stopped" as "done"."""
    saved = False
    for line in lines:
        if line["step"] > step:
            continue
        ended = line["kind"] == "eval" or (line.get("event") == "stopped" and line.get("reason") == "done")
        if line["step"] == step and saved and ended:
            continue
        saved |= line["step"] == step and line.get("event") == "saved"
        yield line


def plain(value: Any) -> Any:
    """Python numbers, strings, lists and dicts, with null for what is not finite; of float32 arrays seven digits."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    array = np.asarray(value)
    if array.ndim and array.dtype == np.float32:
        return _digits(array.tolist())
    return plain(array.tolist())


def _digits(value: Any) -> Any:
    """Nested lists of float32 numbers with the digits that they have, and no more."""
    if isinstance(value, list):
        return [_digits(item) for item in value]
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _encode(line: dict) -> str:
    return json.dumps(plain(line), separators=(",", ":"), allow_nan=False) + "\n"


def _prepare(path: pathlib.Path, step: int) -> None:
    """Rewrites the file for a run that goes on after ``step``, beside the old one, then renames: a crash leaves one of
    the two."""
    fresh, damaged = path.with_name(path.name + ".new"), []
    with naming(path), open(fresh, "w", encoding="utf-8") as file:
        file.writelines(_encode(line) for line in lines_to_keep(iterate_metrics(path, damaged=damaged), step))
        file.flush()
        os.fsync(file.fileno())
    if damaged:
        taken = (path.with_name(f"{path.name}.damaged.{number}") for number in itertools.count(1))
        copy = next(name for name in taken if not name.exists())
        with naming(copy):
            shutil.copyfile(path, copy)
        named = ", ".join(map(str, damaged[:10])) + (", ..." if len(damaged) > 10 else "")
        logging.warning("%s: damaged and left out: line %s; the file as it was is %s", path, named, copy)
    os.replace(fresh, path)
