"""The loss of training batches and of held-out text, against general compressors."""

import numpy as np

from k3jax.report.axis import Axis
from k3jax.report.buckets import smooth
from k3jax.report.charts import Card, Line, curves, in_bits, line
from k3jax.report.run import Run

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
