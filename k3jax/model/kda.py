"""The Kimi Delta Attention layer: projections, short convolution, gates. The recurrence itself is pallas_kernels.kda.

K3 report (arXiv 2607.24653), section 2.1.1; Kimi Linear (arXiv 2510.26692).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from k3jax import config as c
from k3jax import nn, sharding
from k3jax.linear_attention import linear_attention
from k3jax.model.memory import mark
from k3jax.parallel.context import kda_context, short_conv_context
from k3jax.roles import Role
from pallas_kernels import short_conv as conv_kernel
from pallas_kernels import target
from pallas_kernels.kda import kda
from pallas_kernels.kda.inputs import log_decay

GAUGE_EVERY = 8  # tokens
CLOSED = -1e4  # a gate at which the bounded decay is exactly zero, and so is its gradient


class KDACache(NamedTuple):
    """What a KDA layer remembers of a sequence: constant in its length.

    state: [B, H, K, V] float32.
    conv: the last ``taps - 1`` inputs of the q, k and v convolutions, oldest first, three arrays [B, taps - 1, H, K].
    """

    state: Array
    conv: tuple[Array, Array, Array]


class Gauges(NamedTuple):
    """What a KDA layer shows of a batch, [] float32 each, without a gradient: sums and extremes, so that the gauges of
    several batches combine to those of all. Padding is left out.

    log_decay: sum over sampled tokens, heads and channels of the log-decay. channels: how many that are. low, high: its
    extremes. square: sum over rows and heads of the squared Frobenius norm of the state after the row's last token.
    states: how many that are, rows that are all padding left out.
    """

    log_decay: Array
    channels: Array
    low: Array
    high: Array
    square: Array
    states: Array


def gauges(log_decay_BSHK: Array, valid_BS: Array, state_BHKV: Array, filled_B: Array) -> Gauges:
    """The gauges of one batch, from the log-decay of S sampled tokens of each row and the final states.

    Args:
      valid_BS: bool, False for padding. filled_B: bool, False for rows that are all padding.
    """
    H, K = log_decay_BSHK.shape[2:]
    g, state = jax.lax.stop_gradient((log_decay_BSHK.astype(jnp.float32), state_BHKV.astype(jnp.float32)))
    inside = valid_BS[..., None, None]
    return Gauges(
        log_decay=jnp.where(inside, g, 0).sum(),
        channels=valid_BS.sum(dtype=jnp.float32) * (H * K),
        low=jnp.where(inside, g, jnp.inf).min(),
        high=jnp.where(inside, g, -jnp.inf).max(),
        square=jnp.square(state).sum(),
        states=filled_B.sum(dtype=jnp.float32) * H,
    )


def short_conv(x_BTHK: Array, weight_JHK: Array, segment_ids: Array | None, history_BJHK: Array | None = None) -> Array:
    """Causal depthwise convolution and SiLU, in float32; the last tap multiplies the current token.

    ``y[t] = sum_j weight[j] x[t - J + 1 + j]``, where inputs before the row, and of another document, count as zero.

    Args:
      x_BTHK: projection output, any float dtype.
      weight_JHK: J taps per channel.
      segment_ids: [B, T] document of each token, or None.
      history_BJHK: the J - 1 inputs before the row, of the row's first document; None is zeros.

    Returns:
      [B, T, H, K] in the dtype of ``x_BTHK``.

    A program lowered for TPU takes the kernel of :mod:`pallas_kernels.short_conv` where it takes the shapes.
    """
    if history_BJHK is not None:
        return _short_conv_plain(x_BTHK, weight_JHK, segment_ids, history_BJHK)
    missing = conv_kernel.missing_support(x_BTHK, weight_JHK)
    arrays, title = (x_BTHK, weight_JHK, segment_ids), f"short convolution of {x_BTHK.shape}"
    return target.run(conv_kernel.short_conv, _short_conv_plain, *arrays, title=title, missing=missing)


def describe_short_conv(x_BTHK, weight_JHK, *, platform: str) -> target.Choice:
    """What :func:`short_conv` runs without a history on "cpu", "gpu" or "tpu", and why; arrays or their shapes."""
    return target.describe(conv_kernel.missing_support(x_BTHK, weight_JHK), platform=platform)


def _short_conv_plain(x_BTHK, weight_JHK, segment_ids, history_BJHK=None):
    taps, time = weight_JHK.shape[0], x_BTHK.shape[1]
    if history_BJHK is None:
        history_BJHK = jnp.zeros_like(x_BTHK, shape=(x_BTHK.shape[0], taps - 1, *x_BTHK.shape[2:]))
    padded = jnp.concatenate([history_BJHK.astype(x_BTHK.dtype), x_BTHK], axis=1).astype(jnp.float32)
    total = jnp.zeros_like(x_BTHK, dtype=jnp.float32)
    for back in range(taps):
        shifted = padded[:, taps - 1 - back : taps - 1 - back + time]
        if segment_ids is not None and back:
            first = jnp.repeat(segment_ids[:, :1], back, axis=1)
            earlier = jnp.concatenate([first, segment_ids], axis=1)[:, :time]
            shifted = jnp.where((earlier == segment_ids)[..., None, None], shifted, 0)
        total += weight_JHK[taps - 1 - back] * shifted
    return jax.nn.silu(total).astype(x_BTHK.dtype)


def last_inputs(x_BTHK: Array, history_BJHK: Array, lengths_B: Array) -> Array:
    """The convolution history after ``lengths_B`` of the T new inputs of each row: [B, J, H, K]."""
    padded = jnp.concatenate([history_BJHK.astype(x_BTHK.dtype), x_BTHK], axis=1)
    window = lengths_B[:, None] + jnp.arange(history_BJHK.shape[1])
    return jnp.take_along_axis(padded, window[..., None, None], axis=1)


class KDALayer(nnx.Module):
    """Weights of one KDA layer. Released names: ``self_attn.{q,k,v}_proj`` and so on (k3jax/hf/names.py)."""

    def __init__(self, model: c.ModelConfig):
        spec, normal = model.kda, nn.Normal(model.init_std)
        D, H, K = model.dim, spec.heads, spec.head_dim
        heads, width = ("embed", "heads", "key"), (D, H, K)
        for name in "qkv":
            setattr(self, name, nn.param(name, width, role=Role.HEADS, axes=heads, init=normal))
            conv = nn.param(
                f"{name}_conv",
                (spec.conv, H, K),
                role=Role.CONV,
                axes=("tap", "heads", "key"),
                init=nn.Uniform(spec.conv**-0.5),
            )
            setattr(self, f"{name}_conv", conv)
        self.beta = nn.param("beta", (D, H), role=Role.MATRIX, axes=("embed", "heads"), init=normal)
        self._make_decay(model)
        self.out_norm = nn.norm_weight("out_norm", K, "value")
        match spec.output_gate:
            case c.FullRankGate() | c.SwishGate():
                self.gate = nn.param("gate", width, role=Role.MATRIX, axes=("embed", "heads", "value"), init=normal)
            case c.LowRankGate(rank):
                self.gate_in = nn.param("gate_in", (D, rank), role=Role.MATRIX, axes=("embed", "rank"), init=normal)
                self.gate_out = nn.param(
                    "gate_out", (rank, H, K), role=Role.MATRIX, axes=("rank", "heads", "value"), init=normal
                )
        self.out = nn.param("out", width, role=Role.MATRIX, axes=("embed", "heads", "value"), init=normal)

    def _make_decay(self, model):
        spec, normal = model.kda, nn.Normal(model.init_std)
        D, H, K, R = model.dim, spec.heads, spec.head_dim, spec.forget_rank
        match spec.decay:
            case c.NoDecay():
                return
            case c.HeadDecay():
                self.forget = nn.param("forget", (D, H), role=Role.MATRIX, axes=("embed", "heads"), init=normal)
                bias, axes = (H,), ("heads",)
            case _:
                self.forget_in = nn.param("forget_in", (D, R), role=Role.MATRIX, axes=("embed", "rank"), init=normal)
                self.forget_out = nn.param(
                    "forget_out", (R, H, K), role=Role.MATRIX, axes=("rank", "heads", "key"), init=normal
                )
                bias, axes = (H, K), ("heads", "key")
        self.A_log = nn.param("A_log", (H,), role=Role.VECTOR, axes=("heads",), init=nn.ZEROS)
        self.dt_bias = nn.param("dt_bias", bias, role=Role.VECTOR, axes=axes, init=nn.DecayBias())

    def __call__(self, model: c.ModelConfig, x_BTD: Array, segment_ids: Array | None) -> Array:
        """[B, T, D] to [B, T, D], every document from a zero state."""

        def local(layer, x, segment_ids):
            return layer._attend(model, x, segment_ids, cache=None)[0]

        return nn.on_shards(local, self, x_BTD, segment_ids, dtype=x_BTD.dtype, out=sharding.TOKENS)

    def observed(self, model: c.ModelConfig, x_BTD: Array, segment_ids: Array | None) -> tuple[Array, Gauges]:
        """The same with the layer's gauges, in which every eighth token speaks for all: decays cost an exponential
        per token and channel. On a mesh they come in parts (:func:`k3jax.sharding.partial`)."""

        def local(layer, x, segment_ids):
            y, state, _, raw_gate = layer._attend(model, x, segment_ids, cache=None)
            with jax.named_scope("kda_gauges"):
                return y, layer._gauges(model, raw_gate, state, segment_ids)

        out = sharding.TOKENS, sharding.PARTIAL
        return nn.on_shards(local, self, x_BTD, segment_ids, dtype=x_BTD.dtype, out=out)

    def _gauges(self, model, raw_gate_BTHK, state_BHKV, segment_ids):
        B, T = raw_gate_BTHK.shape[:2]
        shards, shard = sharding.size("context"), sharding.index("context")
        valid = jnp.ones((B, T * shards), bool) if segment_ids is None else jnp.asarray(segment_ids) >= 0
        # The same tokens of a row whatever shard they lie on: those that are a multiple of eight before its last.
        first = (T * shards - 1 - shard * T) % GAUGE_EVERY
        sampled = first + GAUGE_EVERY * jnp.arange(-(-T // GAUGE_EVERY))
        inside = sharding.part(valid, "context", 1)[:, jnp.minimum(sampled, T - 1)] & (sampled < T)
        gate = jax.lax.stop_gradient(raw_gate_BTHK[:, jnp.minimum(sampled, T - 1)]).astype(jnp.float32)
        g = log_decay(gate, *self._slope_and_bias(model), _lower_bound(model))
        filled = valid.any(axis=1) & (shard == shards - 1)
        return sharding.partial(gauges(g, inside, jnp.where(filled[:, None, None, None], state_BHKV, 0), filled))

    def extend(self, model: c.ModelConfig, x_BTD: Array, cache: KDACache, lengths_B: Array) -> tuple[Array, KDACache]:
        """The same for tokens that continue ``cache``; row b has ``lengths_B[b]`` real tokens, the rest is padding."""
        time = jnp.arange(x_BTD.shape[1])
        segment_ids = jnp.where(time < lengths_B[:, None], 0, -1)
        y, state, inputs, _ = self._attend(model, x_BTD, segment_ids, cache)
        conv = tuple(last_inputs(x, h, lengths_B) for x, h in zip(inputs, cache.conv))
        return y, KDACache(state, conv)

    def _attend(self, model, x_BTD, segment_ids, cache):
        """Output, final state, inputs of the convolutions, and the gate before its activation.

        On a mesh a device has its heads of all tokens of its context shard; segment_ids are of whole rows.
        """
        x_BTD, here = sharding.gather(x_BTD, "tensor", dim=1), sharding.part(segment_ids, "context", dim=1)
        in_shards = sharding.size("context") > 1
        with jax.named_scope("kda_projections"):
            inputs = [nn.einsum("btd,dhk->bthk", x_BTD, getattr(self, name)[...]) for name in "qkv"]
            raw_gate = self._raw_gate(model, x_BTD)
            beta = nn.einsum("btd,dh->bth", x_BTD, self.beta[...])
            inputs, raw_gate, beta = mark((inputs, raw_gate, beta), "projected")
        with jax.named_scope("kda_conv"):
            history = cache.conv if cache else (None,) * 3
            weights = [getattr(self, f"{name}_conv")[...] for name in "qkv"]
            if in_shards:
                q, k, v = short_conv_context(short_conv, inputs, weights, here, axis="context")
            else:
                q, k, v = (short_conv(x, w, here, h) for x, w, h in zip(inputs, weights, history))
        with jax.named_scope("kda"):
            A_log, dt_bias = self._slope_and_bias(model)
            o, state = _recurrence(model.kda.rule, in_shards)(
                *(q, k, v, raw_gate, beta),
                A_log=A_log,
                dt_bias=dt_bias,
                lower_bound=_lower_bound(model),
                segment_ids=here,
                initial_state=cache.state if cache else None,
            )
        with jax.named_scope("kda_output"):
            o = self._gated_norm(model, mark(o, "attended"), x_BTD)
            y = nn.einsum("bthv,dhv->btd", o, self.out[...])
        return sharding.scatter(y, "tensor", dim=1), state, inputs, raw_gate

    def _raw_gate(self, model, x_BTD):
        """[B, T, H, K]: the gate before bias and activation; one for all channels where the decay is the head's."""
        match model.kda.decay:
            case c.NoDecay():
                return jnp.full((*x_BTD.shape[:2], self.beta.shape[-1], model.kda.head_dim), CLOSED, x_BTD.dtype)
            case c.HeadDecay():
                gate = nn.einsum("btd,dh->bth", x_BTD, self.forget[...])
                return jnp.broadcast_to(gate[..., None], (*gate.shape, model.kda.head_dim))
        return nn.einsum("btr,rhk->bthk", nn.einsum("btd,dr->btr", x_BTD, self.forget_in[...]), self.forget_out[...])

    def _slope_and_bias(self, model):
        """A_log [H] and dt_bias [H, K] of the decay."""
        heads, K = self.beta.shape[-1], model.kda.head_dim
        match model.kda.decay:
            case c.NoDecay():
                return jnp.zeros(heads), jnp.zeros((heads, K))
            case c.HeadDecay():
                return self.A_log[...], jnp.broadcast_to(self.dt_bias[...][:, None], (heads, K))
        return self.A_log[...], self.dt_bias[...]

    def _gated_norm(self, model: c.ModelConfig, o_BTHV: Array, x_BTD: Array) -> Array:
        """Per-head RMSNorm times the output gate: all in float32, cast once (K3 report, eq. 6)."""
        normed = nn.rms_norm(o_BTHV.astype(jnp.float32), self.out_norm[...], model.eps)
        match model.kda.output_gate:
            case c.FullRankGate() | c.SwishGate():
                gate = nn.einsum("btd,dhv->bthv", x_BTD, self.gate[...])
            case c.LowRankGate():
                narrow = nn.einsum("btd,dr->btr", x_BTD, self.gate_in[...])
                gate = nn.einsum("btr,rhv->bthv", narrow, self.gate_out[...])
            case c.NoGate():
                return normed.astype(x_BTD.dtype)
        activate = jax.nn.silu if isinstance(model.kda.output_gate, c.SwishGate) else jax.nn.sigmoid
        return (normed * activate(gate.astype(jnp.float32))).astype(x_BTD.dtype)


def _recurrence(rule: c.DeltaRule | c.AdditiveRule, in_shards: bool):
    """The function of a rule, for whole rows or for shards of them."""
    if isinstance(rule, c.AdditiveRule):
        c.require(not in_shards, "KDA.rule = AdditiveRule() cannot cut rows: use a layout with context = 1")
        return linear_attention
    return partial(kda_context, axis="context") if in_shards else kda


def _lower_bound(model: c.ModelConfig) -> float | None:
    match model.kda.decay:
        case c.SoftplusDecay():
            return None
        case c.NoDecay():
            return c.BoundedDecay().lower_bound
    return model.kda.decay.lower_bound


def init_cache(model: c.ModelConfig, batch: int) -> KDACache:
    """The cache of one layer before the first token."""
    spec = model.kda
    conv = jnp.zeros((batch, spec.conv - 1, spec.heads, spec.head_dim), jnp.dtype(model.dtype))
    state = jnp.zeros((batch, spec.heads, spec.head_dim, spec.head_dim), jnp.float32)
    return KDACache(state, (conv, conv, conv))
