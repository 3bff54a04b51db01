"""What a run left behind, read into memory and checked."""

import dataclasses
import json
import os
import pathlib
from functools import cached_property

import numpy as np

from k3jax.metrics import read_metrics
from k3jax.report import catalog
from k3jax.report.fields import Field, FieldError, read_fields

SCALARS = frozenset(["loss", "bits_per_byte", "accuracy", "lr", "seconds", "tokens", "tokens_per_second", "mfu"])


class ReportError(ValueError):
    """The folder does not hold a run that can be reported; the message names the file."""


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened at a step. `details` is the rest of its line."""

    step: int
    name: str
    details: dict


@dataclasses.dataclass(frozen=True)
class Run:
    """The files of a run.

    Attributes:
      name: the folder's, with as much of its path as tells it from the other runs of a comparison.
      train, evals: numeric fields of the lines of these kinds in `metrics.jsonl` (schema in `k3jax.metrics`), by
        dotted name. `loss` is always among the former.
      other: the same for lines of any further kind, under `kind.name`.
      events: the lines of that kind, in order.
      clock: seconds of wall-clock time by what they went into, newest line.
      written: when the newest line was made, in seconds since 1970.
      config, summary, environment, evaluation: the JSON files of these names, or empty. Of the summary are shown:
        `bits_per_byte` and `held_out_bytes` of the final evaluation, `baselines` (as
        `k3jax.data.compression_baselines` returns), `parameters`, `active_parameters`, `seconds`, `goodput`.
      sample: `sample.txt` or empty.
    """

    folder: pathlib.Path
    name: str
    train: dict[str, Field]
    evals: dict[str, Field]
    other: dict[str, Field]
    events: list[Event]
    clock: dict[str, float]
    written: float
    config: dict
    summary: dict
    environment: dict
    evaluation: dict
    sample: str

    @property
    def step(self) -> int:
        """The newest training step that was logged."""
        return int(self.train["loss"].steps[-1])

    @property
    def steps(self) -> int | None:
        """Steps of the whole run."""
        return _integer(self.config.get("steps"))

    @cached_property
    def loss(self) -> float:
        """Nats per token: the mean of the last 3 % of the training lines, at least one."""
        values = self.train["loss"].values
        last = values[-max(1, len(values) * 3 // 100) :]
        return float(np.nanmean(last)) if np.isfinite(last).any() else float("nan")

    @property
    def bits_per_byte(self) -> float | None:
        """On held-out text: the final evaluation, or the newest one."""
        final = self.summary.get("bits_per_byte")
        return final if final is not None else last_value(self.evals.get("bits_per_byte"))

    @property
    def seconds(self) -> float | None:
        """Wall-clock time of the whole run, or until its newest training line."""
        whole = self.summary.get("seconds")
        return whole if whole is not None else last_value(self.train.get("seconds"))

    @property
    def tokens(self) -> float | None:
        """Tokens read until the newest training line."""
        logged = last_value(self.train.get("tokens"))
        size = [_integer(self.config.get(name)) for name in ("batch", "seq_len")]
        return logged if logged is not None or None in size else self.step * size[0] * size[1]

    @property
    def baselines(self) -> dict[str, dict[str, float]]:
        """Bits per byte of general compressors on the held-out files, by program."""
        return self.summary.get("baselines") or {}


def last_value(field: Field | None) -> float | None:
    """The newest number of a field that holds one per line."""
    if field is None or field.values.ndim > 1:
        return None
    known = field.values[np.isfinite(field.values)]
    return float(known[-1]) if len(known) else None


def read_runs(folders: list[str | os.PathLike]) -> list[Run]:
    """Reads the folders of runs; raises ReportError as described there, also for a folder given twice."""
    paths = [pathlib.Path(folder).resolve() for folder in folders]
    twice = [path for number, path in enumerate(paths) if path in paths[:number]]
    if twice:
        raise ReportError(f"the run {twice[0]} is given twice")
    return [read_run(folder, name) for folder, name in zip(folders, _names(paths))]


def read_run(folder: str | os.PathLike, name: str | None = None) -> Run:
    """Reads a run's folder; raises ReportError as described there."""
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise ReportError(f"there is no run folder {folder}")
    path = folder / "metrics.jsonl"
    lines = _read_lines(path)
    kinds = _by_kind(lines)
    train = kinds.pop("train", [])
    if not train:
        seen = sum(map(len, kinds.values()))
        raise ReportError(f"{path} holds no training step yet ({seen} lines)")
    for number, line in train:
        if "loss" not in line:
            raise ReportError(f"{path}, line {number}: the training line of step {line['step']} has no loss")
    evals, events = kinds.pop("eval", []), kinds.pop("event", [])
    try:
        fields = read_fields(train, scalars=SCALARS), read_fields(evals, scalars=SCALARS)
        other = {
            f"{kind}.{key}": field
            for kind, found in kinds.items()
            for key, field in _without_clock(read_fields(found)).items()
            if key not in catalog.COUNTERS
        }
    except FieldError as error:
        raise ReportError(f"{path}, {error}") from error
    sample = folder / "sample.txt"
    files = {kind: _read_object(folder / f"{kind}.json") for kind in ("config", "summary", "environment", "evaluation")}
    _check_summary(files["summary"], folder / "summary.json")
    return Run(
        folder=folder,
        name=name or folder.resolve().name,
        train=_with_shares(fields[0]),
        evals=_without_clock(fields[1]),
        other=other,
        events=[_event(line) for _, line in events],
        clock=_seconds(_newest(lines, "clock", dict)),
        written=_newest(lines, "unix", int, float) or path.stat().st_mtime,
        sample=sample.read_text(encoding="utf-8", errors="replace") if sample.exists() else "",
        **files,
    )


