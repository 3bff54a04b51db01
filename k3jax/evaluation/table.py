"""An evaluation as text."""

from typing import Any


def table(record: dict[str, Any]) -> str:
    """The results of ``evaluation.json`` as aligned columns: a line per source, then a line per cell of each task."""
    lines = [f"step {record['step']}"]
    for name, found in record["sources"].items():
        lines.append(f"{name:24s} {found['bits_per_byte']:.4f} bits per byte of {found['bytes']:,} bytes")
    for task in record["tasks"]:
        lines += ["", f"{task['task']} ({task['examples']} examples each, chance {task['chance']:.4f})"]
        varied = [name for name in ("length", "pairs", "depth") if name in task["cells"][0]]
        lines.append("".join(f"{name:>9s}" for name in (*varied, "answers", "accuracy", "stderr", "exact", "nats")))
        lines += [_line(cell, varied) for cell in task["cells"]]
    return "\n".join(lines)


def _line(cell: dict[str, Any], varied: list[str]) -> str:
    fields = [f"{cell[name]:9g}" for name in (*varied, "answers")]
    numbers = [cell[name] for name in ("accuracy", "stderr", "exact", "nats")]
    return "".join(fields + ["        -" if number is None else f"{number:9.4f}" for number in numbers])
