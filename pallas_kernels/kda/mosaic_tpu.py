"""KDA on TPU: arguments of the fused kernels from the public ones, and the custom derivative."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import inputs
from pallas_kernels.kda.mosaic_tpu_backward import backward
from pallas_kernels.kda.mosaic_tpu_forward import forward
from pallas_kernels.kda.mosaic_tpu_math import Plan


class Steps(NamedTuple):
    """Steps of the grid for every row of the batch."""

    chunk: jax.Array  # int32 [B, steps], chunk that the step reads, non-decreasing
    slot: jax.Array  # int32 [B, steps], state that it carries, non-decreasing
    documents: jax.Array | None  # int32 [B, steps, 3, C]: document of each token, validity, document that enters


def kda_mosaic_tpu(
    q,
    k,
    v,
    gate,
    beta,
    A_log,
    dt_bias,
    initial_state,
    segment_ids,
    *,
    lower_bound,
    num_segments,
    chunk_size,
    interpret=False,
):
    """The fused kernels over whole sequences; arguments as ``pallas_kernels.kda.kda``, whose checks have passed.

    Products take bfloat16 operands when q, k and v are bfloat16, else float32. interpret: as for ``pl.pallas_call``.

    Raises:
      NotImplementedError: widths or dtypes that the kernels do not take.
    """
    check_supported(q, v, dtypes=(q.dtype, k.dtype, v.dtype), chunk_size=chunk_size)
    B, T, H, K = q.shape
    N, V = num_segments or 1, v.shape[-1]
    group, padded = head_groups(H)
    low = all(x.dtype == jnp.bfloat16 for x in (q, k, v))
    steps = grid_steps(segment_ids, (B, T), chunk_size, num_segments)
    plan = Plan(
        heads=group,
        chunk=chunk_size,
        key=K,
        value=V,
        dtype=jnp.bfloat16 if low else jnp.float32,
        lower_bound=lower_bound,
        documents=steps.documents is not None,
        slots=num_segments is not None,
        scale=K**-0.5,
    )
    if initial_state is None:
        initial_state = jnp.zeros(inputs.state_shape(q, v, num_segments), jnp.float32)
    initial = pad_axis(initial_state.reshape(B, N, H, K, V).swapaxes(3, 4), 2, padded)
    tokens = [pad_axis(x, 2, padded) for x in (q, k, v, gate, beta)]
    parameters = [pad_axis(x.astype(jnp.float32), 0, padded) for x in (A_log, dt_bias)]
    o, final = _kda(plan, interpret, tokens, parameters, initial, steps)
    return o[:, :, :H], final[:, :, :H].swapaxes(3, 4).reshape(inputs.state_shape(q, v, num_segments))


def check_supported(q, v, *, dtypes, chunk_size):
    """Raises NotImplementedError with the reason when the kernels do not take these arrays."""
    if any(width % 64 or width > 256 for width in (q.shape[-1], v.shape[-1])):
        raise NotImplementedError(
            f"the TPU kernel takes widths that are multiples of 64 up to 256, got K={q.shape[-1]}, V={v.shape[-1]}"
        )
    if jnp.float64 in dtypes:
        raise NotImplementedError("the TPU kernel takes bfloat16 or float32, got float64")
    if chunk_size not in (32, 64):
        raise NotImplementedError(f"the TPU kernel takes chunks of 32 or 64 tokens, got chunk_size={chunk_size}")


def head_groups(H):
    """(heads per program, heads after padding): up to 16 in one program, else groups of 16 or 8."""
    if H <= 16:
        return H + H % 2, H + H % 2
    padded = -(-H // 8) * 8
    return (16 if padded % 16 == 0 else 8), padded


def pad_axis(x, axis, size):
    missing = size - x.shape[axis]
    return jnp.pad(x, [(0, missing if n == axis else 0) for n in range(x.ndim)]) if missing else x


def grid_steps(segment_ids, shape_BT, C, num_segments) -> Steps:
    """Steps without documents or with masks inside chunks (one per chunk), or with one state per document."""
    B, T = shape_BT
    chunks = -(-T // C)
    every = jnp.broadcast_to(jnp.arange(chunks, dtype=jnp.int32), (B, chunks))
    if segment_ids is None and T % C == 0:
        return Steps(every, jnp.zeros_like(every), None)
    if segment_ids is None:
        segment_ids = jnp.zeros(shape_BT, jnp.int32)
    docs = inputs.documents(jnp.pad(segment_ids, ((0, 0), (0, chunks * C - T)), constant_values=-1))
    ids, valid = (x.reshape(B, chunks, C).astype(jnp.int32) for x in docs)
    if num_segments is None:
        entering = jnp.concatenate([ids[:, :1, 0], ids[:, :-1, -1]], 1)
        entering = jnp.broadcast_to(entering[..., None], ids.shape)
        return Steps(every, jnp.zeros_like(every), jnp.stack([ids, valid, entering], 2))
    chunk, slot, used = jax.vmap(lambda x: _steps_by_document(x, C, chunks, num_segments))(docs.ids)
    row = jnp.arange(B)[:, None]
    mine = (ids[row, chunk] == slot[..., None]) & (valid[row, chunk] > 0) & used[..., None]
    zero = jnp.zeros(mine.shape, jnp.int32)
    return Steps(chunk, slot, jnp.stack([zero, mine.astype(jnp.int32), zero], 2))


def _steps_by_document(ids_T, C, chunks, N):
    """(chunk, document, used) of each step of one row: one per chunk of a document, one for an empty one."""
    number = jnp.arange(N)
    start, stop = (jnp.searchsorted(ids_T, number, side=side) for side in ("left", "right"))
    first = jnp.minimum(start // C, chunks - 1)
    counts = jnp.where(stop > start, (stop - 1) // C - first + 1, 1)
    ends = jnp.cumsum(counts)
    step = jnp.arange(chunks + N)
    slot = jnp.minimum(jnp.searchsorted(ends, step, side="right"), N - 1)
    chunk = jnp.minimum(first[slot] + step - (ends - counts)[slot], chunks - 1)
    return chunk.astype(jnp.int32), slot.astype(jnp.int32), step < ends[-1]


def _by_group(plan, beta_BTH):
    """[B, T, H] -> [B, groups, T, heads]."""
    B, T, H = beta_BTH.shape
    return beta_BTH.reshape(B, T, H // plan.heads, plan.heads).swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kda(plan, interpret, tokens, parameters, initial, steps):
    o, final, _ = _run(plan, interpret, tokens, parameters, initial, steps, saves=False)
    return o, final


def _run(plan, interpret, tokens, parameters, initial, steps, *, saves):
    *wide, beta = tokens
    A_log, dt_bias = parameters
    arguments = [*wide, _by_group(plan, beta)], [A_log[:, None], dt_bias]
    return forward(plan, *arguments, initial, steps, saves=saves, interpret=interpret)


def _kda_fwd(plan, interpret, tokens, parameters, initial, steps):
    o, final, saved = _run(plan, interpret, tokens, parameters, initial, steps, saves=True)
    return (o, final), (tokens, parameters, steps, saved)


def _kda_bwd(plan, interpret, residuals, cotangents):
    tokens, parameters, steps, saved = residuals
    do, dfinal = cotangents
    *wide, beta = tokens
    A_log, dt_bias = parameters
    B, T, H = beta.shape
    arguments = [*wide, _by_group(plan, beta)], [A_log[:, None], dt_bias]
    out = backward(plan, *arguments, steps, saved, do, dfinal, interpret=interpret)
    *dwide, dbeta, da_log, dbias, dinitial = out
    dbeta = dbeta.swapaxes(1, 2).reshape(B, T, H).astype(beta.dtype)
    dparameters = [jnp.sum(da_log, (0, 2)), jnp.sum(dbias, 0)]
    return [*dwide, dbeta], dparameters, dinitial, jax.tree.map(_no_gradient, steps)


def _no_gradient(x):
    return np.zeros(x.shape, jax.dtypes.float0)


_kda.defvjp(_kda_fwd, _kda_bwd)
