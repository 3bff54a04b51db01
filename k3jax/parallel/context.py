"""Context parallelism: the tokens of a row cut into equal shards, in order, over a mesh axis of R devices.

Each function is called inside ``jax.shard_map(..., check_vma=False)`` by all R and gives each its part of what the
function of the same name without ``axis`` gives for whole rows. Shards cut documents anywhere; ``segment_ids`` number
the documents of a row across its shards, so that two neighbours know whether they hold the same one.

- KDA sends what a shard does to the state that enters it (K3 report, arXiv 2607.24653, eq. 17): bytes that do not
  depend on the number of tokens.
- The short convolution sends the last few tokens of a shard.
- MLA sends the compressed keys and values: 576 numbers per token, whatever the number of heads.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from k3jax.config import ConfigError
from pallas_kernels.kda import kda
from pallas_kernels.kda.context import Summary, entering_state, leaving_cotangent, segment_summary
from pallas_kernels.kda.inputs import arithmetic_dtype

Axis = str | tuple[str, ...]


def kda_context(
    q: Array,
    k: Array,
    v: Array,
    gate: Array,
    beta: Array,
    *,
    axis: Axis,
    A_log: Array,
    dt_bias: Array,
    segment_ids: Array | None = None,
    initial_state: Array | None = None,
    **options,
) -> tuple[Array, Array]:
    """``pallas_kernels.kda.kda`` for one shard of every row.

    Forward, one all-gather of B (H K (K + V) + 4) float32 per device: each shard's M and S, with which it turns the
    state that enters it into M S_in + S, and the documents at its two ends. Backward, one of B H K (K + V). The pass
    that finds M and S is not differentiated; the state at a shard's start is kept under the name "states".

    Args:
      q, k, v, gate, beta: the shard's tokens, [B, T / R, ...], otherwise as for ``kda``.
      axis: the mesh axis or axes that the shards are spread over, in the order of their tokens.
      A_log, dt_bias: whole; their gradients are those of the shard's tokens, to be summed over ``axis`` (shard_map does
        it for arguments that it hands to all).
      segment_ids: [B, T / R], non-decreasing over all shards; -1 is padding, which may fill a shard.
      initial_state: [B, H, K, V], enters the first shard; that of other shards is not read.
      options: lower_bound, implementation and chunk_size of ``kda``.

    Returns:
      (o, state): o [B, T / R, H, V] of the shard's tokens; the state that leaves the shard, which on the last one is
      the row's final state. Differentiable like ``kda``.
    """
    tokens, parameters = (q, k, v, gate, beta), (A_log, dt_bias)
    if initial_state is None:
        dtype = arithmetic_dtype(*tokens, *parameters)
        initial_state = jnp.zeros((q.shape[0], *q.shape[2:], v.shape[-1]), dtype)
    return _kda(axis, tuple(options.items()), tokens, parameters, initial_state, segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kda(axis, options, tokens, parameters, initial_state, segment_ids):
    start, _, _ = _enter(axis, options, tokens, parameters, initial_state, segment_ids)
    return _local_kda(options, segment_ids, tokens, parameters, start)


def _kda_fwd(axis, options, tokens, parameters, initial_state, segment_ids):
    entered = _enter(axis, options, tokens, parameters, initial_state, segment_ids)
    start, M, continues = checkpoint_name(entered, "states")
    run = functools.partial(_local_kda, options, segment_ids)
    out, pull = jax.vjp(run, tokens, parameters, start)
    return out, (pull, M, continues)


def _kda_bwd(axis, options, saved, cotangents):
    """The shard's backward twice: for what it asks of earlier shards, and again with what later ones ask of it."""
    del options
    pull, M, continues = saved
    do, dstate = cotangents
    own = pull((do, dstate))[2]
    K, shard = M.shape[-1], lax.axis_index(axis)
    gathered = lax.all_gather(jnp.concatenate([M, own], axis=-1), axis)
    later = leaving_cotangent(gathered[..., :K], gathered[..., K:], shard, continues)
    dtokens, dparameters, dstart = pull((do, dstate + later))
    return dtokens, dparameters, jnp.where(shard == 0, dstart, 0), None


