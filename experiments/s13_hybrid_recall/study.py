"""Recall over distance by the share of full attention: what the loss of text (s02) does not show."""

from experiments.base import task_run
from experiments.s02_hybrid_ratio.study import RATIOS
from experiments.study import Metric, Rung, Study
from k3jax.config_tasks import MultiQueryRecall

RECALL = MultiQueryRecall(vocab=64, lengths=(16, 32, 64), pairs=(4, 8, 16))

STUDY = Study(
    name="s13_hybrid_recall",
    question="What does the share of full attention change in recall over distance?",
    rungs={"d64": Rung(task_run(RECALL, layers=8, dim=64, batch=16, steps=600))},
    variants=RATIOS,
    control="3to1",
    rates=(5e-3, 1e-2, 2e-2),
    metric=Metric("accuracy", "higher"),
    rule="Attention helps recall if a variant with less of it than 3:1 (7:1, none) is worse by more than its interval; "
    "with distance if what it lacks grows from recall@4-7 to recall@32-63.",
    shown=("recall@4-7", "recall@8-15", "recall@16-31", "recall@32-63"),
)
