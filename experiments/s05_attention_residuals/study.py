"""Attention Residuals: none, by block, full, and their details (arXiv 2603.15031, tables 2 and 4)."""

from experiments.base import text_run
from experiments.study import Metric, Published, Rung, Study, changed
from k3jax import config as c
from k3jax import presets


def _published(name: str) -> Rung:
    return Rung(presets.load(name), planned=True, layout="attnres_16")


STUDY = Study(
    name="s05_attention_residuals",
    question="Does reading a learned mixture over depth lower the loss, and what of it matters?",
    rungs={
        "d64": Rung(changed(text_run(layers=8, steps=240), {"model.residual": c.BlockAttnRes(2)})),
        "attnres_194m": _published("attnres_194m"),
        "attnres_241m": _published("attnres_241m"),
        "attnres_296m": _published("attnres_296m"),
        "attnres_436m": _published("attnres_436m"),
        "attnres_528m": _published("attnres_528m"),
    },
    variants={
        "none": {"model.residual": c.PlainResidual()},
        "block_2": {"model.residual": c.BlockAttnRes(2)},
        "block_4": {"model.residual": c.BlockAttnRes(4)},
        "full": {"model.residual": c.FullAttnRes()},
        "full_no_key_norm": {"model.residual": c.FullAttnRes(keys=c.NoKeyNorm())},
        "full_random_query": {"model.residual": c.FullAttnRes(query=c.RandomQuery(0.02))},
    },
    control="none",
    rates=(5e-3, 1e-2, 2e-2, 4e-2),
    metric=Metric("bits_per_byte", "lower"),
    rule="Attention residuals help if full and block_2 are better than none by more than their intervals.",
    published=(
        Published(
            "arXiv 2603.15031, 436 M active: training loss",
            {"none": 1.766, "block_2": 1.746, "block_4": 1.746, "full": 1.737, "full_no_key_norm": 1.743},
        ),
    ),
)
