"""How many KDA layers to one of full attention (Kimi Linear, arXiv 2510.26692, table 1)."""

from collections.abc import Callable

from experiments.base import text_run
from experiments.study import Diff, Metric, Published, Rung, Study
from k3jax import config as c
from k3jax import presets
from k3jax.run_config import TrainConfig


def every(layers: int) -> Callable[[TrainConfig], Diff]:
    """Full attention at every ``layers``-th layer; 0 for nowhere."""

    def change(run: TrainConfig) -> Diff:
        numbers = range(layers, run.model.layers + 1, layers) if layers else ()
        return {"model.full_attention": tuple(numbers)}

    return change


def attention(run: TrainConfig) -> Diff:
    """Full attention everywhere, with RoPE: where no KDA layer carries the order, one without positions has only the
    causal mask to tell it."""
    return {**every(1)(run), "model.mla.position": c.RoPE()}


RATIOS = {"3to1": every(4), "0to1": attention, "1to1": every(2), "7to1": every(8), "none": every(0)}

STUDY = Study(
    name="s02_hybrid_ratio",
    question="What does the share of full attention change in held-out loss?",
    rungs={
        "d64": Rung(text_run(layers=8, steps=240)),
        "kimi_linear_653m": Rung(presets.kimi_linear_653m(), planned=True),
    },
    variants=RATIOS,
    control="3to1",
    rates=(5e-3, 1e-2, 2e-2, 4e-2),
    metric=Metric("bits_per_byte", "lower"),
    rule="The published order holds if 3:1 is no worse than any other ratio (no interval of a difference lies below "
    "zero) and all of attention is worse than 3:1 by more than its interval.",
    shown=("active_parameters", "cache_bytes", "flops_per_token"),
    published=(
        Published(
            "arXiv 2510.26692, table 1: validation perplexity, 653 M active",
            {"3to1": 5.65, "0to1": 5.77, "1to1": 5.66, "7to1": 5.70, "15to1": 5.82},
        ),
    ),
)
