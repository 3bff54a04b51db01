"""The K3 recipe against a plain transformer of experts over four sizes (`experiments.ladder` fits the lines)."""

from experiments.base import text_run
from experiments.s05_attention_residuals.study import STUDY as RESIDUALS
from experiments.study import Diff, Metric, Published, Rung, Study, changed
from k3jax import config as c
from k3jax.run_config import TrainConfig

STEPS = {32: 100, 48: 160, 64: 240, 96: 400}


def _small(dim: int) -> Rung:
    return Rung(changed(text_run(dim=dim, steps=STEPS[dim], moe=True), {"model.residual": c.BlockAttnRes(2)}))


def _k3(run: TrainConfig) -> Diff:
    """The rungs of Attention Residuals are Kimi Linear's parts; the recipe has K3's."""
    return {
        "model.kda.decay": c.BoundedDecay(),
        "model.kda.output_gate": c.FullRankGate(),
        "model.mla.output_gate": c.FullRankGate(),
        "model.moe.balancer": c.QuantileBalancing(),
        "model.moe.latent": c.Latent(run.model.dim // 2),
        "model.activation": c.SiTU(),
    }


def _baseline(run: TrainConfig) -> Diff:
    """Full attention with RoPE, plain residuals, SwiGLU, experts at full width under the sign rule, at the same active
    parameters of the routed part."""
    D, moe = run.model.dim, run.model.moe
    L = moe.latent.dim if moe.latent else D
    width = moe.width if not moe.latent else (3 * L * moe.width * moe.active + 2 * D * L) // (3 * D * moe.active)
    return {
        "model.full_attention": tuple(range(1, run.model.layers + 1)),
        "model.mla.position": c.RoPE(),
        "model.mla.output_gate": c.NoGate(),
        "model.residual": c.PlainResidual(),
        "model.activation": c.SwiGLU(),
        "model.moe": c.replace(moe, latent=None, width=width, balancer=c.SignRule()),
    }


STUDY = Study(
    name="s12_ladder",
    question="How much computation does the K3 recipe save at equal loss, and does the saving grow with size?",
    rungs={f"d{dim}": _small(dim) for dim in STEPS}
    | {name: rung for name, rung in RESIDUALS.rungs.items() if rung.planned},
    variants={"k3": _k3, "baseline": _baseline},
    control="k3",
    rates=(5e-3, 1e-2, 2e-2, 4e-2),
    metric=Metric("bits_per_byte", "lower"),
    rule="The recipe saves computation if the bootstrap interval of the ratio of operations at equal loss is above 1.",
    shown=("active_parameters", "flops"),
    published=(
        # Spans: six operations for each active parameter and token of the smallest and the largest run.
        Published(
            "arXiv 2510.26692, KDA hybrid and MLA",
            {"k3": "2.2879 C^-0.0527", "baseline": "2.3092 C^-0.0536"},
            span=(1.8, 15.1),
        ),
        Published(
            "arXiv 2603.15031, with and without Attention Residuals",
            {"k3": "1.865 C^-0.057", "baseline": "1.891 C^-0.057"},
            span=(0.5, 4.4),
        ),
    ),
)
