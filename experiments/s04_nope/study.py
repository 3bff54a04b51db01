"""No position encoding against RoPE in the full attention layers (Kimi Linear, arXiv 2510.26692, table 5)."""

from experiments.base import text_run
from experiments.s02_hybrid_ratio.study import STUDY as HYBRID
from experiments.study import Metric, Published, Rung, Study
from k3jax import config as c

STUDY = Study(
    name="s04_nope",
    question="Do full attention layers without positions work in rows four times as long as those of training?",
    rungs={"d64": Rung(text_run()), "kimi_linear_653m": HYBRID.rungs["kimi_linear_653m"]},
    variants={"nope": {}, "rope": {"model.mla.position": c.RoPE()}},
    control="nope",
    rates=(5e-3, 1e-2, 2e-2),
    metric=Metric("long_bits_per_byte", "lower"),
    rule="NoPE carries further if RoPE is worse at four times the length by more than its interval, while they are "
    "alike at the length of training.",
    shown=("bits_per_byte",),
    stretch=4,
    published=(
        Published(
            "arXiv 2510.26692, table 5: average of eight long-context benchmarks at 128 K", {"nope": 54.5, "rope": 51.8}
        ),
    ),
)
