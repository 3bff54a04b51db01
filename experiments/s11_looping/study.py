"""The same layers gone through several times, and attention layers that share keys and values, against layers with
weights and keys of their own."""

from experiments.base import text_run
from experiments.study import Diff, Metric, Rung, Study, changed
from k3jax import config as c
from k3jax import presets
from k3jax.run_config import TrainConfig


def _looped(times: int):
    """As many passes through layers as the rung has layers, by ``times`` fewer layers."""

    def change(run: TrainConfig) -> Diff:
        layers = run.model.layers // times
        return {
            "model.layers": layers,
            "model.full_attention": c.every_fourth(layers),
            "model.dense_layers": min(run.model.dense_layers, layers),
            "model.loops": times,
        }

    return change


def _shallow(run: TrainConfig) -> Diff:
    """Half the layers, once: what looping adds is seen against it."""
    return _looped(2)(run) | {"model.loops": 1}


def _published() -> Rung:
    config = changed(presets.attnres_436m(), {"model.residual": c.PlainResidual()})
    return Rung(config, planned=True, layout="attnres_16")


STUDY = Study(
    name="s11_looping",
    question="How much of a deeper model does going through the same layers twice recover, and what do MLA layers lose "
    "that read the compressed keys and values of another?",
    rungs={"d64": Rung(text_run(layers=8, steps=240)), "attnres_436m": _published()},
    variants={"deep": {}, "looped_2": _looped(2), "shallow": _shallow, "shared_kv_2": {"model.mla.share": 2}},
    control="deep",
    rates=(5e-3, 1e-2, 2e-2, 4e-2),
    metric=Metric("bits_per_byte", "lower"),
    rule="Looping recovers depth if looped_2 is better than shallow by more than their intervals; how much is the "
    "share of the difference between shallow and deep. Sharing is free if shared_kv_2 is no worse than deep by more "
    "than its interval.",
    shown=("parameters", "flops_per_token", "cache_bytes"),
)
