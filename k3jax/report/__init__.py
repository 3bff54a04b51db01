"""The report of a run, or the comparison of several: a self-contained `report.html` with PNGs beside it.

    python -m k3jax.report runs/nano
    python -m k3jax.report runs/nano runs/wide --x tokens --out /tmp/comparison

It is made from `metrics.jsonl` alone, also while the run goes on; what else lies in the folder (see
`k3jax.report.run.Run`) is shown when it is there. The report of one run is written into its folder, a comparison into
`comparison-FIRST-SECOND` beside the first run; `--out` names another folder. Beside `report.html` are `loss.png` and
`charts/SECTION.png`; the page needs neither.
"""

import os
import pathlib

from k3jax.report import axis, catalog, png
from k3jax.report.charts import Card, cards
from k3jax.report.evaluation import task_cards
from k3jax.report.loss import loss_card
from k3jax.report.page import render
from k3jax.report.run import ReportError, Run, read_runs

__all__ = ["ReportError", "write_report"]


def write_report(
    *folders: str | os.PathLike,
    out: str | os.PathLike | None = None,
    x: axis.Quantity = "step",
    charts: bool = False,
) -> pathlib.Path:
    """Writes the page and its PNGs and returns the path of the page.

    Args:
      folders: of the runs, at least one.
      out: folder to write to, made if missing; None for the one described above.
      x: what the horizontal axes count.
      charts: write a PNG for every section, which takes seconds; without, only that of the loss.

    Raises:
      ReportError: no such folder, a missing or damaged file, metrics of wrong types or without a training step, or runs
        that do not say what `x` asks for.
    """
    runs = read_runs(list(folders))
    target = _default_folder(runs) if out is None else pathlib.Path(out)
    scale = axis.make(runs, x)
    target.mkdir(parents=True, exist_ok=True)
    page = target / "report.html"
    shown = all_cards(runs, scale)
    page.write_text(render(runs, scale, shown), encoding="utf-8")
    png.write(shown if charts else shown[:1], runs, scale, target)
    return page


def all_cards(runs: list[Run], scale: axis.Axis) -> list[Card]:
    """Every chart, in order of the sections."""
    found = [loss_card(runs, scale), *cards(runs, scale), *task_cards(runs)]
    return sorted(found, key=lambda card: list(catalog.SECTIONS).index(card.section))


def _default_folder(runs: list[Run]) -> pathlib.Path:
    if len(runs) == 1:
        return runs[0].folder
    names = [run.folder.resolve().name for run in runs]
    more = [f"and-{len(names) - 2}-more"] if len(names) > 2 else []
    return runs[0].folder.resolve().parent / "-".join(["comparison", *names[:2], *more])