_kda.defvjp(_kda_fwd, _kda_bwd)


def _local_kda(options, segment_ids, tokens, parameters, start):
    A_log, dt_bias = parameters
    return kda(*tokens, A_log=A_log, dt_bias=dt_bias, segment_ids=segment_ids, initial_state=start, **dict(options))


def _enter(axis, options, tokens, parameters, initial_state, segment_ids):
    """The state that enters this shard, the shard's M, and for every shard whether it goes on with a document."""
    with jax.named_scope("kda_context"):
        shard, (A_log, dt_bias) = lax.axis_index(axis), parameters
        initial_state = jnp.where(shard == 0, initial_state, 0)
        own = segment_summary(
            *tokens[1:],
            A_log=A_log,
            dt_bias=dt_bias,
            segment_ids=segment_ids,
            initial_state=initial_state,
            **dict(options),
        )
        summaries, continues = _gather(own, segment_ids, axis)
        return entering_state(summaries, initial_state, shard, continues), own.M, continues


def _gather(own: Summary, segment_ids, axis) -> tuple[Summary, Array | None]:
    """The summaries of all shards, [R, B, ...], and whether each one's first document is the last before it, [R, B]."""
    B = len(own.M)
    parts = [x.reshape(B, -1) for x in own]
    if segment_ids is not None:
        parts.append(_ends(segment_ids).astype(own.M.dtype))
    gathered = lax.all_gather(jnp.concatenate(parts, axis=1), axis)
    M, S, ends = jnp.split(gathered, [own.M.size // B, (own.M.size + own.S.size) // B], axis=2)
    summaries = Summary(M.reshape(-1, *own.M.shape), S.reshape(-1, *own.S.shape))
    return summaries, None if segment_ids is None else _continues(ends)


def _ends(segment_ids_BT):
    """First and last document of a shard as [B, 4] small integers: upper and lower halves, each exact in float32."""
    ids = segment_ids_BT.astype(jnp.int32)
    first = jnp.min(ids, axis=1, where=ids >= 0, initial=jnp.iinfo(jnp.int32).max)
    last = jnp.max(ids, axis=1)
    ends_B2 = jnp.stack([jnp.where(last < 0, -1, first), last], axis=1)
    return jnp.concatenate([ends_B2 >> 16, ends_B2 & 0xFFFF], axis=1)


def _continues(ends_RB4):
    """A shard of padding passes the state on, and so does the first one with tokens: it gets the initial state."""
    upper, lower = jnp.split(ends_RB4.astype(jnp.int32), 2, axis=2)
    first, last = jnp.moveaxis((upper << 16) | lower, 2, 0)
    before = jnp.pad(lax.cummax(last, axis=0)[:-1], ((1, 0), (0, 0)), constant_values=-1)
    return (first < 0) | (before < 0) | (first == before)


def halo(x_BT, segment_ids: Array | None, *, axis: str, width: int):
    """The ``width - 1`` tokens before a shard, oldest first, [B, width - 1, ...]: zeros before the first shard, and
    where the document is not the one of the shard's first token. The ``history`` of a causal convolution.

    Args:
      x_BT: [B, T / R, ...], or a tree of such arrays, which travel together.
      width: taps of the convolution.

    Raises:
      ConfigError: a shard has fewer than ``width - 1`` tokens.
    """
    tails, ids = _left_tails(x_BT, segment_ids, axis, width)
    if segment_ids is None:
        return tails
    same = ids == segment_ids[:, :1]
    return jax.tree.map(lambda x: jnp.where(same.reshape(same.shape + (1,) * (x.ndim - 2)), x, 0), tails)


def short_conv_context(
    conv: Callable, xs: Sequence[Array], weights: Sequence[Array], segment_ids: Array | None, *, axis: str
) -> list[Array]:
    """``[conv(x, w, segment_ids) for x, w in zip(xs, weights)]`` over shards.

    All but the first outputs of a shard need nothing from outside; those are computed again from the neighbour's
    tokens, so that ``conv`` may be any causal convolution, kernels included.

    Args:
      conv: of x [B, T, H, K], weight [taps, H, K] and segment_ids [B, T] or None, for any T.
      xs: the inputs of several convolutions, [B, T / R, H, K].
      weights: their taps, equally many in all.

    Raises:
      ConfigError: a shard has fewer than ``taps - 1`` tokens.
    """
    reach = len(weights[0]) - 1
    if reach == 0:
        return [conv(x, w, segment_ids) for x, w in zip(xs, weights)]
    tails, ids = _left_tails(list(xs), segment_ids, axis, reach + 1)
    if segment_ids is not None:
        ids = jnp.concatenate([ids, segment_ids[:, :reach]], axis=1)

    def one(x, weight, tail):
        first = conv(jnp.concatenate([tail, x[:, :reach]], axis=1), weight, ids)[:, reach:]
        return lax.dynamic_update_slice_in_dim(conv(x, weight, segment_ids), first, 0, axis=1)

    return [one(x, w, tail) for x, w, tail in zip(xs, weights, tails)]


def _left_tails(tree, segment_ids, axis, width):
    """The left neighbour's last ``width - 1`` tokens of every array, in one permutation, and their documents."""
    leaves, treedef = jax.tree.flatten(tree)
    B, T = leaves[0].shape[:2]
    if width - 1 > T:
        raise ConfigError(
            f"a convolution of {width} taps needs the {width - 1} tokens before a shard, but the shards along {axis!r} "
            f"have {T} tokens: use at most {T * lax.axis_size(axis) // (width - 1)} devices along it, or longer rows"
        )
    steps = [(r, r + 1) for r in range(lax.axis_size(axis) - 1)]
    tails = [x[:, T - (width - 1) :] for x in leaves]
    flat = jnp.concatenate([x.reshape(B, width - 1, -1) for x in tails], axis=2)
    flat = lax.ppermute(flat, axis, steps)
    ends = list(itertools.accumulate(math.prod(x.shape[2:]) for x in tails))
    parts = jnp.split(flat, ends[:-1], axis=2)
    tails = [part.reshape(x.shape).astype(x.dtype) for part, x in zip(parts, tails)]
    ids = None if segment_ids is None else lax.ppermute(segment_ids[:, T - (width - 1) :], axis, steps)
    return jax.tree.unflatten(treedef, tails), ids


@dataclass(frozen=True)
class Contiguous:
    """A device attends from the tokens that it holds. The last one sees R times as many keys as the first."""


@dataclass(frozen=True)
class Zigzag:
    """A row is cut into 2 R chunks, and device r attends from chunks r and 2 R - 1 - r: all see equally many keys.

    Queries travel there and outputs back, two permutations each, which pays where the attention skips the keys that a
    block of queries cannot see.
    """


QueryOrder = Contiguous | Zigzag


def mla_context(
    attend: Callable,
    q_BTHK: Array,
    latent_BTR: Array,
    shared_BTK: Array,
    segment_ids: Array | None,
    *,
    axis: str,
    order: QueryOrder = Contiguous(),
) -> tuple[Array, Array]:
    """Causal attention of a shard's queries to the keys of whole rows, which travel compressed: one all-gather of
    [latent | shared], whose transpose is a reduce-scatter, and one of the documents if only the shard's are given.

    Args:
      attend: of (q, latent, shared, query_position, key_position, query_segment, key_segment), with positions [1, T] in
        the row; gives the output [B, T, H, V] and the largest logit of each head [H].
      q_BTHK, latent_BTR, shared_BTK: of the shard's tokens; rotary positions, if any, are those of :func:`positions`.
      segment_ids: [B, T / R], as for :func:`kda_context`, or [B, T] of whole rows.
      order: which device attends from which tokens.

    Returns:
      what ``attend`` does: outputs of the shard's tokens, and the largest logit of the device's queries, of which the
      row's is the maximum over ``axis``.

    Raises:
      ConfigError: Zigzag, and a shard's tokens do not halve.
    """
    with jax.named_scope("mla_context"):
        T, R = latent_BTR.shape[1], latent_BTR.shape[2]
        cached = lax.all_gather(jnp.concatenate([latent_BTR, shared_BTK], axis=-1), axis, axis=1, tiled=True)
        latent, shared = jnp.split(cached, [R], axis=-1)
        query = positions(T, axis=axis, order=order)
        key = jnp.arange(latent.shape[1])[None]
        key_segment = query_segment = None
        if segment_ids is not None:
            known = segment_ids.shape == latent.shape[:2]
            key_segment = segment_ids if known else lax.all_gather(segment_ids, axis, axis=1, tiled=True)
            query_segment = jnp.take(key_segment, query[0], axis=1)
        q = arrange(q_BTHK, axis=axis, order=order)
    o, max_logit = attend(q, latent, shared, query, key, query_segment, key_segment)
    return restore(o, axis=axis, order=order), max_logit


def positions(T: int, *, axis: Axis, order: QueryOrder = Contiguous()) -> Array:
    """Where the T tokens of this device stand in their rows, int32 [1, T]."""
    shard, count = lax.axis_index(axis), lax.axis_size(axis)
    match order:
        case Contiguous():
            return shard * T + jnp.arange(T)[None]
        case Zigzag():
            half = jnp.arange(T // 2)
            return jnp.concatenate([shard * (T // 2) + half, (2 * count - 1 - shard) * (T // 2) + half])[None]
    raise TypeError(f"order must be Contiguous or Zigzag, got {order!r}")


def arrange(x_BT: Array, *, axis: str, order: QueryOrder) -> Array:
    """[B, T, ...] of the tokens that this device holds, to those that it attends from."""
    if isinstance(order, Contiguous):
        return x_BT
    even, odd = _zigzag(x_BT.shape[1], axis)
    first, second = jnp.split(x_BT, 2, axis=1)
    first, second = lax.ppermute(first, axis, even), lax.ppermute(second, axis, odd)
    return _swap_on_odd(first, second, axis)


def restore(x_BT: Array, *, axis: str, order: QueryOrder) -> Array:
    """The inverse of :func:`arrange`."""
    if isinstance(order, Contiguous):
        return x_BT
    even, odd = ([(to, r) for r, to in steps] for steps in _zigzag(x_BT.shape[1], axis))
    first, second = jnp.split(_swap_on_odd(*jnp.split(x_BT, 2, axis=1), axis), 2, axis=1)
    return jnp.concatenate([lax.ppermute(first, axis, even), lax.ppermute(second, axis, odd)], axis=1)


def _zigzag(T, axis):
    """Where the first halves of all shards (the even chunks) go, and where the second (odd) ones do.

    Device r attends from chunks r and 2 R - 1 - r, of which one is even: the first one where r is even.
    """
    if T % 2:
        raise ConfigError(f"Zigzag halves the shards of axis {axis!r}, but they have {T} tokens; {T + 1} would halve")
    R = lax.axis_size(axis)
    owner = [min(chunk, 2 * R - 1 - chunk) for chunk in range(2 * R)]
    return [(r, owner[2 * r]) for r in range(R)], [(r, owner[2 * r + 1]) for r in range(R)]


def _swap_on_odd(first, second, axis):
    odd = lax.axis_index(axis) % 2 == 1
    return jnp.concatenate([jnp.where(odd, second, first), jnp.where(odd, first, second)], axis=1)
