"""Gated multi-head latent attention: expanded for training and prefill, absorbed for decoding.

K3 report (arXiv 2607.24653), section 2.1.2, eq. 7; MLA itself is DeepSeek-V2 (arXiv 2405.04434).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from k3jax import config as c
from k3jax import nn, sharding
from k3jax.config_layout import ALONE
from k3jax.model.memory import mark
from k3jax.parallel.attention import compressed_attention
from k3jax.parallel.context import QueryOrder, mla_context
from k3jax.roles import Role
from k3jax.shapes import PADDING_SEGMENT

COMPRESSION_EPS = 1e-6
QUERY_BLOCK = 512
_MASKED = -1e30


class MLACache(NamedTuple):
    """What an MLA layer remembers of a sequence, and what layers share: the compressed keys and values only.

    latent: [B, S, R] normalized latents in the compute dtype. shared_key: [B, S, shared_dim].
    """

    latent: Array
    shared_key: Array


def attention(
    q_BTHK: Array,
    k_BSHK: Array,
    v_BSHV: Array,
    *,
    scale: float,
    query_position: Array,
    key_position: Array,
    query_segment: Array | None = None,
    key_segment: Array | None = None,
) -> tuple[Array, Array]:
    """Causal softmax attention within documents, a block of queries at a time.

    Logits and softmax are float32, and so is the output, which removes the biased rounding of a bfloat16
    accumulation (K3 report, section 2.1.2). Blocks are rematerialized: memory is linear in T.

    Args:
      q_BTHK, k_BSHK, v_BSHV: queries, keys, values.
      scale: factor on the logits.
      query_position, key_position: [B, T] and [B, S] (or broadcastable) token positions.
      query_segment, key_segment: documents, or None.

    Returns:
      output [B, T, H, V] float32, and the largest logit of each head that a token outside of padding sees, [H] float32,
      without a gradient.
    """
    T = q_BTHK.shape[1]
    query_position = jnp.broadcast_to(query_position, q_BTHK.shape[:2])

    def block(q, position, segment):
        logits = jnp.einsum("bthk,bshk->bhts", q, k_BSHK, preferred_element_type=jnp.float32) * scale
        seen = position[:, :, None] >= key_position[:, None, :]
        if segment is not None:
            seen &= segment[:, :, None] == key_segment[:, None, :]
        logits = jnp.where(seen[:, None], logits, _MASKED)
        weights = jax.nn.softmax(logits, axis=-1).astype(v_BSHV.dtype)
        out = jnp.einsum("bhts,bshv->bthv", weights, v_BSHV, preferred_element_type=jnp.float32)
        if segment is not None:
            logits = jnp.where((segment != PADDING_SEGMENT)[:, None, :, None], logits, _MASKED)
        return out, jax.lax.stop_gradient(logits.max(axis=(0, 2, 3)))

    if T <= QUERY_BLOCK:
        return block(q_BTHK, query_position, query_segment)
    blocks = -(-T // QUERY_BLOCK)

    def split(x, fill):
        if x is None:
            return None
        widths = [(0, 0), (0, blocks * QUERY_BLOCK - T)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, widths, constant_values=fill)
        return x.reshape(x.shape[0], blocks, QUERY_BLOCK, *x.shape[2:]).swapaxes(0, 1)

    # No key stands at or before position -1: queries that fill up the last block see nothing.
    parts = split(q_BTHK, 0), split(query_position, -1), split(query_segment, PADDING_SEGMENT)
    out, max_logit = jax.lax.map(lambda part: jax.checkpoint(block)(*part), parts)
    out = out.swapaxes(0, 1).reshape(out.shape[1], blocks * QUERY_BLOCK, *out.shape[3:])
    return out[:, :T], max_logit.max(axis=0)


def rotate(x: Array, position: Array, theta: float) -> Array:
    """Rotary encoding of adjacent pairs of the last axis (arXiv 2104.09864), in float32.

    Args:
      x: [B, T, ..., 2n]. position: [B, T] or [1, T].
    """
    half = x.shape[-1] // 2
    angle = position.astype(jnp.float32)[..., None] * theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = angle.reshape(*angle.shape[:2], *(1,) * (x.ndim - 3), half)
    even, odd = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape).astype(x.dtype)


class MLALayer(nnx.Module):
    """Weights of one gated MLA layer. One that ``borrows`` has none that make compressed keys and values."""

    def __init__(self, model: c.ModelConfig, *, borrows: bool = False):
        spec, normal = model.mla, nn.Normal(model.init_std)
        D, H, R = model.dim, spec.heads, spec.kv_rank
        if spec.q_rank is None:
            self.q = nn.param("q", (D, H, spec.qk_dim), role=Role.HEADS, axes=("embed", "heads", "key"), init=normal)
        else:
            self.q_down = nn.param("q_down", (D, spec.q_rank), role=Role.MATRIX, axes=("embed", "rank"), init=normal)
            self.q_norm = nn.norm_weight("q_norm", spec.q_rank, "width")
            self.q_up = nn.param(
                "q_up", (spec.q_rank, H, spec.qk_dim), role=Role.HEADS, axes=("rank", "heads", "key"), init=normal
            )
        if not borrows:
            self.kv_down = nn.param(
                "kv_down", (D, R + spec.shared_dim), role=Role.MATRIX, axes=("embed", "rank"), init=normal
            )
            self.kv_norm = nn.norm_weight("kv_norm", R, "width")
        self.k_up = nn.param("k_up", (R, H, spec.nope_dim), role=Role.HEADS, axes=("rank", "heads", "key"), init=normal)
        self.v_up = nn.param("v_up", (R, H, spec.v_dim), role=Role.HEADS, axes=("rank", "heads", "value"), init=normal)
        value = ("embed", "heads", "value")
        if isinstance(spec.output_gate, c.FullRankGate):
            self.gate = nn.param("gate", (D, H, spec.v_dim), role=Role.MATRIX, axes=value, init=normal)
        self.out = nn.param("out", (D, H, spec.v_dim), role=Role.MATRIX, axes=value, init=normal)

    @property
    def borrows(self) -> bool:
        """Whether it reads the compressed keys and values of an earlier layer."""
        return not hasattr(self, "kv_down")

    def lends(self, model: c.ModelConfig) -> bool:
        """Whether later layers may read its compressed keys and values."""
        return model.mla.share > 1 and not self.borrows

    def __call__(
        self,
        model: c.ModelConfig,
        x_BTD: Array,
        segment_ids: Array | None,
        lent: MLACache | None = None,
        *,
        order: QueryOrder = ALONE.mla,
    ) -> tuple[Array, Array, MLACache | None]:
        """[B, T, D] to [B, T, D], the largest attention logit of each head, [H], and what the layer lends to later ones
        if it does. ``lent``: what a layer that borrows was lent. ``order``: which device attends from which tokens,
        where rows are cut."""
        local = partial(MLALayer._local, model=model, order=order)
        out = sharding.TOKENS, sharding.HEADS, sharding.TOKENS
        return nn.on_shards(local, self, x_BTD, segment_ids, lent, dtype=x_BTD.dtype, out=out)

    def _local(self, x_BTD, segment_ids, lent, *, model, order):
        """On a mesh a device has its heads of the tokens of its context shard, and attends to keys of whole rows. What
        is lent lies like the stream in between."""
        x_BTD, lent = jax.tree.map(partial(sharding.gather, axes="tensor", dim=1), (x_BTD, lent))
        T = x_BTD.shape[1]
        position = sharding.index("context") * T + jnp.arange(T)[None]
        q, (latent, shared) = self._project(model, x_BTD, position, lent)
        if sharding.size("context") > 1:
            attend = partial(self._compressed, model)
            o, max_logit = mla_context(attend, q, latent, shared, segment_ids, axis="context", order=order)
        else:
            o, max_logit = self._expanded(model, q, latent, shared, position, position, segment_ids, segment_ids)
        y = self._output(model, mark(o, "attended"), x_BTD)
        max_logit = sharding.largest(max_logit, (*sharding.BATCH_AXES, "context"))
        made = sharding.part(MLACache(latent, shared), "tensor", dim=1) if self.lends(model) else None
        return sharding.scatter(y, "tensor", dim=1), max_logit, made

    def extend(self, model: c.ModelConfig, x_BTD: Array, cache: MLACache, start_B: Array) -> tuple[Array, MLACache]:
        """The same for T tokens of each row at positions ``start_B + t``, which continue ``cache``. A layer that
        borrows gets the cache of the other layer, which has them already.

        One token is decoded in the absorbed form, which reads the latent as it is; several are a prefill, for which
        the expanded form costs a third of the arithmetic. Tokens past the cache's end are dropped.
        """
        position = start_B[:, None] + jnp.arange(x_BTD.shape[1])
        q, new = self._project(model, x_BTD, position, cache if self.borrows else None)
        if not self.borrows:
            rows = jnp.arange(x_BTD.shape[0])[:, None]
            cache = MLACache(
                cache.latent.at[rows, position].set(new.latent.astype(cache.latent.dtype), mode="drop"),
                cache.shared_key.at[rows, position].set(new.shared_key.astype(cache.shared_key.dtype), mode="drop"),
            )
        slots = jnp.arange(cache.latent.shape[1])[None]
        attend = self._absorbed if x_BTD.shape[1] == 1 else self._expanded
        o, _ = attend(model, q, cache.latent, cache.shared_key, position, slots)
        return self._output(model, o, x_BTD), cache

    def _project(self, model, x_BTD, position, lent):
        """Queries [B, T, H, qk], and compressed keys and values, which are those that were lent, if any."""
        with jax.named_scope("mla_projections"):
            q = self._queries(model, x_BTD, position)
            if lent is not None:
                return mark(q, "projected"), lent
            return mark((q, self._compress(model, x_BTD, position)), "projected")

    def _queries(self, model, x_BTD, position):
        spec = model.mla
        if spec.q_rank is None:
            q = nn.einsum("btd,dhk->bthk", x_BTD, self.q[...])
        else:
            narrow = nn.einsum("btd,dr->btr", x_BTD, self.q_down[...])
            narrow = nn.rms_norm(narrow, self.q_norm[...], COMPRESSION_EPS)
            q = nn.einsum("btr,rhk->bthk", narrow, self.q_up[...])
        if isinstance(spec.position, c.RoPE):
            turned = rotate(q[..., spec.nope_dim :], position, spec.position.theta)
            q = jnp.concatenate([q[..., : spec.nope_dim], turned], axis=-1)
        return q

    def _compress(self, model, x_BTD, position):
        """Normalized latent [B, T, R] and shared key [B, T, shared_dim]."""
        spec = model.mla
        latent, shared = jnp.split(nn.einsum("btd,dr->btr", x_BTD, self.kv_down[...]), [spec.kv_rank], axis=-1)
        latent = nn.rms_norm(latent, self.kv_norm[...], COMPRESSION_EPS)
        if isinstance(spec.position, c.RoPE):
            shared = rotate(shared, position, spec.position.theta)
        return MLACache(latent, shared)

    def _expanded(self, model, q, latent, shared, query_position, key_position, query_segment=None, key_segment=None):
        with jax.named_scope("mla_expanded"):
            k = nn.einsum("bsr,rhk->bshk", latent, self.k_up[...])
            v = nn.einsum("bsr,rhv->bshv", latent, self.v_up[...])
            k = jnp.concatenate([k, jnp.broadcast_to(shared[:, :, None], (*k.shape[:3], shared.shape[-1]))], axis=-1)
            return attention(
                q,
                k,
                v,
                scale=model.mla.qk_dim**-0.5,
                query_position=query_position,
                key_position=key_position,
                query_segment=query_segment,
                key_segment=key_segment,
            )

    def _compressed(self, model, q, latent, shared, query_position, key_position, query_segment, key_segment):
        """As :meth:`_expanded`, for rows so long that their keys and values are expanded a block at a time."""
        with jax.named_scope("mla_compressed"):
            return compressed_attention(
                *(q, latent, shared, self.k_up[...].astype(q.dtype), self.v_up[...].astype(q.dtype)),
                scale=model.mla.qk_dim**-0.5,
                query_position=query_position,
                key_position=key_position,
                query_segment=query_segment,
                key_segment=key_segment,
            )

    def _absorbed(self, model, q, latent, shared, query_position, key_position):
        """The key and value up-projections moved to the query and the output: one key head of width R + shared."""
        nope = model.mla.nope_dim
        with jax.named_scope("mla_absorbed"):
            q_latent = nn.einsum("bthk,rhk->bthr", q[..., :nope], self.k_up[...])
            q = jnp.concatenate([q_latent, q[..., nope:]], axis=-1)
            k = jnp.concatenate([latent, shared], axis=-1)
            logits = jnp.einsum("bthk,bsk->bths", q, k, preferred_element_type=jnp.float32) * model.mla.qk_dim**-0.5
            seen = query_position[:, :, None] >= key_position[:, None, :]
            logits = jnp.where(seen[:, :, None], logits, _MASKED)
            weights = jax.nn.softmax(logits, axis=-1).astype(latent.dtype)
            mixed = jnp.einsum("bths,bsr->bthr", weights, latent, preferred_element_type=jnp.float32)
            o = jnp.einsum("bthr,rhv->bthv", mixed, self.v_up[...], preferred_element_type=jnp.float32)
        return o, logits.max(axis=(0, 1, 3))

    def _output(self, model, o_BTHV, x_BTD):
        """Output gate in float32 on the float32 attention output, then the output projection."""
        with jax.named_scope("mla_output"):
            if isinstance(model.mla.output_gate, c.FullRankGate):
                gate = nn.einsum("btd,dhv->bthv", x_BTD, self.gate[...])
                o_BTHV = o_BTHV * jax.nn.sigmoid(gate.astype(jnp.float32))
            return nn.einsum("bthv,dhv->btd", o_BTHV.astype(x_BTD.dtype), self.out[...])


def init_cache(model: c.ModelConfig, batch: int, length: int) -> MLACache:
    """The cache of one layer with room for ``length`` tokens a row."""
    dtype = jnp.dtype(model.dtype)
    return MLACache(
        jnp.zeros((batch, length, model.mla.kv_rank), dtype), jnp.zeros((batch, length, model.mla.shared_dim), dtype)
    )