def _newest(lines: list[tuple[int, dict]], key: str, *types: type):
    """What the newest line that has it says."""
    return next((line[key] for _, line in reversed(lines) if type(line.get(key)) in types), None)


def _seconds(clock: dict | None) -> dict[str, float]:
    """Classes that took any time."""
    return {name: float(n) for name, n in (clock or {}).items() if type(n) in (int, float) and n > 0}


def _with_shares(train: dict[str, Field]) -> dict[str, Field]:
    """The fields with `clock_share.*` in place of `clock.*`; classes that never took any time are left out."""
    clock = {name.removeprefix("clock."): field for name, field in train.items() if name.startswith("clock.")}
    clock = {name: field for name, field in clock.items() if field.values.ndim == 1 and (field.values > 0).any()}
    if not clock or len({len(field.steps) for field in clock.values()}) > 1:
        return _without_clock(train)
    total = np.maximum(np.nansum([field.values for field in clock.values()], axis=0), 1e-9)
    shares = {f"clock_share.{name}": Field(field.steps, field.values / total) for name, field in clock.items()}
    return _without_clock(train) | shares


def _without_clock(fields: dict[str, Field]) -> dict[str, Field]:
    return {name: field for name, field in fields.items() if not name.startswith("clock.")}


def _read_lines(path: pathlib.Path) -> list[tuple[int, dict]]:
    """The lines and their numbers in the file."""
    try:
        return list(enumerate(read_metrics(path), start=1))
    except FileNotFoundError as error:
        raise ReportError(f"{path.parent} holds no {path.name}: not a run, or it has not started") from error
    except ValueError as error:
        raise ReportError(str(error)) from error


def _by_kind(lines: list[tuple[int, dict]]) -> dict[str, list[tuple[int, dict]]]:
    """Lines by kind. Where the training or evaluation lines go back to an earlier step, the older ones no longer
    count."""
    kinds: dict[str, list[tuple[int, dict]]] = {}
    for number, line in lines:
        kept = kinds.setdefault(str(line["kind"]), [])
        while kept and line["kind"] in ("train", "eval") and kept[-1][1]["step"] >= line["step"]:
            kept.pop()
        kept.append((number, line))
    return kinds


def _event(line: dict) -> Event:
    details = {key: value for key, value in line.items() if key not in ("step", "kind", "event", "unix", "clock")}
    return Event(line["step"], str(line.get("event", "event")), details)


def _names(paths: list[pathlib.Path]) -> list[str]:
    """The last parts of the paths, as many as make them different."""
    for count in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _read_object(path: pathlib.Path) -> dict:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ReportError(f"{path} must hold an object, but holds {type(content).__name__}")
    return content


def _check_summary(summary: dict, path: pathlib.Path) -> None:
    """Refuses a file whose numbers are none."""
    single = ("bits_per_byte", "held_out_bytes", "seconds", "goodput", "parameters", "active_parameters")
    numbers = {name: summary.get(name) for name in single}
    try:
        for program, sizes in (summary.get("baselines") or {}).items():
            numbers |= {f"baselines.{program}.{size}": sizes[size] + 0.0 for size in ("whole", "per_file")}
    except (TypeError, KeyError, AttributeError) as error:
        raise ReportError(f"{path} is not what k3jax.train writes: baselines: {error!r}") from error
    for name, value in numbers.items():
        if type(value) not in (int, float, type(None)):
            raise ReportError(f"{path} is not what k3jax.train writes: {name} is {value!r}")


def _integer(value) -> int | None:
    return value if type(value) is int else None
