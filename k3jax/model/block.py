"""One decoder layer, and segments of layers that run as scans. The only place where a layer's kind is looked at."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from k3jax import config as c
from k3jax import nn
from k3jax.config_layout import ALONE, Layout
from k3jax.model import attnres, balancing, kda, layout, memory, mla
from k3jax.model.ffn import GatedFFN
from k3jax.model.kda import KDALayer
from k3jax.model.mla import MLALayer
from k3jax.model.moe import MoELayer

type Cache = kda.KDACache | mla.MLACache | None


class LayerReport(NamedTuple):
    """What a layer says beside its output; None where it does not apply.

    balance: the balancer's observation (MoE layers, in training). max_logit: [H] (MLA layers). hidden: [B, T, D], the
    stream's running value after the layer, when asked for. gauges: of a KDA layer's recurrence (in training).
    depth: [2, S + 1], the weights of depth sources summed over tokens at the mixer's and the feed-forward part's site
    (in training). On a mesh the sums over tokens are in parts, side by side along a leading axis.
    """

    balance: balancing.Observation | None
    max_logit: Array | None
    hidden: Array | None
    gauges: kda.Gauges | None = None
    depth: Array | None = None


class Inputs(NamedTuple):
    """What every layer sees of the batch. segment_ids and valid: [B, T]."""

    segment_ids: Array | None
    valid: Array


class Continuation(NamedTuple):
    """How new tokens continue cached sequences: positions before them, and how many of the T are real, [B] each."""

    start: Array
    lengths: Array


class Layer(nnx.Module):
    """A mixer and a feed-forward part, each behind a pre-norm and, with attention residuals, a depth mixture."""

    def __init__(self, model: c.ModelConfig, kind: c.LayerKind):
        self.mixer_norm = nn.norm_weight("mixer_norm", model.dim, "width")
        self.ffn_norm = nn.norm_weight("ffn_norm", model.dim, "width")
        self.mixer = KDALayer(model) if kind.mixer == "kda" else MLALayer(model, borrows=kind.borrows)
        if kind.ffn == "moe":
            self.ffn = MoELayer(model)
        else:
            self.ffn = GatedFFN(model, model.dense_width)
        if not isinstance(model.residual, c.PlainResidual):
            self.mixer_mix = attnres.DepthMix(model)
            self.ffn_mix = attnres.DepthMix(model)

    @property
    def borrows(self) -> bool:
        """Whether it reads the compressed keys and values of an earlier layer."""
        return isinstance(self.mixer, MLALayer) and self.mixer.borrows

    def lends(self, model: c.ModelConfig) -> bool:
        """Whether later layers may read its compressed keys and values."""
        return isinstance(self.mixer, MLALayer) and self.mixer.lends(model)

    def __call__(self, model, stream, closes, inputs: Inputs, lent=None, *, observe=False, capture=False, on=ALONE):
        """The stream after this layer, the keys and values that it lends to later ones, or None, and its
        :class:`LayerReport`. ``closes``: this layer starts a depth block. ``lent``: for a layer that borrows. ``on``:
        what travels between devices."""
        observe_depth = observe and not isinstance(model.residual, c.PlainResidual)
        depth = [self.mixer_mix.weights(model, stream, inputs.valid)] if observe_depth else []
        x, made, max_logit, gauges = self._read(model, stream, "mixer"), None, None, None
        if isinstance(self.mixer, MLALayer):
            y, max_logit, made = self.mixer(model, x, inputs.segment_ids, lent, order=on.mla)
        elif observe:
            y, gauges = self.mixer.observed(model, x, inputs.segment_ids)
        else:
            y = self.mixer(model, x, inputs.segment_ids)
        stream = _add_mixer(model, stream, memory.mark(y, "mixer_out"), closes)
        depth += [self.ffn_mix.weights(model, stream, inputs.valid)] if observe_depth else []
        stream, seen = self._feed_forward(model, stream, inputs.valid, observe, on)
        hidden = stream.running if capture else None
        return stream, made, LayerReport(seen, max_logit, hidden, gauges, jnp.stack(depth, axis=-2) if depth else None)

    def extend(self, model, stream, closes, cache: Cache, new: Continuation):
        """The stream and the cache after T more tokens of each row; the cache of a layer that borrows is the other
        layer's."""
        stream = _open(model, stream, closes)
        x = self._read(model, stream, "mixer")
        where = new.start if isinstance(self.mixer, MLALayer) else new.lengths
        y, cache = self.mixer.extend(model, x, cache, where)
        stream = _add_mixer(model, stream, y, closes)
        valid = jnp.ones(x.shape[:2], bool)
        stream, _ = self._feed_forward(model, stream, valid, observe=False, on=ALONE)
        return attnres.settle(stream), cache

    def _read(self, model, stream, site):
        """What a sub-layer reads: the depth mixture or the running sum, normalized."""
        mixed = stream.running
        if not isinstance(model.residual, c.PlainResidual):
            mixed = getattr(self, f"{site}_mix")(model, stream)
        return nn.rms_norm(mixed, getattr(self, f"{site}_norm")[...], model.eps)

    def _feed_forward(self, model, stream, valid, observe, on):
        x, seen = self._read(model, stream, "ffn"), None
        if isinstance(self.ffn, MoELayer):
            y, seen = self.ffn(model, x, valid, observe=observe, transport=on.transport)
        else:
            y = self.ffn(model, x)
        return attnres.add(stream, y, close=isinstance(model.residual, c.FullAttnRes)), seen


