"""KDA on TPU: arguments of the fused kernels from the public ones, and the custom derivative."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import target
from pallas_kernels.kda import inputs
from pallas_kernels.kda.mosaic_tpu_backward import backward
from pallas_kernels.kda.mosaic_tpu_forward import forward
from pallas_kernels.kda.mosaic_tpu_math import Plan

LANES = 64  # widths are multiples of this
MAX_WIDTH = 128  # Mosaic has no load of every other row of an array wider than its lanes
CHUNKS = (32, 64)


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

    Products take bfloat16 operands when q, k and v are bfloat16, else float32. Widths that are no multiple of 64 are
    padded with zeros, heads to whole groups. interpret: as for ``pl.pallas_call``.

    Raises:
      NotImplementedError: widths or dtypes that the kernels do not take or, on lowering, a target that is no TPU.
    """
    check_supported((q, k, v, gate, beta), chunk_size=chunk_size)
    B, T, H, K = q.shape
    N, V = num_segments or 1, v.shape[-1]
    group, heads = head_groups(H)
    key, value = (-(-width // LANES) * LANES for width in (K, V))
    low = all(x.dtype == jnp.bfloat16 for x in (q, k, v))
    steps = grid_steps(segment_ids, (B, T), chunk_size, num_segments)
    if not interpret:
        steps = steps._replace(chunk=target.only_on_tpu(steps.chunk, name="kda, implementation='mosaic_tpu',"))
    plan = Plan(
        heads=group,
        chunk=chunk_size,
        key=key,
        value=value,
        dtype=jnp.bfloat16 if low else jnp.float32,
        lower_bound=lower_bound,
        documents=steps.documents is not None,
        slots=num_segments is not None,
        scale=K**-0.5,
        recent=_recent_target(),
    )
    if initial_state is None:
        initial_state = jnp.zeros(inputs.state_shape(q, v, num_segments), jnp.float32)
    initial = pad(initial_state.reshape(B, N, H, K, V).swapaxes(3, 4), (B, N, heads, value, key))
    widths = (key,), (key,), (value,), (key,), ()
    tokens = [pad(x, (B, T, heads, *width)) for x, width in zip((q, k, v, gate, beta), widths)]
    parameters = [pad(A_log.astype(jnp.float32), (heads,)), pad(dt_bias.astype(jnp.float32), (heads, key))]
    o, final = _kda(plan, interpret, tokens, parameters, initial, steps)
    final = final[:, :, :H, :V, :K].swapaxes(3, 4)
    return o[:, :, :H, :V], final.reshape(inputs.state_shape(q, v, num_segments))


def _recent_target():
    """Whether the target in scope is v6e or later, or none is known."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is None or not device.device_kind.startswith(("TPU v4", "TPU v5"))


def missing_support(q, v, chunk_size) -> str:
    """Why the kernels are not taken for these arrays unless they are named; empty if they are."""
    widths = q.shape[-1], v.shape[-1]
    if any(width % LANES or width > MAX_WIDTH for width in widths):
        return f"the TPU kernel takes multiples of {LANES} up to {MAX_WIDTH}, K={widths[0]}, V={widths[1]} are not"
    if jnp.float64 in (q.dtype, v.dtype):
        return "the TPU kernel takes no float64"
    if chunk_size not in (None, *CHUNKS):
        return f"the TPU kernel takes chunks of {CHUNKS} tokens, chunk_size={chunk_size} is not among them"
    axes = target.axes_outside_shard_map()
    return f"the compiler cannot split a kernel over mesh axes {axes}; call kda inside jax.shard_map" if axes else ""


def check_supported(tokens, *, chunk_size):
    """Raises NotImplementedError with the reason when the kernels cannot run on q, k, v, gate, beta."""
    widths = tokens[0].shape[-1], tokens[2].shape[-1]
    if max(widths) > MAX_WIDTH:
        raise NotImplementedError(f"the TPU kernel takes widths up to {MAX_WIDTH}, got K={widths[0]}, V={widths[1]}")
    if any(x.dtype == jnp.float64 for x in tokens):
        raise NotImplementedError("the TPU kernel takes bfloat16 or float32, got float64")
    if chunk_size not in CHUNKS:
        raise NotImplementedError(f"the TPU kernel takes chunks of {CHUNKS} tokens, got chunk_size={chunk_size}")


def head_groups(H):
    """(heads per program, heads after padding): a power of two up to 16 in one program, else groups of 16 or 8.

    Mosaic does not fold tokens and heads into rows when the heads of a program are no power of two.
    """
    if H <= 16:
        padded = max(2, 1 << (H - 1).bit_length())
        return padded, padded
    padded = -(-H // 8) * 8
    return (16 if padded % 16 == 0 else 8), padded


def pad(x, shape):
    """x with zeros behind it along every axis."""
    missing = [(0, size - now) for size, now in zip(shape, x.shape)]
    return jnp.pad(x, missing) if any(after for _, after in missing) else x


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
    saved = checkpoint_name(saved, "states")
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
