"""Output gates, the short convolution and the bound of the decay (Kimi Linear, arXiv 2510.26692, table 1)."""

from experiments.base import text_run
from experiments.s02_hybrid_ratio.study import STUDY as HYBRID
from experiments.study import Diff, Metric, Published, Rung, Study
from k3jax import config as c
from k3jax.run_config import TrainConfig


def _kda(**changes):
    """K3's layer with some of its parts changed, at the sizes of the rung."""
    parts = dict(decay=c.BoundedDecay(), output_gate=c.FullRankGate(), conv=4)
    return lambda run: {"model.kda": c.replace(run.model.kda, **parts | changes)}


def _low_rank(run: TrainConfig) -> Diff:
    return _kda(output_gate=c.LowRankGate(run.model.kda.forget_rank))(run)


STUDY = Study(
    name="s03_gates_and_conv",
    question="Which of KDA's gates, its convolution and the bound of its decay earn their place?",
    rungs={"d64": Rung(text_run()), "kimi_linear_653m": HYBRID.rungs["kimi_linear_653m"]},
    variants={
        "k3": _kda(),
        "low_rank_gate": _low_rank,
        "swish_gate": _kda(output_gate=c.SwishGate()),
        "no_gate": _kda(output_gate=c.NoGate()),
        "no_conv": _kda(conv=1),
        "softplus_decay": _kda(decay=c.SoftplusDecay()),
    },
    control="k3",
    rates=(2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2),
    metric=Metric("bits_per_byte", "lower"),
    rule="A part earns its place if the run without it is worse by more than its interval.",
    published=(
        Published(
            "arXiv 2510.26692, table 1: validation perplexity, 653 M active",
            {"k3": 5.65, "no_gate": 5.67, "swish_gate": 5.81, "no_conv": 5.70},
        ),
    ),
)
