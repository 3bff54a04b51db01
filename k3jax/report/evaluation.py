"""The charts of `evaluation.json`, as `k3jax.evaluate` writes it: accuracy on tasks by length, depth and distance."""

import math

import numpy as np

from k3jax.report.charts import MAX_MAPS, Card, Curves, Heat, Line
from k3jax.report.run import ReportError, Run

FIELDS = {"accuracy": "answers", "exact": "whole examples"}


def task_cards(runs: list[Run]) -> list[Card]:
    """A card for every task of the runs' evaluations; raises ReportError for a file of another form."""
    tasks: dict[str, list[tuple[int, Run, dict]]] = {}
    for number, run in enumerate(runs):
        for task in _tasks(run):
            tasks.setdefault(task["task"], []).append((number, run, task))
    return [_card(name, found, several=len(runs) > 1) for name, found in tasks.items()]


def source_rows(runs: list[Run]) -> list[tuple[str, list[float | None]]]:
    """Held-out bits per byte of every source, a value per run; raises ReportError for a file of another form."""
    names = {name: None for run in runs for name in _object(run, "sources")}
    rows = [(name, [_object(run, "sources").get(name, {}).get("bits_per_byte") for run in runs]) for name in names]
    for name, values in rows:
        for run, value in zip(runs, values):
            if type(value) not in (int, float, type(None)):
                raise _refusal(run, f"bits_per_byte of {name} is {value!r}")
    return rows


def _object(run: Run, name: str) -> dict[str, dict]:
    found = run.evaluation.get(name, {})
    if not isinstance(found, dict) or not all(isinstance(item, dict) for item in found.values()):
        raise _refusal(run, f"{name} must hold an object for each of them")
    return found


def _tasks(run: Run) -> list[dict]:
    """The tasks of a run, with every number that is shown checked."""
    tasks = run.evaluation.get("tasks", [])
    if type(run.evaluation.get("step", 0)) is not int:
        raise _refusal(run, f"step is {run.evaluation['step']!r}")
    try:
        for task in tasks:
            name, cells, distances = task["task"], task["cells"], task.get("distances", [])
            numbers = [cell[key] for cell in cells for key in ("length", *FIELDS)]
            numbers += [item[key] for item in distances for key in ("from", "accuracy")]
            numbers += [cell.get(key) for cell in cells for key in ("depth", "pairs")] + [task.get("chance")]
            strange = [number for number in numbers if number is not None and type(number) not in (int, float)]
            strange += [cell["length"] for cell in cells if not cell["length"] or cell["length"] < 0]
            if strange or not cells or not isinstance(name, str):
                raise _refusal(run, f"task {name!r} holds {strange[0] if strange else cells!r} where a number belongs")
    except (KeyError, TypeError, AttributeError) as error:
        raise _refusal(run, f"a task lacks {error}" if isinstance(error, KeyError) else str(error)) from error
    return tasks


def _refusal(run: Run, problem: str) -> ReportError:
    return ReportError(f"{run.folder / 'evaluation.json'} is not what k3jax.evaluate writes: {problem}")


def _card(name: str, found: list[tuple[int, Run, dict]], *, several: bool) -> Card:
    charts: list[Curves | Heat] = []
    if any("depth" in cell for _, _, task in found for cell in task["cells"]):
        charts += [_grid(run, task, several=several) for _, run, task in found[:MAX_MAPS]]
    else:
        charts.append(_by_length(found, several=several))
    if any(task.get("distances") for _, _, task in found):
        charts.append(_by_distance(found, several=several))
    steps = sorted({run.evaluation.get("step", 0) for _, run, _ in found})
    note = f"Accuracy on new examples at step {', '.join(f'{step:,}' for step in steps)}."
    note += " Of needles, the share found whole." if isinstance(charts[0], Heat) else ""
    return Card("evaluation", name, note, charts, wide=several and len(charts) > 2)


def _by_length(found: list[tuple[int, Run, dict]], *, several: bool) -> Curves:
    """Accuracy by length; where examples of one length come with several numbers of pairs, a curve for each."""
    lines: list[Line] = []
    for _, run, task in found:
        cells = sorted(task["cells"], key=lambda cell: cell["length"])
        repeated = len({cell["length"] for cell in cells}) < len(cells)
        for pairs in sorted({cell.get("pairs") or 0 for cell in cells}) if repeated else [None]:
            chosen = [cell for cell in cells if pairs is None or (cell.get("pairs") or 0) == pairs]
            for field, words in FIELDS.items():
                if field == "accuracy" or not (several or repeated):
                    label = (run.name if several else words) + ("" if pairs is None else f", {pairs} pairs")
                    x, y = [cell["length"] for cell in chosen], [cell[field] for cell in chosen]
                    lines.append(_line(label, x, y, len(lines)))
    chance = found[0][2].get("chance")
    return _accuracy("by length", lines, {} if chance is None else {"chance": chance}, "tokens")


def _by_distance(found: list[tuple[int, Run, dict]], *, several: bool) -> Curves:
    lines = [
        _line(
            run.name if several else "answers",
            [item["from"] for item in task.get("distances", [])],
            [item["accuracy"] for item in task.get("distances", [])],
            number,
        )
        for number, run, task in found
    ]
    return _accuracy("by distance to the answer", lines, {}, "tokens back, at least")


def _line(name: str, x: list[float], y: list[float | None], color: int) -> Line:
    values = np.array([np.nan if value is None else value for value in y], np.float64)
    return Line(name, np.log2(np.maximum(np.array(x, np.float64), 1)), values, color, dots=True)


def _accuracy(title: str, lines: list[Line], levels: dict[str, float], x_name: str) -> Curves:
    places = sorted({float(x) for line in lines for x in line.x})
    names = [(place, f"{2**place:,.0f}") for place in places]
    margin = 0.04 * (places[-1] - places[0]) or 0.5
    span = (places[0] - margin, places[-1] + margin)
    return Curves(title, lines, span, 0.0, 1.04, unit="%", levels=levels, x_ticks=names, x_name=x_name)


def _grid(run: Run, task: dict, *, several: bool) -> Heat:
    cells = [cell for cell in task["cells"] if cell.get("depth") is not None]
    lengths, depths = sorted({cell["length"] for cell in cells}), sorted({cell["depth"] for cell in cells})
    grid = np.full((len(depths), len(lengths)), math.nan)
    for cell in cells:
        if cell["exact"] is not None:
            grid[depths.index(cell["depth"]), lengths.index(cell["length"])] = cell["exact"]
    return Heat(
        run.name if several else "by depth and length",
        grid,
        [f"{depth:g}" for depth in depths],
        "depth",
        (0, 1),
        0.0,
        1.0,
        unit="%",
        colors="good",
        columns=[f"{length:,}" for length in lengths],
        column_name="tokens",
    )
