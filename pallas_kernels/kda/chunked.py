"""Kimi Delta Attention in chunks of C tokens: the form for CPU and GPU, and the check of the TPU kernels.

Kimi Linear (arXiv 2510.26692), section 3, with the right-hand side folded. Inside a chunk with incoming state S and
G_i = sum of log-decays up to and including token i:

  A_ij = <q_i, k_j exp(G_i - G_j)>  (i >= j)        B_ij = <k_i, k_j exp(G_i - G_j)>  (i > j)
  R = V - (K exp(G)) S                              N = Diag(beta) T R,  T = (I + B Diag(beta))^-1
  O = (Q exp(G)) S + A N                            S' = Diag(exp(G_C)) S + (K exp(G_C - G))^T N

A scan runs over chunks, never over tokens. Its backward keeps the inputs, the state at the start of each chunk, and T.
The inverse needs no derivative of its own: dR = T^T Diag(beta) dN and dB = -stril(dR N^T).

Everything is float32 (float64 when an input is), and every product asks for full precision, because the inverse and the
sums of log-decays amplify rounding.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.kda import inputs, slots
from pallas_kernels.kda.intra_chunk import Factors, factors, matmul, unit_lower_inverse


def kda_chunked(
    q, k, v, gate, beta, A_log, dt_bias, initial_state, segment_ids, *, lower_bound, num_segments, chunk_size
):
    """The chunk form over whole sequences; arguments as ``pallas_kernels.kda.kda``, whose checks have passed."""
    dtype = inputs.arithmetic_dtype(q, k, v, gate, beta, A_log, dt_bias)
    parameters = A_log.astype(dtype), dt_bias.astype(dtype)
    shape = inputs.state_shape(q, v, num_segments)
    initial = jnp.zeros(shape, dtype) if initial_state is None else initial_state
    slots_BNHKV = initial if num_segments is not None else initial[:, None]
    docs = slots.chunk_documents(segment_ids, q.shape[:2], chunk_size, per_document=num_segments is not None)
    o, slots_BNHKV = _kda(lower_bound, chunk_size, (q, k, v, gate, beta), parameters, slots_BNHKV, docs)
    return o, slots_BNHKV if num_segments is not None else slots_BNHKV[:, 0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kda(lower_bound, chunk, tokens, parameters, slots_BNHKV, docs):
    return _kda_fwd(lower_bound, chunk, tokens, parameters, slots_BNHKV, docs)[0]


def _kda_fwd(lower_bound, chunk, tokens, parameters, initial_BNHKV, docs):
    v = tokens[2]
    chunks = tuple(_split(x, chunk) for x in tokens)
    static = dict(lower_bound=lower_bound, by_document=initial_BNHKV.shape[1] > 1)

    def step(slots_BNHKV, xs):
        index, doc = xs
        x = _prepare(_at(chunks, index), parameters, doc, lower_bound)
        start_BHKV = slots.entering_state(slots_BNHKV, doc)
        o_BHCV, slots_BNHKV, T_BHCC = _chunk_fwd(x, slots_BNHKV, doc, static)
        return slots_BNHKV, (o_BHCV.swapaxes(1, 2).astype(v.dtype), start_BHKV, T_BHCC)

    count = chunks[0].shape[1]
    final_BNHKV, (o, starts, inverses) = jax.lax.scan(step, initial_BNHKV, (jnp.arange(count), docs))
    starts, inverses = checkpoint_name((starts, inverses), "states")
    residuals = (tokens, parameters, initial_BNHKV, docs, starts, inverses)
    return (_join(o, v.shape[1]), final_BNHKV), residuals


def _kda_bwd(lower_bound, chunk, residuals, cotangents):
    tokens, parameters, initial_BNHKV, docs, starts, inverses = residuals
    do, dfinal_BNHKV = cotangents
    chunks = tuple(_split(x, chunk) for x in (*tokens, do))
    static = dict(lower_bound=lower_bound, by_document=initial_BNHKV.shape[1] > 1)

    def step(carry, xs):
        dslots_BNHKV, dparameters = carry
        index, doc, start_BHKV, T_BHCC = xs
        *raw, do_BCHV = _at(chunks, index)
        slots_BNHKV = slots.with_entering_state(initial_BNHKV, start_BHKV, doc)
        x, pull = jax.vjp(lambda raw, parameters: _prepare(raw, parameters, doc, lower_bound), raw, parameters)
        do_BHCV = do_BCHV.swapaxes(1, 2).astype(x.v.dtype)
        dx, dslots_BNHKV = _chunk_bwd(x, T_BHCC, slots_BNHKV, doc, static, do_BHCV, dslots_BNHKV)
        draw, dp = pull(dx)
        return (dslots_BNHKV, jax.tree.map(jnp.add, dparameters, dp)), draw

    carry = dfinal_BNHKV, jax.tree.map(jnp.zeros_like, parameters)
    xs = jnp.arange(chunks[0].shape[1]), docs, starts, inverses
    (dinitial_BNHKV, dparameters), draw = jax.lax.scan(step, carry, xs, reverse=True)
    return tuple(_join(x, do.shape[1]) for x in draw), dparameters, dinitial_BNHKV, None


_kda.defvjp(_kda_fwd, _kda_bwd)


def _chunk_fwd(x, slots_BNHKV, doc, static):
    """One chunk: its output, the slots at its end, and T."""
    f = factors(x.q, x.k, x.log_decay, doc.same_BCC, **static)
    beta_BHC1 = x.beta[..., None]
    T_BHCC = unit_lower_inverse(f.B_CC * beta_BHC1.mT)
    N_BHCV = beta_BHC1 * matmul(T_BHCC, x.v - slots.read(slots_BNHKV, f.k_start_CK, doc.read_BC))
    o_BHCV = slots.read(slots_BNHKV, f.q_start_CK, doc.read_BC) + matmul(f.A_CC, N_BHCV)
    return o_BHCV, slots.update(slots_BNHKV, f.decay_CK, [(f.k_end_CK, N_BHCV)], doc.write_BC, doc.keep_B), T_BHCC


def _chunk_bwd(x, T_BHCC, slots_BNHKV, doc, static, do_BHCV, dslots_BNHKV):
    """Cotangents of a chunk's inputs and initial slots, given those of its output and final slots."""
    f, pull = jax.vjp(lambda q, k, g: factors(q, k, g, doc.same_BCC, **static), x.q, x.k, x.log_decay)
    beta_BHC1 = x.beta[..., None]
    E_BHCV = matmul(T_BHCC, x.v - slots.read(slots_BNHKV, f.k_start_CK, doc.read_BC))
    N_BHCV = beta_BHC1 * E_BHCV
    dN_BHCV = matmul(f.A_CC.mT, do_BHCV) + slots.read(dslots_BNHKV, f.k_end_CK, doc.write_BC)
    dR_BHCV = matmul(T_BHCC.mT, beta_BHC1 * dN_BHCV)
    df = Factors(
        A_CC=matmul(do_BHCV, N_BHCV.mT),
        B_CC=matmul(-dR_BHCV, N_BHCV.mT),
        q_start_CK=slots.read_transposed(slots_BNHKV, do_BHCV, doc.read_BC),
        k_start_CK=slots.read_transposed(slots_BNHKV, -dR_BHCV, doc.read_BC),
        k_end_CK=slots.read_transposed(dslots_BNHKV, N_BHCV, doc.write_BC),
        decay_CK=slots.decay_cotangent(slots_BNHKV, dslots_BNHKV, f.decay_CK, doc.write_BC, doc.keep_B),
    )
    dq, dk, dg = pull(df)
    # A beta of zero is padding or a saturated sigmoid: neither passes a gradient on.
    dbeta = jnp.sum(E_BHCV * dR_BHCV, axis=-1) / jnp.where(x.beta > 0, x.beta, 1)
    outer = [(f.q_start_CK, do_BHCV), (f.k_start_CK, -dR_BHCV)]
    dslots_BNHKV = slots.update(dslots_BNHKV, f.decay_CK, outer, doc.read_BC, doc.keep_B)
    return inputs.Prepared(dq, dk, dR_BHCV, dg, dbeta), dslots_BNHKV


def _prepare(raw, parameters, doc, lower_bound) -> inputs.Prepared:
    """Prepared inputs of one chunk, heads before tokens."""
    x = inputs.prepare(*raw, *parameters, doc.valid_BC, lower_bound=lower_bound)
    return jax.tree.map(lambda a: a.swapaxes(1, 2), x)


def _split(x, chunk):
    """[B, T, ...] -> [B, chunks, C, ...], padded with zeros."""
    padded = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk)] + [(0, 0)] * (x.ndim - 2))
    return padded.reshape(x.shape[0], -1, chunk, *x.shape[2:])


def _at(chunks, index):
    return tuple(jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False) for x in chunks)


def _join(x, T):
    """[chunks, B, C, ...] -> [B, T, ...]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :T]
