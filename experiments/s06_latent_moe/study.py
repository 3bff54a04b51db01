"""Experts in a latent against experts at full width, at the same active parameters (K3 report, section 2.3)."""

from experiments.base import text_run
from experiments.study import Diff, Metric, Rung, Study, changed
from k3jax import config as c
from k3jax import presets
from k3jax.run_config import TrainConfig


def _latent(*, more: int, norm: bool = True):
    """Half the width as a latent, and ``more`` times the experts and active experts. The width of an expert, routed or
    shared, makes the active parameters those of the rung, router and projections among them:
    ``D E + 3 D F (A + shared) = D E' + 3 F' (L A' + D shared) + 2 D L``."""

    def change(run: TrainConfig) -> Diff:
        D, moe = run.model.dim, run.model.moe
        L, experts, active = D // 2, more * moe.experts, more * moe.active
        left = D * (moe.experts - experts) + 3 * D * moe.width * (moe.active + moe.shared) - 2 * D * L
        width = round(left / (3 * (L * active + D * moe.shared)))
        sizes = dict(experts=experts, active=active, width=width)
        return {"model.moe": c.replace(moe, latent=c.Latent(L, norm=norm), **sizes)}

    return change


PLAIN = c.MoE(experts=16, active=2, width=43, shared=1)

STUDY = Study(
    name="s06_latent_moe",
    question="What does a latent buy at the same active parameters and operations, and does its norm help?",
    rungs={
        "d64": Rung(changed(text_run(steps=240, moe=True), {"model.moe": PLAIN})),
        "attnres_194m": Rung(presets.attnres_194m(), planned=True, layout="attnres_16"),
    },
    variants={
        "latent": _latent(more=2),
        "latent_no_norm": _latent(more=2, norm=False),
        "latent_half_bytes": _latent(more=1),
        "plain": {},
    },
    control="latent",
    rates=(5e-3, 1e-2, 2e-2, 4e-2),
    metric=Metric("bits_per_byte", "lower"),
    rule="The latent pays if plain experts are worse by more than their interval at the same dispatched bytes, or no "
    "better than latent_half_bytes; the norm helps if latent_no_norm is worse by more than its interval.",
    shown=("active_parameters", "flops_per_token", "dispatch_bytes", "max_over_mean"),
)
