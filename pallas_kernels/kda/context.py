"""Context parallelism for KDA: a sequence cut into shards, each summarized by what it does to the state that enters it.

A shard is affine in its incoming state, S_out = M S_in + S, and so is its backward, dS_in = M^T dS_out + dS. Shards
exchange (M, S), K (K + V) numbers per head whatever their length, and then run on their own:

  forward   segment_summary on every shard; gather; S_in = entering_states(...); kda(..., initial_state=S_in)
  backward  segment_cotangent on every shard; gather; dS_out = leaving_cotangents(...); the vjp of kda with dS_out

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


def segment_summary(k, v, gate, beta, *, A_log, dt_bias, segment_ids=None, **options) -> Summary:
    """Summary [B, H, ...] of a shard; arguments as for ``kda``, and ``options`` its lower_bound, implementation and
    chunk_size.

    The columns of M are states like any other: this is ``kda`` with K more columns, values [v | 0], from the initial
    state [0 | I]. So it is as exact as the final state of ``kda`` for these inputs, and needs K + V <= 256 on TPU.
    """
    B, T, H, K = k.shape
    V = v.shape[-1]
    dtype = arithmetic_dtype(k, v, gate, beta, A_log, dt_bias)
    wide = jnp.concatenate([v, jnp.zeros((B, T, H, K), v.dtype)], axis=-1)
    start = jnp.concatenate([jnp.zeros((K, V), dtype), jnp.eye(K, dtype=dtype)], axis=-1)
    start = jnp.broadcast_to(start, (B, H, K, V + K))
    _, final = kda(
        *(jnp.zeros_like(k), k, wide, gate, beta),
        A_log=A_log,
        dt_bias=dt_bias,
        segment_ids=segment_ids,
        initial_state=start,
        **options,
    )
    return Summary(final[..., V:], final[..., :V])


def segment_cotangent(q, k, v, gate, beta, do, *, A_log, dt_bias, segment_ids=None, **options):
    """Cotangent [B, H, K, V] of a shard's initial state if that of its final state is zero and that of o is ``do``."""
    (B, _, H, K), V = k.shape, v.shape[-1]
    zero = jnp.zeros((B, H, K, V), arithmetic_dtype(q, k, v, gate, beta, A_log, dt_bias))

    def run(state):
        decays = dict(A_log=A_log, dt_bias=dt_bias, segment_ids=segment_ids)
        return kda(q, k, v, gate, beta, initial_state=state, **decays, **options)

    _, pull = jax.vjp(run, zero)
    return pull((do.astype(v.dtype), zero))[0]


def entering_states(summaries: Summary, initial_state, continues=None):
    """The state that enters each of R shards: [R, B, H, K, V].

    Args:
      summaries: of the shards in order, with a leading axis R.
      initial_state: [B, H, K, V], enters the first one.
      continues: bool [R, B], whether the first document of a shard is the last one of the shard before (the first entry
        is not read). None: always.
    """
    states = [initial_state]
    for r in range(1, summaries.S.shape[0]):
        S = _matmul(summaries.M[r - 1], states[-1]) + summaries.S[r - 1]
        states.append(_keep(S, continues, r))
    return jnp.stack(states)


def leaving_cotangents(M, cotangents, dfinal_state, continues=None):
    """The cotangent of the state that leaves each of R shards: [R, B, H, K, V].

    Args:
      M: of the summaries, [R, B, H, K, K].
      cotangents: results of ``segment_cotangent``, [R, B, H, K, V].
      dfinal_state: [B, H, K, V], cotangent of the state that leaves the last one.
      continues: as for ``entering_states``.
    """
    leaving = [dfinal_state]
    for r in range(M.shape[0] - 1, 0, -1):
        dS = _matmul(M[r].mT, leaving[-1]) + cotangents[r]
        leaving.append(_keep(dS, continues, r))
    return jnp.stack(leaving[::-1])


def _keep(x_BHKV, continues, r):
    return x_BHKV if continues is None else jnp.where(continues[r][:, None, None, None], x_BHKV, 0)


def _matmul(a, b):
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