def _add_mixer(model, stream, y, closes):
    """Adds a mixer's output; only the block form has to ask at run time whether a depth block starts here."""
    match model.residual:
        case c.PlainResidual():
            return attnres.add(stream, y)
        case c.FullAttnRes():
            return attnres.add(stream, y, close=True)
        case c.BlockAttnRes():
            return attnres.add(stream, y, close=closes)


def layer_step(model: c.ModelConfig, inputs: Inputs, *, observe: bool, capture: bool, on: Layout = ALONE):
    """One layer as the body of a scan: ``(stream, lent, final), (layer, closes) -> (stream, lent, final), report``.

    The layer reads the buffer of depth sources and keeps what ``model.remat`` says (``final``: see
    :func:`k3jax.model.memory.remembered`); the buffer is written before and after it. ``lent``: keys and values for
    layers that borrow, None where none does; the other layers never see them, and so keep none.
    """

    def layer_fn(running, sources, rest):
        layer, count, closes, inputs, lent = rest
        stream = attnres.Stream(running, sources, count)
        stream, made, report = layer(model, stream, closes, inputs, lent, observe=observe, capture=capture, on=on)
        return stream._replace(sources=None), made, report

    remembered = memory.remembered(model.remat, layer_fn)

    def step(carry, x):
        (stream, lent, final), (layer, closes) = carry, x
        stream = _open(model, stream, closes)
        rest = layer, stream.count, closes, inputs, lent if layer.borrows else None
        (after, made, report), final = remembered(stream.running, stream.sources, rest, final)
        stream = attnres.settle(after._replace(sources=stream.sources))
        return (stream, made if layer.lends(model) else lent, final), report

    return step


def _open(model, stream, closes):
    """Before a layer: makes room for what it closes (see :func:`k3jax.model.attnres.open_block`)."""
    match model.residual:
        case c.PlainResidual():
            return stream
        case c.FullAttnRes():
            return attnres.open_block(stream, True)
        case c.BlockAttnRes():
            return attnres.open_block(stream, closes)


def make_segment(model: c.ModelConfig, segment: layout.Segment) -> nnx.List:
    """One stacked :class:`Layer` per run: every parameter has leading axes [repeats, run length]."""

    def stacked(run: layout.Run) -> Layer:
        layers = jnp.zeros((segment.repeats, run.count))
        return jax.vmap(jax.vmap(lambda _: Layer(model, run.kind)))(layers)

    return nnx.List([stacked(run) for run in segment.runs])


def scan(body, carry, xs, length: int):
    """``lax.scan``, except that a loop of one is no loop: nothing to compile around it."""
    if length > 1:
        return jax.lax.scan(body, carry, xs)
    carry, y = body(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda leaf: leaf[None], y)


def run_segment(segment: layout.Segment, layer_fn, carry, xs_per_run: list):
    """Runs ``carry, y = layer_fn(carry, x)`` through every layer of a segment.

    Args:
      segment: the segment.
      layer_fn: the step of one layer.
      carry: what flows through.
      xs_per_run: for each run, a pytree with leading axes [repeats, run length].

    Returns:
      the final carry, and a list with each run's outputs stacked in the same way.
    """

    def repeat(carry, xs):
        outs = []
        for run, x in zip(segment.runs, xs):
            carry, y = scan(layer_fn, carry, x, run.count)
            outs.append(y)
        return carry, outs

    return scan(repeat, carry, xs_per_run, segment.repeats)
