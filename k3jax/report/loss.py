"""The loss of training batches and of held-out text, against general compressors."""

import numpy as np

from k3jax.report import catalog
from k3jax.report.axis import Axis
from k3jax.report.buckets import smooth
from k3jax.report.charts import Card, Line, curves, line
from k3jax.report.run import Run, last_value

HELD_OUT = "bits_per_byte"


def loss_card(runs: list[Run], axis: Axis) -> Card:
    """Training batches as a strong running mean over pale points, held-out text as dots."""
    bits = in_bits(runs)
    lines = [part for i, run in enumerate(runs) for part in _lines(run, axis, i, bits=bits, several=len(runs) > 1)]
    levels = {}
    for run in reversed(runs):
        levels |= {name: sizes["whole"] for name, sizes in run.baselines.items() if bits}
    chart = curves("", lines, axis.span, scale="log", levels=levels)
    note = "Lower is better. The strong line is a running mean of the pale one, the training batches."
    note += " Dots: held-out text." if bits and any(HELD_OUT in run.evals for run in runs) else ""
    note += " Dashed: what a general compressor needs for all held-out files as one." if levels else ""
    return Card("loss", f"Loss, {'bits per byte' if bits else 'nats per token'}", note, [chart], wide=True)


def in_bits(runs: list[Run]) -> bool:
    """Whether the training lines say how many bytes their tokens stand for."""
    return any(last_value(run.train.get("bits_per_byte")) is not None for run in runs)


def held_out_cards(runs: list[Run], axis: Axis) -> list[Card]:
    """What the evaluation lines hold and the loss chart does not show, and lines of kinds that are not known here."""
    groups: dict[str, tuple[catalog.Spec, dict[str, str]]] = {}
    for run in runs:
        for table, section in ((run.evals, "evaluation"), (run.other, "further")):
            for name, field in table.items():
                shown = name == HELD_OUT and not in_bits(runs)
                if (name in catalog.HIDDEN and not shown) or field.values.ndim > 1:
                    continue
                group, member = catalog.split(name, scalar=True)
                groups.setdefault(group, (catalog.Spec(section, catalog.words(group)), {}))[1][name] = member
    return [_held_out_card(spec, names, runs, axis) for spec, names in groups.values()]


def _lines(run: Run, axis: Axis, number: int, *, bits: bool, several: bool) -> list[Line]:
    field = run.train["bits_per_byte" if bits and "bits_per_byte" in run.train else "loss"]
    values = np.full_like(field.values, np.nan) if bits and field is run.train["loss"] else field.values
    pale = line("", axis.places(run, field.steps), values, axis, number, faint=True)
    name = run.name if several else "training batches"
    made = [pale, Line(name, pale.x, smooth(pale.y), number)]
    if bits and HELD_OUT in run.evals:
        name = f"{run.name}, held-out" if several else "held-out text"
        dots = run.evals[HELD_OUT]
        color = number if several else 1
        made.append(line(name, axis.places(run, dots.steps), dots.values, axis, color, dots=True))
    return made


def _held_out_card(spec: catalog.Spec, names: dict[str, str], runs: list[Run], axis: Axis) -> Card:
    def one(run: Run, name: str, label: str, color: int) -> Line:
        field = run.evals[name] if name in run.evals else run.other[name]
        return line(label, axis.places(run, field.steps), field.values, axis, color, dots=True)

    if len(runs) == 1:
        lines = [one(runs[0], name, member or spec.title, i) for i, (name, member) in enumerate(names.items())]
        return Card(spec.section, spec.title, spec.note, [curves("", lines, axis.span, scale=spec.scale)])
    charts = []
    for name, member in names.items():
        having = [(i, run) for i, run in enumerate(runs) if name in run.evals | run.other]
        charts.append(curves(member, [one(run, name, run.name, i) for i, run in having], axis.span, scale=spec.scale))
    return Card(spec.section, spec.title, spec.note, charts, wide=len(charts) > 1)
