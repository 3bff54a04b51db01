"""What sets the configurations of several runs apart."""

import pathlib

from k3jax import config_io
from k3jax.config import ConfigError
from k3jax.report.run import Run

MISSING = "–"


def differences(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """Rows of (dotted field, one value per run) where a run differs from the first; runs without a configuration show
    dashes. Configurations that this version cannot read are compared value by value."""
    known = [run for run in runs if run.config]
    if len(known) < 2:
        return []
    try:
        rows = _typed(known)
    except ConfigError:
        rows = _untyped(known)
    places = {run.name: i for i, run in enumerate(known)}
    return [
        (name, [_text(values[places[run.name]]) if run.name in places else MISSING for run in runs])
        for name, values in rows
    ]


def flatten(value, path: str = "") -> list[tuple[str, str]]:
    """Dotted path and text of every leaf."""
    if isinstance(value, dict) and value:
        return [row for key, item in value.items() for row in flatten(item, f"{path}.{key}" if path else str(key))]
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        return [row for number, item in enumerate(value) for row in flatten(item, f"{path}[{number}]")]
    return [(path, _text(value))]


def _typed(runs: list[Run]) -> list[tuple[str, list]]:
    """As :func:`k3jax.config_io.diff` sees them: a field whose class changes is one row."""
    from k3jax.run_config import TrainConfig  # brings JAX, which the report of a single run does without

    paths = [pathlib.Path(run.folder) / "config.json" for run in runs]
    first, *others = [config_io.load_json(TrainConfig, path) for path in paths]
    changed = [config_io.diff(first, other) for other in others]
    names = {name: None for changes in changed for name in changes}
    rows = []
    for name in names:
        old = next(changes[name][0] for changes in changed if name in changes)
        rows.append((name, [old, *(changes[name][1] if name in changes else old for changes in changed)]))
    return rows


def _untyped(runs: list[Run]) -> list[tuple[str, list]]:
    tables = [dict(flatten(run.config)) for run in runs]
    names = {name: None for table in tables for name in table}
    rows = [(name, [table.get(name, MISSING) for table in tables]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _text(value) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value)
