"""What a run left behind, read into memory."""

import dataclasses
import json
import os
import pathlib

import numpy as np

from k3jax.metrics import read_metrics


class ReportError(ValueError):
    """The folder does not hold a run that can be reported; the message names the file."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The files of a run.

    Attributes:
      train, evals: lines of `metrics.jsonl` by kind, in order (schema in `k3jax.metrics`).
      config: `config.json`, nested.
      summary: `summary.json` or empty. Shown when present: `bits_per_byte` and `held_out_bytes` of the final
        evaluation, `baselines` (as `k3jax.data.compression_baselines` returns), `parameters`, `active_parameters`,
        `seconds`.
      environment: `environment.json` or empty, flat.
      sample: `sample.txt` or empty.
    """

    folder: pathlib.Path
    train: list[dict]
    evals: list[dict]
    config: dict
    summary: dict
    environment: dict
    sample: str

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def finished(self) -> bool:
        return bool(self.summary)

    @property
    def bits_per_byte(self) -> float | None:
        """On held-out text: the final evaluation, or the newest one."""
        return self.summary.get("bits_per_byte") or (self.evals[-1]["bits_per_byte"] if self.evals else None)

    @property
    def seconds(self) -> float | None:
        """Wall-clock time of the whole run, or until its newest training line."""
        return self.summary.get("seconds") or self.train[-1].get("seconds")

    @property
    def baselines(self) -> dict[str, dict[str, float]]:
        """Bits per byte of general compressors on the held-out files, by program."""
        return self.summary.get("baselines", {})

    def series(self, field: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a field of the training lines, where it is a number; null is NaN."""
        lines = [line for line in self.train if field in line and not isinstance(line[field], (dict, list))]
        return _array([line["step"] for line in lines]), _array([line[field] for line in lines])

    def by_role(self, field: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Steps, and one series for each key of a field that holds numbers by name."""
        lines = [line for line in self.train if isinstance(line.get(field), dict)]
        names = {name: None for line in lines for name in line[field]}
        return _array([line["step"] for line in lines]), {
            name: _array([line[field].get(name) for line in lines]) for name in names
        }

    def by_layer(self, field: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps, and [layers, steps] of a field of `balance`; empty when the model has no MoE layer."""
        lines = [line for line in self.train if line.get("balance", {}).get(field)]
        values = [_array(line["balance"][field]) for line in lines]
        return _array([line["step"] for line in lines]), np.stack(values, axis=1) if values else np.zeros((0, 0))


def read_run(folder: str | os.PathLike) -> Run:
    """Reads a run's folder; raises ReportError as described there."""
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise ReportError(f"there is no run folder {folder}")
    try:
        lines = read_metrics(folder / "metrics.jsonl")
    except FileNotFoundError as error:
        raise ReportError(f"{folder} holds no metrics.jsonl: not a run folder, or the run has not started") from error
    except ValueError as error:
        raise ReportError(str(error)) from error
    train = [line for line in lines if line["kind"] == "train"]
    if not train:
        raise ReportError(f"{folder / 'metrics.jsonl'} holds no training step yet ({len(lines)} lines)")
    for line in train:
        if "loss" not in line:
            raise ReportError(f"{folder / 'metrics.jsonl'}: the training line of step {line['step']} has no loss")
    sample = folder / "sample.txt"
    return Run(
        folder=folder,
        train=train,
        evals=[line for line in lines if line["kind"] == "eval" and line.get("bits_per_byte") is not None],
        config=_read_object(folder / "config.json", needed=True),
        summary=_read_object(folder / "summary.json"),
        environment=_read_object(folder / "environment.json"),
        sample=sample.read_text(encoding="utf-8", errors="replace") if sample.exists() else "",
    )


def _read_object(path: pathlib.Path, *, needed: bool = False) -> dict:
    if not path.exists():
        if needed:
            raise ReportError(f"{path.parent} holds no {path.name}: not a run folder, or the run has not started")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ReportError(f"{path} must hold an object, but holds {type(content).__name__}")
    return content


def _array(values) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], np.float64)
