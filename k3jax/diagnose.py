"""What every layer does with one batch: which went bad when a loss or gradient is not finite, and how large the
products of the gated activations are."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import config as c
from k3jax import nn
from k3jax.data import Batch
from k3jax.model import layout
from k3jax.model.ffn import GatedFFN, gated
from k3jax.model.moe import MoELayer, route
from k3jax.model.transformer import by_layer
from k3jax.model.weights import Weights, bind
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


def activation_maxima(config: TrainConfig, weights: Weights, batch: Batch) -> list[float]:
    """For every layer, first layer first, the largest magnitude of what goes into the down projections of its
    feed-forward part (dense, shared and routed): over all tokens outside of padding, with each routed expert over those
    that go to it, and over all times that the layer is gone through. On one device."""
    return np.asarray(jax.jit(partial(_maxima, config.model))(weights, batch)).tolist()


def _maxima(model: c.ModelConfig, weights: Weights, batch: Batch):
    net = bind(model, weights)
    for segment in net.segments:
        for layer in segment:
            layer.ffn = _Watched(layer.ffn)
    _, reports = net(model, batch.tokens_BT, batch.segments_BT)
    loops = tuple(range(int(model.loops > 1)))
    maxima = [[report.balance.max(axis=loops) for report in segment] for segment in reports]
    return jnp.stack(by_layer(layout.plan(model.kinds), maxima))


class _Watched(MoELayer):
    """A feed-forward part that says how large its products are where one of experts says what its balancer needs, so
    that the model around it stays as it is."""

    def __init__(self, part: GatedFFN | MoELayer):
        self.part = part

    def __call__(self, model, x_BTD, valid_BT, *, observe, transport):
        if isinstance(self.part, MoELayer):
            y, _ = self.part(model, x_BTD, valid_BT, observe=False, transport=transport)
        else:
            y = self.part(model, x_BTD)
        return y, _largest(self.part, model, x_BTD.reshape(-1, x_BTD.shape[-1]), valid_BT.reshape(-1))


def _largest(part: GatedFFN | MoELayer, model: c.ModelConfig, x_ND, counted_N):
    """The largest magnitude of a part's gated products, those of one expert at a time."""

    def product(x_NL, gate_LF, up_LF, counted_N):
        g, u = nn.einsum("nl,lf->nf", x_NL, gate_LF), nn.einsum("nl,lf->nf", x_NL, up_LF)
        products_NF = jnp.abs(gated(model.activation, g, u).astype(jnp.float32))
        return jnp.where(counted_N[:, None], products_NF, 0).max()

    if isinstance(part, GatedFFN):
        return product(x_ND, part.gate[...], part.up[...], counted_N)
    spec = model.moe
    routing = route(x_ND, part.router[...], part.bias[...], spec.active, spec.scale)
    chosen_EN = (routing.experts == jnp.arange(spec.experts)[:, None, None]).any(axis=-1) & counted_N
    z_NL = nn.einsum("nd,dl->nl", x_ND, part.latent_down[...]) if spec.latent else x_ND
    largest_E = jax.lax.map(lambda one: product(z_NL, *one), (part.gate[...], part.up[...], chosen_EN))
    shared = _largest(part.shared, model, x_ND, counted_N) if spec.shared else 0.0
    return jnp.maximum(largest_E.max(), shared)


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
