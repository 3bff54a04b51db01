"""Decayed linear attention: the recurrence of KDA without its delta rule and with one decay per head, as in Mamba-2.

    S_t = alpha_t S_{t-1} + beta_t k_t v_t^T        o_t = S_t^T q_t

(arXiv 2405.21060, with the normalization of queries and keys and the gates of KDA, so that the delta rule is the only
difference.) In chunks of C tokens with incoming state S and G_i the sum of log-decays up to and including token i:

    o_i = exp(G_i) S^T q_i + sum_{j <= i} exp(G_i - G_j) (q_i . k_j) beta_j v_j

Everything is float32, because sums of log-decays and the state run over thousands of tokens.
"""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.kda import inputs

CHUNK = 64


def linear_attention(
    q_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    gate_BTHK: Array,
    beta_BTH: Array,
    *,
    A_log: Array,
    dt_bias: Array,
    lower_bound: float | None,
    segment_ids: Array | None = None,
    initial_state: Array | None = None,
) -> tuple[Array, Array]:
    """Outputs [B, T, H, V] in v's dtype and the state after each row, [B, H, K, V] float32.

    Arguments as for `pallas_kernels.kda.kda`; gate and dt_bias are the same in all channels of a head, of which the
    first one counts.
    """
    docs = inputs.documents(segment_ids)
    x = inputs.prepare(
        *(q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, A_log, dt_bias), docs and docs.valid, lower_bound=lower_bound
    )
    B, T, H, K = q_BTHK.shape
    ids_BT = jnp.zeros((B, T), jnp.int32) if docs is None else docs.ids
    chunk = min(CHUNK, T)

    def split(x, mode):
        padded = jnp.pad(x, [(0, 0), (0, -T % chunk)] + [(0, 0)] * (x.ndim - 2), mode=mode)
        return padded.reshape(B, -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    arrays = x.q, x.k, x.beta[..., None] * x.v, x.log_decay[..., 0]
    xs = (*(split(array, "constant") for array in arrays), split(ids_BT, "edge"))
    state = jnp.zeros((B, H, K, v_BTHV.shape[-1]), x.q.dtype) if initial_state is None else initial_state
    (state, _), o = jax.lax.scan(_chunk, (state, ids_BT[:, 0]), xs)
    o = o.swapaxes(0, 1).reshape(B, -1, *o.shape[3:])
    return o[:, :T].astype(v_BTHV.dtype), state


def _chunk(carry, xs):
    """One chunk: the state and the document it belongs to, and the outputs [B, C, H, V]."""
    S_BHKV, document_B = carry
    q_BCHK, k_BCHK, v_BCHV, g_BCH, ids_BC = xs
    G_BCH = jnp.cumsum(g_BCH, axis=1)
    time = jnp.arange(ids_BC.shape[1])
    seen_BCC = (ids_BC[:, :, None] == ids_BC[:, None, :]) & (time[:, None] >= time)
    between_BCCH = jnp.exp(jnp.where(seen_BCC[..., None], G_BCH[:, :, None] - G_BCH[:, None, :], -jnp.inf))
    scores_BCCH = _einsum("bihk,bjhk->bijh", q_BCHK, k_BCHK) * between_BCCH
    reads_BC, writes_BC = ids_BC == document_B[:, None], ids_BC == ids_BC[:, -1:]
    from_start_BCH = jnp.where(reads_BC[..., None], jnp.exp(G_BCH), 0)
    to_end_BCH = jnp.where(writes_BC[..., None], jnp.exp(G_BCH[:, -1:] - G_BCH), 0)
    o_BCHV = _einsum("bijh,bjhv->bihv", scores_BCCH, v_BCHV)
    o_BCHV += _einsum("bihk,bhkv->bihv", from_start_BCH[..., None] * q_BCHK, S_BHKV)
    kept_BH = from_start_BCH[:, -1]
    S_BHKV = kept_BH[..., None, None] * S_BHKV + _einsum("bjhk,bjhv->bhkv", to_end_BCH[..., None] * k_BCHK, v_BCHV)
    return (S_BHKV, ids_BC[:, -1]), o_BCHV


def _einsum(equation: str, x: Array, y: Array) -> Array:
    return jnp.einsum(equation, x, y, precision=jax.lax.Precision.HIGHEST)


def linear_attention_reference(
    q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, *, A_log, dt_bias, lower_bound, segment_ids=None, initial_state=None
):
    """The recurrence, one token after the other; arguments and results as :func:`linear_attention`."""
    docs = inputs.documents(segment_ids)
    x = inputs.prepare(
        *(q_BTHK, k_BTHK, v_BTHV, gate_BTHK, beta_BTH, A_log, dt_bias), docs and docs.valid, lower_bound=lower_bound
    )
    B, T, H, K = q_BTHK.shape
    ids_BT = jnp.zeros((B, T), jnp.int32) if docs is None else docs.ids
    fresh_BT = jnp.diff(ids_BT, axis=1, prepend=ids_BT[:, :1]) != 0
    state = jnp.zeros((B, H, K, v_BTHV.shape[-1]), x.q.dtype) if initial_state is None else initial_state

    def token(S_BHKV, xs):
        q, k, v, g, beta, fresh = xs
        S_BHKV = jnp.where(fresh[:, None, None, None], 0, S_BHKV) * jnp.exp(g)[..., None]
        S_BHKV = S_BHKV + (beta[..., None] * k)[..., None] * v[..., None, :]
        return S_BHKV, _einsum("bhkv,bhk->bhv", S_BHKV, q)

    state, o = jax.lax.scan(token, state, jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (*x, fresh_BT)))
    return jnp.moveaxis(o, 0, 1).astype(v_BTHV.dtype), state
