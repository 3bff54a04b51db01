"""Quantile Balancing against the sign rule, an auxiliary loss, and nothing (K3 report, section 2.3.3)."""

from experiments.base import text_run
from experiments.s06_latent_moe.study import STUDY as LATENT
from experiments.study import Metric, Rung, Study
from k3jax import config as c

STUDY = Study(
    name="s08_balancing",
    question="Which rule keeps experts evenly loaded, how soon, and at what cost in loss?",
    rungs={"d64": Rung(text_run(steps=240, moe=True)), "attnres_194m": LATENT.rungs["attnres_194m"]},
    variants={
        "quantile": {"model.moe.balancer": c.QuantileBalancing()},
        "quantile_exact": {"model.moe.balancer": c.ExactQuantileBalancing()},
        "sign_0.001": {"model.moe.balancer": c.SignRule(1e-3)},
        "sign_0.01": {"model.moe.balancer": c.SignRule(1e-2)},
        "sign_0.1": {"model.moe.balancer": c.SignRule(1e-1)},
        "aux_loss": {"model.moe.balancer": c.AuxLoss(1e-2)},
        "none": {"model.moe.balancer": c.NoBalancing()},
    },
    control="quantile",
    rates=(1e-2,),
    metric=Metric("max_over_mean", "lower"),
    rule="Quantile Balancing is the better rule if every other one has a larger max_over_mean by more than its "
    "interval, and none has fewer bits per byte by more than its interval. All have one rate of learning: what is "
    "searched here is the rate of the balancer.",
    shown=("bits_per_byte", "max_over_mean_start", "dead_share", "dead_share_start"),
)
