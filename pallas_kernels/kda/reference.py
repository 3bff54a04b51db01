"""Kimi Delta Attention as its equation: one token after the other.

Kimi Linear (arXiv 2510.26692), eq. 1; per head, with state S in R^{K x V} and decay alpha_t = exp(log_decay_t):

  S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T
  o_t = S_t^T q_t

The decay acts before the delta correction, and the output reads the state after the update. Everything is float32, or
float64 when an input is.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.kda import inputs


def delta_step(S_KV, q_K, k_K, v_V, log_decay_K, beta):
    """One token of the recurrence for any leading axes; returns (o [..., V], new state [..., K, V])."""
    S_KV = jnp.exp(log_decay_K)[..., None] * S_KV
    error_V = v_V - _read(S_KV, k_K)
    S_KV = S_KV + (beta[..., None] * k_K)[..., None] * error_V[..., None, :]
    return _read(S_KV, q_K), S_KV


def kda_reference(
    q, k, v, gate, beta, A_log, dt_bias, initial_state, segment_ids, *, lower_bound, num_segments, chunk_size
):
    """The recurrence over whole sequences; arguments as `pallas_kernels.kda.kda`, whose checks have passed."""
    del chunk_size
    B, T = q.shape[:2]
    docs = inputs.documents(segment_ids)
    x = inputs.prepare(q, k, v, gate, beta, A_log, dt_bias, docs and docs.valid, lower_bound=lower_bound)
    ids_BT = jnp.zeros((B, T), jnp.int32) if docs is None else docs.ids
    # One slot per document if states were asked for by document; else one slot that every new document finds empty.
    per_document = num_segments is not None
    slot_BT = ids_BT if per_document else jnp.zeros_like(ids_BT)
    fresh_BT = jnp.zeros((B, T), bool) if per_document else jnp.diff(ids_BT, axis=1, prepend=ids_BT[:, :1]) != 0
    shape = inputs.state_shape(q, v, num_segments)
    slots = jnp.zeros(shape, x.q.dtype) if initial_state is None else initial_state
    slots_BNHKV = slots if per_document else slots[:, None]
    rows = jnp.arange(B)

    def token(slots_BNHKV, xs):
        slot_B, fresh_B, *x_t = xs
        S_BHKV = jnp.where(fresh_B[:, None, None, None], 0, slots_BNHKV[rows, slot_B])
        o_BHV, S_BHKV = delta_step(S_BHKV, *x_t)
        return slots_BNHKV.at[rows, slot_B].set(S_BHKV), o_BHV

    time_first = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (slot_BT, fresh_BT, *x))
    slots_BNHKV, o_TBHV = jax.lax.scan(token, slots_BNHKV, time_first)
    o_BTHV = jnp.moveaxis(o_TBHV, 0, 1).astype(v.dtype)
    return o_BTHV, slots_BNHKV if per_document else slots_BNHKV[:, 0]


def _read(S_KV, x_K):
    return jnp.einsum("...kv,...k->...v", S_KV, x_K, precision=jax.lax.Precision.HIGHEST)
