"""How many KDA layers to one of full attention (Kimi Linear, arXiv 2510.26692, table 1)."""

from experiments.base import text_run
from experiments.study import Metric, Published, Rung, Study, changed
from k3jax import presets
from k3jax.config_data import Mixture, StdlibCorpus, Weighted
from k3jax.config_tasks import MultiQueryRecall
from k3jax.run_config import TrainConfig

TEXT = Weighted(source=StdlibCorpus(held_out=0.002), weight=0.75, name="text")
RECALL = Weighted(
    source=MultiQueryRecall(vocab=128, lengths=(64, 128, 256), pairs=(4, 8, 16)), weight=0.25, name="recall"
)


def _every(layers: int):
    """Full attention at every ``layers``-th layer; 0 for nowhere."""

    def change(run: TrainConfig) -> dict:
        numbers = range(layers, run.model.layers + 1, layers) if layers else ()
        return {"model.full_attention": tuple(numbers)}

    return change


STUDY = Study(
    name="s02_hybrid_ratio",
    question="What does the share of full attention change in loss, and in recall over distance?",
    rungs={
        "d64": Rung(changed(text_run(layers=8, steps=240), {"data": Mixture(parts=(TEXT, RECALL))})),
        "kimi_linear_653m": Rung(presets.kimi_linear_653m(), planned=True),
    },
    variants={"3to1": _every(4), "0to1": _every(1), "1to1": _every(2), "7to1": _every(8), "none": _every(0)},
    control="3to1",
    rates=(5e-3, 1e-2, 2e-2),
    metric=Metric("bits_per_byte", "lower"),
    rule="The published order holds if 3:1 is no worse than any other ratio (no interval of a difference lies below "
    "zero) and all of attention is worse than 3:1 by more than its interval.",
    shown=("accuracy", "cache_bytes"),
    published=(
        Published(
            "arXiv 2510.26692, table 1: validation perplexity, 653 M active",
            {"3to1": 5.65, "0to1": 5.77, "1to1": 5.66, "7to1": 5.70, "15to1": 5.82},
        ),
    ),
)
