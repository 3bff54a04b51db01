"""The whole text backbone: embedding, segments of layers, output mixture, norm and head."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from k3jax import config as c
from k3jax import nn, sharding
from k3jax.config_layout import ALONE, Layout
from k3jax.model import attnres, embedding, kda, layout, memory, mla
from k3jax.model.block import (
    Cache,
    Continuation,
    Inputs,
    LayerReport,
    layer_step,
    make_segment,
    run_segment,
)
from k3jax.roles import Role
from k3jax.shapes import PADDING_SEGMENT


class DecodeState(NamedTuple):
    """Cached sequences: per segment and run a stacked cache, one for each time that the layers are gone through (None
    where layers borrow that of an earlier one), and how many tokens each row has, [B] int32."""

    caches: list[list[Cache]]
    length: Array


class Transformer(nnx.Module):
    """Weights of a K3-class text model. The configuration stays outside: pass it to every call."""

    def __init__(self, model: c.ModelConfig, *, segments: tuple[layout.Segment, ...] | None = None):
        segments = layout.plan(model.kinds) if segments is None else segments
        normal = nn.Normal(model.init_std)
        self.embed = nn.param(
            "embed", (model.vocab, model.dim), role=Role.EMBEDDING, axes=("vocab", "embed"), init=normal
        )
        self.segments = nnx.List([make_segment(model, segment) for segment in segments])
        if not isinstance(model.residual, c.PlainResidual):
            self.mix = attnres.DepthMix(model)
        self.norm = nn.norm_weight("norm", model.dim, "width")
        self.head = nn.param(
            "head", (model.dim, model.vocab), role=Role.UNEMBEDDING, axes=("embed", "vocab"), init=normal
        )

    def __call__(
        self,
        model: c.ModelConfig,
        tokens_BT: Array,
        segment_ids: Array | None = None,
        *,
        observe: bool = False,
        capture: bool = False,
        segments: tuple[layout.Segment, ...] | None = None,
        on: Layout = ALONE,
    ) -> tuple[Array, list[list[LayerReport]]]:
        """Normalized final hidden states [B, T, D] and every layer's report.

        Args:
          model: the configuration these weights were made with.
          tokens_BT: int32 token ids.
          segment_ids: [B, T] document of each token, -1 for padding; None is one document per row.
          observe: collect what the balancer needs (training).
          capture: keep the running hidden state after every layer in its report.
          segments: the decomposition into scans, if not the planned one.
          on: what travels between devices, where a mesh is in scope. The batch then arrives by whole rows.

        Returns:
          the hidden states in the compute dtype (multiply by :meth:`logits`' head for logits), and for each segment a
          list with one report per run, every leaf with leading axes [repeats, run length], and in front of them
          [loops] where ``model.loops`` is more than one. On a mesh the hidden states
          lie as :data:`k3jax.sharding.TOKENS`, and the balancer's sums are in parts (:func:`k3jax.observe.added_up`).
        """
        segments = layout.plan(model.kinds) if segments is None else segments
        valid = jnp.ones(tokens_BT.shape, bool) if segment_ids is None else segment_ids != PADDING_SEGMENT
        inputs = Inputs(segment_ids, sharding.lie(valid, sharding.TOKENS))

        stream = attnres.start(model.residual, model.layers, self._embed(model, tokens_BT))
        step = layer_step(model, inputs, observe=observe, capture=capture, on=on)

        def stack(carry, _):
            reports = []
            for segment, layers, closes in zip(segments, self.segments, _closing_flags(model, segments)):
                carry, outs = run_segment(segment, step, carry, list(zip(layers, closes)))
                reports.append(outs)
            return carry, reports

        lent = _nothing_lent(model, *tokens_BT.shape)
        carry = stream, lent, jnp.zeros_like(stream.sources)
        (stream, _, final), reports = _looped(model, stack, carry, None)
        stream = stream._replace(sources=memory.end(stream.sources, final))
        return self._final(model, stream), reports

    def extend(
        self, model: c.ModelConfig, tokens_BT: Array, state: DecodeState, lengths_B: Array | None = None
    ) -> tuple[Array, DecodeState]:
        """Final hidden states of T more tokens of each cached row, and the state after them.

        Args:
          lengths_B: how many of the T tokens are real, for rows padded on the right; None is all. Hidden states of
            padding are meaningless and leave no trace in the state.
        """
        segments = layout.plan(model.kinds)
        lengths = jnp.full(tokens_BT.shape[0], tokens_BT.shape[1], jnp.int32) if lengths_B is None else lengths_B
        new = Continuation(state.length, lengths)

        def layer_fn(carry, x):
            (stream, lent), (layer, closes, cache) = carry, x
            stream, after = layer.extend(model, stream, closes, lent if layer.borrows else cache, new)
            return (stream, after if layer.lends(model) else lent), None if layer.borrows else after

        def stack(carry, caches):
            new = []
            for segment, layers, closes, cache in zip(segments, self.segments, _closing_flags(model, segments), caches):
                carry, after = run_segment(segment, layer_fn, carry, list(zip(layers, closes, cache)))
                new.append(after)
            return carry, new

        stream = attnres.start(model.residual, model.layers, self._embed(model, tokens_BT))
        rooms = [cache.latent.shape[-2] for part in state.caches for cache in part if isinstance(cache, mla.MLACache)]
        lent = _nothing_lent(model, len(tokens_BT), max(rooms, default=0))
        (stream, _), caches = _looped(model, stack, (stream, lent), state.caches)
        return self._final(model, stream), DecodeState(caches, state.length + lengths)

    def logits(self, hidden: Array) -> Array:
        """Float32 logits [..., W] of final hidden states [..., D]."""
        return jnp.einsum(
            "...d,dw->...w", hidden, self.head[...].astype(hidden.dtype), preferred_element_type=jnp.float32
        )

    def _embed(self, model, tokens_BT):
        with jax.named_scope("embed"):
            return embedding.lookup(self.embed[...], tokens_BT, model.dtype)

    def _final(self, model, stream):
        with jax.named_scope("final_norm"):
            mixed = stream.running if isinstance(model.residual, c.PlainResidual) else self.mix(model, stream)
            return nn.rms_norm(mixed, self.norm[...], model.eps)


def _looped(model: c.ModelConfig, stack, carry, xs):
    """``carry, y = stack(carry, x)``, once for every time that the layers are gone through."""
    if model.loops == 1:
        return stack(carry, xs)
    return jax.lax.scan(stack, carry, xs, length=model.loops)


def _nothing_lent(model: c.ModelConfig, batch: int, length: int) -> mla.MLACache | None:
    """What passes from layer to layer before the first MLA layer: zeros, or None where no layer borrows."""
    return sharding.lie(mla.init_cache(model, batch, length), sharding.TOKENS) if model.mla.share > 1 else None


def _closing_flags(model: c.ModelConfig, segments: tuple[layout.Segment, ...]) -> list[list[Array]]:
    """For every segment and run, [repeats, run length] bool: which layers start a depth block."""
    flags = [[[[False] * run.count for _ in range(s.repeats)] for run in s.runs] for s in segments]
    for layer, slot in enumerate(layout.slots(segments)):
        flags[slot.segment][slot.run][slot.repeat][slot.index] = attnres.closes_block(model.residual, layer)
    return [[jnp.array(run) for run in segment] for segment in flags]


def init_decode_state(model: c.ModelConfig, batch: int, length: int) -> DecodeState:
    """Empty caches for ``batch`` rows of at most ``length`` tokens. KDA layers need no room for length."""

    def stacked(segment: layout.Segment, run: layout.Run) -> Cache:
        if run.kind.borrows:
            return None
        one = kda.init_cache(model, batch) if run.kind.mixer == "kda" else mla.init_cache(model, batch, length)
        axes = (segment.repeats, run.count) if model.loops == 1 else (model.loops, segment.repeats, run.count)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (*axes, *x.shape)), one)

    caches = [[stacked(segment, run) for run in segment.runs] for segment in layout.plan(model.kinds)]
    return DecodeState(caches, jnp.zeros(batch, jnp.int32))


def by_layer(segments: tuple[layout.Segment, ...], stacked: list[list]) -> list:
    """Unstacks per-segment, per-run pytrees with leading axes [repeats, run length] into one per layer, in order."""

    def one(slot: layout.Slot):
        return jax.tree.map(lambda x: x[slot.repeat, slot.index], stacked[slot.segment][slot.run])

    return [one(slot) for slot in layout.slots(segments)]
