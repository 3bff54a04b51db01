"""Which layer went bad: statistics of every layer for a batch whose loss or gradient is not finite."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.data import Batch
from k3jax.model import layout
from k3jax.model.transformer import by_layer
from k3jax.model.weights import Weights
from k3jax.run_config import TrainConfig
from k3jax.step import loss_fn


class LayerStatistics(NamedTuple):
    """Of one layer: largest magnitude and RMS of the running hidden state after it, and its gradient's norm."""

    kind: str
    hidden_max: float
    hidden_rms: float
    grad_norm: float


def layer_statistics(config: TrainConfig, weights: Weights, batch: Batch) -> list[LayerStatistics]:
    """Runs the batch again, forward and backward, and measures every layer, first layer first."""
    hidden_max, hidden_rms, grad_norm = jax.jit(partial(_measure, config))(weights, batch)
    kinds = [f"{kind.mixer}+{kind.ffn}" for kind in config.model.kinds]
    return [LayerStatistics(*row) for row in zip(kinds, *map(np.asarray, (hidden_max, hidden_rms, grad_norm)))]


def _measure(config: TrainConfig, weights: Weights, batch: Batch):
    count = jnp.maximum(batch.weights_BT.sum(), 1)
    fn = jax.grad(partial(loss_fn, config=config, batch=batch, count=count, capture=True), has_aux=True)
    grads, (_, reports) = fn(weights.params, weights.router)
    segments = layout.plan(config.model.kinds)
    hidden = [report.hidden.astype(jnp.float32) for report in by_layer(segments, reports)]
    stacks = [[grads["segments"][s][r] for r in range(len(segment.runs))] for s, segment in enumerate(segments)]
    norms = [
        jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(layer)))
        for layer in by_layer(segments, stacks)
    ]
    rms = [jnp.sqrt(jnp.mean(jnp.square(h))) for h in hidden]
    return jnp.stack([jnp.abs(h).max() for h in hidden]), jnp.stack(rms), jnp.stack(norms)


def table(layers: list[LayerStatistics]) -> str:
    """The statistics as text, with the first layer that is bad in the forward and in the backward pass named.

    The backward pass runs from the last layer to the first, so its first bad layer is the last one in the table.
    """
    lines = ["layer  kind        max |hidden|   rms hidden    |gradient|"]
    for number, layer in enumerate(layers, start=1):
        numbers = f"{layer.hidden_max:12.4g} {layer.hidden_rms:12.4g} {layer.grad_norm:12.4g}"
        lines.append(f"{number:5d}  {layer.kind:10s} {numbers}")
    forward = [n for n, layer in enumerate(layers, 1) if not np.isfinite(layer.hidden_max)]
    backward = [n for n, layer in enumerate(layers, 1) if not np.isfinite(layer.grad_norm)]
    lines.append(f"first layer not finite in the forward pass: {forward[0] if forward else 'none'}")
    lines.append(f"first layer not finite in the backward pass: {backward[-1] if backward else 'none'}")
    return "\n".join(lines)
