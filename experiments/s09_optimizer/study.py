"""AdamW, Muon, per-head Muon, matching of the update's size, QK-Clip (Moonlight, arXiv 2502.16982; K2, K3 reports)."""

from experiments.base import text_run
from experiments.s05_attention_residuals.study import STUDY as RESIDUALS
from experiments.study import Metric, Published, Rung, Study
from k3jax.config_optim import AdamW, Muon, QKClip

HOT = Muon(lr_scale=10.0)

STUDY = Study(
    name="s09_optimizer",
    question="Does Muon beat AdamW here, do blocks by head and matched update sizes help, and does QK-Clip hold?",
    rungs={"d64": Rung(text_run()), "attnres_436m": RESIDUALS.rungs["attnres_436m"]},
    variants={
        "muon_per_head": {},
        "muon": {"optimizer.matrices": Muon(heads="merged")},
        "muon_unmatched": {"optimizer.matrices": Muon(factor=1.6)},
        "adamw": {"optimizer.matrices": AdamW()},
        "hot_clipped": {"optimizer.matrices": HOT, "optimizer.qk_clip": QKClip(20.0)},
        "hot_unclipped": {"optimizer.matrices": HOT, "optimizer.qk_clip": None},
    },
    control="muon_per_head",
    rates=(3e-3, 1e-2, 3e-2),
    metric=Metric("bits_per_byte", "lower"),
    rule="Muon wins if AdamW is worse by more than its interval, each at its best rate. The same for blocks by head, "
    "and for matched sizes (without, every block is multiplied by 0.2 sqrt(width)). QK-Clip holds if the largest logit "
    "of hot_clipped stays near 20 at no loss against hot_unclipped, matrices at ten times the rate in both.",
    shown=("max_logit", "skipped"),
    published=(
        Published(
            "arXiv 2502.16982: Muon reaches AdamW's loss with 52 % of the operations", {"muon": 2.506, "adamw": 2.608}
        ),
        Published("arXiv 2502.16982, 800 M: validation loss", {"muon": 2.789, "muon_unmatched": 2.812}),
    ),
)
