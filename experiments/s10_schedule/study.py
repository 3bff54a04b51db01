"""Cosine against warm-up, stable, decay, each with a search of its own (K3 report, section 3.3)."""

from experiments.base import text_run
from experiments.s05_attention_residuals.study import STUDY as RESIDUALS
from experiments.study import Metric, Rung, Study
from k3jax.config_optim import WSD, Cosine, Tunable

STUDY = Study(
    name="s10_schedule",
    question="Does a cosine end lower than warm-up, stable, decay, when both are searched?",
    rungs={"d64": Rung(text_run()), "attnres_436m": RESIDUALS.rungs["attnres_436m"]},
    variants={
        "cosine": {"optimizer.schedule": Tunable(Cosine(peak=1e-2, warmup=0.05))},
        "wsd_20": {"optimizer.schedule": Tunable(WSD(peak=1e-2, warmup=0.05, decay=0.2))},
        "wsd_50": {"optimizer.schedule": Tunable(WSD(peak=1e-2, warmup=0.05, decay=0.5))},
    },
    control="cosine",
    rates=(2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2),
    metric=Metric("bits_per_byte", "lower"),
    rule="One is better if the other is worse by more than its interval, each at its best rate.",
)
