"""The report of a run: `loss.png` and a self-contained `report.html`, made from the files in its folder alone.

    python -m k3jax.report runs/nano

Files read (see `k3jax.report.run`): `metrics.jsonl` and `config.json` must be there; `summary.json`,
`environment.json` and `sample.txt` are shown once the run has written them, so the report also works on a run that is
still going or was stopped.
"""

import os
import pathlib

from k3jax.report.charts import loss_png
from k3jax.report.page import render
from k3jax.report.run import ReportError, read_run

__all__ = ["ReportError", "write_report"]


def write_report(folder: str | os.PathLike) -> pathlib.Path:
    """Writes `loss.png` and `report.html` into the run's folder and returns the path of the page.

    Raises:
      ReportError: no such folder, a missing or damaged file, or metrics without a single training step.
    """
    run = read_run(folder)
    (run.folder / "loss.png").write_bytes(loss_png(run))
    page = run.folder / "report.html"
    page.write_text(render(run), encoding="utf-8")
    return page
