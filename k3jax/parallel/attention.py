"""Attention to long rows of compressed keys: up-projected a block at a time, and never a whole matrix of logits.

FlashAttention (arXiv 2205.14135, 2307.08691) in plain JAX, with MLA's up-projections inside the loop over keys: at a
million tokens neither the expanded keys and values nor a row of logits per head fit a device. Blocks in which no query
sees a key are skipped, so that work is equal on all devices if queries are spread in zigzag (`k3jax.parallel.context`).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.shapes import PADDING_SEGMENT

_MASKED = -1e30
_NEVER = jnp.iinfo(jnp.int32).max  # the position of a key that no query sees


class _Blocks(NamedTuple):
    """Queries or keys with blocks in front: arrays [blocks, B, tokens, ...], where they stand, their documents."""

    arrays: tuple[Array, ...]
    position: Array
    segment: Array


def compressed_attention(
    q_BTHK: Array,
    latent_BSR: Array,
    shared_BSK: Array,
    k_up_RHK: Array,
    v_up_RHV: Array,
    *,
    scale: float,
    query_position: Array,
    key_position: Array,
    query_segment: Array | None = None,
    key_segment: Array | None = None,
    query_block: int = 512,
    key_block: int = 2048,
) -> tuple[Array, Array]:
    """``k3jax.model.mla.attention`` to the keys [latent k_up | shared] and values latent v_up of every head.

    Logits, softmax and all sums are float32; products take their factors in the inputs' dtype. Memory is linear in T
    and S. Kept for the gradient: the arguments, the output, and a float32 per query and head.

    Args:
      q_BTHK: queries; the last channels meet the shared key.
      latent_BSR, shared_BSK: compressed keys and values, keys shared by all heads.
      k_up_RHK, v_up_RHV: up-projections, in the compute dtype.
      scale: factor on the logits.
      query_position, key_position: [1 or B, T] and [1 or B, S].
      query_segment, key_segment: documents, likewise, or None.
      query_block, key_block: tokens in a block.

    Returns:
      output [B, T, H, V] float32 (what a query that sees no key gets is zero), and the largest logit of each head that
      a token outside of padding sees, [H] float32, without a gradient.
    """
    if query_segment is None:
        query_segment, key_segment = jnp.zeros_like(query_position), jnp.zeros_like(key_position)
    # Tied to the queries: what follows from positions alone, JAX would take out of a loop over layers, and with it the
    # masks of all pairs of blocks, heads and tokens.
    q_BTHK, queries, keys = lax.optimization_barrier(
        (q_BTHK, (query_position, query_segment), (key_position, key_segment))
    )
    static = scale, min(query_block, q_BTHK.shape[1]), min(key_block, latent_BSR.shape[1])
    o, max_BHT = _attend(static, q_BTHK, (latent_BSR, shared_BSK), (k_up_RHK, v_up_RHV), queries, keys)
    counts = (query_segment != PADDING_SEGMENT)[:, None]
    return o, lax.stop_gradient(jnp.where(counts, max_BHT, _MASKED).max(axis=(0, 2)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, q, cached, ups, queries, keys):
    return _attend_fwd(static, q, cached, ups, queries, keys)[0]


def _attend_fwd(static, q, cached, ups, queries, keys):
    scale, query_block, key_block = static
    (B, T, H, _), V = q.shape, ups[1].shape[-1]
    blocks = _split_queries((q,), queries, query_block)
    start = len(blocks.position), B, H, blocks.position.shape[2]
    running = jnp.full(start, _MASKED), jnp.zeros(start), jnp.zeros((*start, V))

    def over_keys(running, key):
        k, v = _expand(ups, *key.arrays)

        def one(args):
            block, running = args
            return _where_seen(block, key, lambda seen: _update(scale, block.arrays[0], k, v, seen, *running), running)

        return lax.map(one, (blocks, running)), None

    (top, total, out), _ = lax.scan(over_keys, running, _split_keys(cached, keys, key_block))
    some = total > 0
    o = _join(jnp.where(some[..., None], out / jnp.where(some, total, 1)[..., None], 0), T).swapaxes(1, 2)
    log_total = _join(jnp.where(some, top + jnp.log(jnp.where(some, total, 1)), -_MASKED), T)
    return (o, _join(top, T)), (q, cached, ups, queries, keys, o, log_total)


def _attend_bwd(static, saved, cotangents):
    scale, query_block, key_block = static
    q, cached, ups, queries, keys, o, log_total = saved
    do = cotangents[0]
    rows = (do * o).sum(axis=-1).swapaxes(1, 2)
    arrays = q, do.astype(q.dtype), log_total.swapaxes(1, 2), rows.swapaxes(1, 2)
    blocks = _split_queries(arrays, queries, query_block)
    T, S = q.shape[1], cached[0].shape[1]

    def over_keys(carry, key):
        dq, dups = carry
        (k, v), pull = jax.vjp(_expand, ups, *key.arrays)

        def one(dkv, args):
            block, dq = args
            same = dq, dkv
            dq, dkv = _where_seen(block, key, lambda seen: _gradients(scale, *block.arrays, k, v, seen, dq, dkv), same)
            return dkv, dq

        zero = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
        dkv, dq = lax.scan(one, zero, (blocks, dq))
        dup, *dcached = pull(tuple(d.astype(x.dtype) for d, x in zip(dkv, (k, v))))
        return (dq, jax.tree.map(lambda total, d: total + d.astype(jnp.float32), dups, dup)), tuple(dcached)

    zero = jnp.zeros(blocks.arrays[0].shape, jnp.float32), jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), ups)
    (dq, dups), dcached = lax.scan(over_keys, zero, _split_keys(cached, keys, key_block))
    dq = dq.swapaxes(0, 1).reshape(q.shape[0], -1, *q.shape[2:])[:, :T].astype(q.dtype)
    dcached = tuple(d.swapaxes(0, 1).reshape(q.shape[0], -1, d.shape[-1])[:, :S] for d in dcached)
    return dq, dcached, jax.tree.map(lambda d, w: d.astype(w.dtype), dups, ups), None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _expand(ups, latent, shared):
    k_up, v_up = ups
    k = jnp.einsum("bsr,rhk->bshk", latent, k_up)
    shared = jnp.broadcast_to(shared[:, :, None], (*k.shape[:3], shared.shape[-1]))
    return jnp.concatenate([k, shared], axis=-1), jnp.einsum("bsr,rhv->bshv", latent, v_up)


def _where_seen(block, key, work, otherwise):
    """``work(seen)`` if any query of the block sees any of the keys; seen is [1 or B, 1, T, S]."""
    seen = block.position[:, :, None] >= key.position[:, None, :]
    seen &= block.segment[:, :, None] == key.segment[:, None, :]
    return lax.cond(seen.any(), work, lambda seen: otherwise, seen[:, None])


def _update(scale, q, k, v, seen, top, total, out):
    """The running maximum, sum and output of a block of queries, with one more block of keys."""
    logits = _einsum("bthk,bshk->bhts", q, k) * scale
    logits = jnp.where(seen, logits, _MASKED)
    higher = jnp.maximum(top, logits.max(axis=-1))
    weights = jnp.where(seen, jnp.exp(logits - higher[..., None]), 0)
    shrink = jnp.exp(top - higher)
    out = shrink[..., None] * out + _einsum("bhts,bshv->bhtv", weights.astype(v.dtype), v)
    return higher, shrink * total + weights.sum(axis=-1), out


def _gradients(scale, q, do, log_total, rows, k, v, seen, dq, dkv):
    """The gradients of a block of queries and of a block of keys, with what they owe each other."""
    logits = _einsum("bthk,bshk->bhts", q, k) * scale
    weights = jnp.where(seen, jnp.exp(logits - log_total.swapaxes(1, 2)[..., None]), 0)
    dweights = _einsum("bthv,bshv->bhts", do, v)
    dlogits = (weights * (dweights - rows.swapaxes(1, 2)[..., None]) * scale).astype(q.dtype)
    dk, dv = dkv
    dk += _einsum("bhts,bthk->bshk", dlogits, q)
    dv += _einsum("bhts,bthv->bshv", weights.astype(do.dtype), do)
    return dq + _einsum("bhts,bshk->bthk", dlogits, k), (dk, dv)


def _einsum(equation, *arrays):
    return jnp.einsum(equation, *arrays, preferred_element_type=jnp.float32)


def _split_queries(arrays, where, size) -> _Blocks:
    """Queries that fill up the last block stand before all keys."""
    return _split(arrays, where, size, position=-1)


def _split_keys(arrays, where, size) -> _Blocks:
    return _split(arrays, where, size, position=_NEVER)


def _split(arrays, where, size, *, position) -> _Blocks:
    def split(x, fill=0):
        widths = [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, widths, constant_values=fill)
        return x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)

    places, segments = where
    return _Blocks(tuple(map(split, arrays)), split(places, position), split(segments, PADDING_SEGMENT))


def _join(x, T):
    """[blocks, B, H, tokens, ...] to [B, H, T, ...]."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])[:, :, :T]
