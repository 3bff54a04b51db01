"""SiTU, SwiGLU, and SwiGLU with a hard clamp (K3 report, eq. 12)."""

from experiments.base import text_run
from experiments.s06_latent_moe.study import STUDY as LATENT
from experiments.study import Metric, Rung, Study
from k3jax import config as c

STUDY = Study(
    name="s07_activation",
    question="Does a smooth bound on the gated activation cost loss, and does it keep activations small?",
    rungs={"d64": Rung(text_run()), "attnres_194m": LATENT.rungs["attnres_194m"]},
    variants={
        "situ": {"model.activation": c.SiTU()},
        "swiglu": {"model.activation": c.SwiGLU()},
        "clamped_swiglu": {"model.activation": c.ClampedSwiGLU(7.0)},
    },
    control="situ",
    rates=(5e-3, 1e-2, 2e-2),
    metric=Metric("bits_per_byte", "lower"),
    rule="The bound is free if no other activation is better by more than its interval.",
    shown=("activation_max", "hidden_max", "max_logit"),
)
