"""Context parallelism for KDA: a sequence cut into shards, each summarized by what it does to the state that enters it.

A shard is affine in its incoming state, S_out = M S_in + S, and so is its backward, dS_in = M^T dS_out + dS. Shards
exchange (M, S), K (K + V) numbers per head whatever their length, and then run on their own:

  forward   segment_summary on every shard; gather; S_in = entering_state(...); kda(..., initial_state=S_in)
  backward  dS, what the vjp of kda gives for the initial state; gather; dS_out += leaving_cotangent(...); the vjp again

M, S and their chains are float32: errors of M multiply along the shards.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.api import kda
from pallas_kernels.kda.inputs import arithmetic_dtype


class Summary(NamedTuple):
    """A shard's final state as a function of its initial one, M S_in + S; float32 (float64 with float64 inputs)."""

    M: jax.Array  # [..., H, K, K]; zero if another document ends the shard, the identity if it is all padding
    S: jax.Array  # [..., H, K, V]


def segment_summary(k, v, gate, beta, *, A_log, dt_bias, segment_ids=None, initial_state=None, **options) -> Summary:
    """Summary [B, H, ...] of a shard; arguments as for ``kda``, and ``options`` its lower_bound, implementation and
    chunk_size. With an initial state, S is the final state that it leads to, M S_in included.

    The columns of M are states like any other: they are what ``kda`` without values makes of the identity, as S is what
    it makes of the initial state. So both are as exact as the final state of ``kda`` for these inputs.
    """
    (B, _, H, K), V = k.shape, v.shape[-1]
    dtype = arithmetic_dtype(k, v, gate, beta, A_log, dt_bias)

    def final(v, start):
        rest = dict(A_log=A_log, dt_bias=dt_bias, segment_ids=segment_ids, initial_state=start, **options)
        return kda(jnp.zeros_like(k), k, v, gate, beta, **rest)[1]

    state = jnp.zeros((B, H, K, V), dtype) if initial_state is None else initial_state
    identity = jnp.broadcast_to(jnp.eye(K, dtype=dtype), (B, H, K, K))
    return Summary(final(jnp.zeros_like(k), identity), final(v, state))


def entering_state(summaries: Summary, initial_state, shard, continues=None):
    """The state [B, H, K, V] that enters one of R shards: those before it, folded in order.

    Args:
      summaries: of the shards in order, with a leading axis R.
      initial_state: [B, H, K, V], enters the first one.
      shard: which one, an integer or int [].
      continues: bool [R, B], whether the first document of a shard is the last one before it (the first entry is not
        read). None: always.
    """

    def step(state, part):
        r, M, S, keep = part
        after = _keep(_matmul(M, state) + S, keep)
        return jnp.where(r < shard, after, state), None

    M, S = summaries
    following = None if continues is None else continues[1:]
    return jax.lax.scan(step, initial_state, (jnp.arange(len(S) - 1), M[:-1], S[:-1], following))[0]


def leaving_cotangent(M, cotangents, shard, continues=None):
    """What later shards add to the cotangent of the state that leaves one of R shards: [B, H, K, V].

    Args:
      M: of the summaries, [R, B, H, K, K].
      cotangents: of the state that enters each shard, from its own outputs and its own final state, [R, B, H, K, V].
      shard, continues: as for ``entering_state``.
    """

    def step(dstate, part):
        r, M, own, keep = part
        before = _keep(_matmul(M.mT, dstate) + own, keep)
        return jnp.where(r > shard, before, dstate), None

    following = None if continues is None else continues[1:]
    parts = jnp.arange(1, len(M)), M[1:], cotangents[1:], following
    return jax.lax.scan(step, jnp.zeros_like(cotangents[0]), parts, reverse=True)[0]


def _keep(x_BHKV, keep_B):
    return x_BHKV if keep_B is None else jnp.where(keep_B[:, None, None, None], x_BHKV, 0)


def _matmul(a, b):
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
