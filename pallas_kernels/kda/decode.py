"""Decoding with KDA: one token for many sequences whose states share a pool, and drafts that are verified, then kept.

A speculative step costs one read of each state and small records. `kda_verify` runs m drafted tokens on states that it
leaves alone; for each token it records the key k_j, the sum of log-decays G_j since the state, and the update N_j =
beta_j (v_j - S^T k_j). Keeping the first a tokens is then one update of rank a,

  S' = Diag(exp(G_a)) S + sum_{j <= a} (k_j exp(G_a - G_j)) N_j^T,

exact for every a from 0 to m (`kda_commit`), where snapshots would store m states. Gates, norms, sums, beta and states
are float32 whatever the inputs: they carry over thousands of steps.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import target
from pallas_kernels.kda import inputs, mosaic_tpu_decode
from pallas_kernels.kda.reference import delta_step

DecodeImplementation = Literal["xla", "mosaic_tpu"]


class Pool(NamedTuple):
    """What is remembered of P sequences. Donate it to the jitted step that replaces it.

    state: [P, H, K, V] float32.
    conv: the last J - 1 inputs of the convolutions of q, k and v, oldest first: [P, J - 1, H, K] twice and
      [P, J - 1, H, V].
    """

    state: jax.Array
    conv: tuple[jax.Array, jax.Array, jax.Array]


class Records(NamedTuple):
    """What verified tokens would change: float32, but for `conv`, which are the inputs q, k, v of `kda_verify`."""

    k: jax.Array  # [N, m, H, K], unit norm
    decay_sum: jax.Array  # [N, m, H, K], logarithm of the decay from the state to after the token
    update: jax.Array  # [N, m, H, V]
    conv: tuple[jax.Array, jax.Array, jax.Array]


def kda_decode(
    q,
    k,
    v,
    gate,
    beta,
    pool: Pool,
    index,
    *,
    conv_weights,
    A_log,
    dt_bias,
    lower_bound=-5.0,
    implementation: DecodeImplementation | None = None,
):
    """One token for each of N sequences: short convolutions with SiLU, norms, gates and the recurrence of ``kda``.

    Args:
      q, k, gate: [N, H, K]; v: [N, H, V]; beta: [N, H] logits. q, k and v before the convolution; bfloat16 or float32.
      pool: the states; those of the N sequences are replaced.
      index: int [N], slot of each sequence, no slot twice. A negative one is padding: it reads and writes nothing, and
        its output is zero.
      conv_weights: taps of the convolutions of q, k, v: [J, H, K] twice and [J, H, V]; the last tap is for this token.
      A_log, dt_bias, lower_bound: as for ``kda``.
      implementation: "xla" or "mosaic_tpu" (one fused kernel). None: the kernel where the program is lowered for TPU
        and the shapes allow it.

    Returns:
      (o [N, H, V] in v's dtype, the new pool).

    Raises:
      ValueError: a shape is not as above, or a slot is out of range or named twice (where the values are known).
      TypeError: float16, or a state that is not float32.
      NotImplementedError: the named implementation cannot run; the message says why.
    """
    tokens = [x[:, None] for x in (q, k, v, gate, beta)]
    parameters = (A_log, dt_bias, *conv_weights)
    _validate(tokens, pool, index, parameters, lower_bound)
    o, pool = _select(
        implementation, _decode_xla, mosaic_tpu_decode.decode, tokens, parameters, pool, index, lower_bound=lower_bound
    )
    return o[:, 0], pool


def kda_verify(
    q,
    k,
    v,
    gate,
    beta,
    pool: Pool,
    index,
    *,
    conv_weights,
    A_log,
    dt_bias,
    lower_bound=-5.0,
    implementation: DecodeImplementation | None = None,
):
    """m drafted tokens for each of N sequences, without changing the pool.

    Arguments as for ``kda_decode`` with an axis of tokens: q, k, gate [N, m, H, K], v [N, m, H, V], beta [N, m, H].

    Returns:
      (o [N, m, H, V], the same numbers as m steps of ``kda_decode``; Records for ``kda_commit``).

    Raises: as ``kda_decode``.
    """
    tokens, parameters = [q, k, v, gate, beta], (A_log, dt_bias, *conv_weights)
    _validate(tokens, pool, index, parameters, lower_bound)
    o, *records = _select(
        implementation, _verify_xla, mosaic_tpu_decode.verify, tokens, parameters, pool, index, lower_bound=lower_bound
    )
    return o, Records(*records, (q, k, v))


def kda_commit(
    pool: Pool, index, records: Records, accepted, *, implementation: DecodeImplementation | None = None
) -> Pool:
    """The pool after the first accepted [N] (int, 0 .. m) tokens of the records of ``kda_verify`` with the same index.

    Raises:
      ValueError: accepted is out of range (where its values are known), or shapes disagree.
      NotImplementedError: as ``kda_decode``.
    """
    N, m = records.k.shape[:2]
    for name, x in (("index", index), ("accepted", accepted)):
        if x.shape != (N,):
            raise ValueError(f"{name} has shape {x.shape}; with records of {N} sequences it must be ({N},)")
    _validate_range("accepted", accepted, 0, m)
    _validate_range("index", index, None, pool.state.shape[0] - 1)
    return _select(implementation, _commit_xla, mosaic_tpu_decode.commit, pool, index, records, accepted)


def _select(implementation, xla, kernel, *arguments, **static):
    """Runs the named implementation, or the one for the target."""
    if implementation not in (None, *get_args(DecodeImplementation)):
        known = get_args(DecodeImplementation)
        raise ValueError(f"implementation must be one of {known} or None, got {implementation!r}")
    if implementation == "xla":
        return xla(*arguments, **static)
    pool = next(x for x in arguments if isinstance(x, Pool))
    missing = mosaic_tpu_decode.missing_support(pool)
    if implementation == "mosaic_tpu":
        if missing:
            raise NotImplementedError(missing)
        return kernel(*arguments, **static)
    if missing or target.axes_outside_shard_map() or target.is_tpu() is False:
        return xla(*arguments, **static)
    if target.is_tpu():
        return kernel(*arguments, **static)
    run = {"tpu": lambda *x: kernel(*x, **static), "default": lambda *x: xla(*x, **static)}
    return jax.lax.platform_dependent(*arguments, **run)


def _decode_xla(tokens, parameters, pool, index, *, lower_bound):
    o, S_NHKV, _ = _steps(tokens, parameters, pool, index, lower_bound)
    conv = tuple(jnp.concatenate([_rows(h, index), x.astype(h.dtype)], 1)[:, 1:] for h, x in zip(pool.conv, tokens))
    return o, _write(pool, index, Pool(S_NHKV, conv))


def _verify_xla(tokens, parameters, pool, index, *, lower_bound):
    o, _, records = _steps(tokens, parameters, pool, index, lower_bound)
    return o, *records


def _commit_xla(pool, index, records, accepted):
    m = records.k.shape[1]
    kept = (jnp.arange(m) < accepted[:, None])[..., None, None]
    last = (jnp.arange(m) == accepted[:, None] - 1)[..., None, None]
    G_NHK = jnp.sum(jnp.where(last, records.decay_sum, 0), axis=1)
    k_end = jnp.where(kept, records.k * jnp.exp(jnp.minimum(G_NHK[:, None] - records.decay_sum, 0)), 0)
    added = jnp.einsum("nmhk,nmhv->nhkv", k_end, records.update, precision=jax.lax.Precision.HIGHEST)
    state = jnp.exp(G_NHK)[..., None] * _rows(pool.state, index) + added
    return _write(pool, index, Pool(state, tuple(map(_window_for(index, accepted), pool.conv, records.conv))))


def _window_for(index, accepted):
    def window(history, x):
        both = jnp.concatenate([_rows(history, index), x.astype(history.dtype)], 1)
        at = accepted[:, None] + jnp.arange(history.shape[1])
        return jnp.take_along_axis(both, at[..., None, None], axis=1)

    return window


def _steps(tokens, parameters, pool, index, lower_bound):
    """(o, states after the last token, records) of m tokens [N, m, ...] from the states in the pool."""
    *qkv, gate, beta = tokens
    A_log, dt_bias, *weights = parameters
    live = index >= 0
    qkv = [short_conv(x, _rows(h, index), w) for x, h, w in zip(qkv, pool.conv, weights)]
    valid = jnp.broadcast_to(live[:, None], beta.shape[:2])
    x = inputs.prepare(*qkv, gate, beta, A_log, dt_bias, valid, lower_bound=lower_bound)

    def step(S_NHKV, x):
        error = x.v - jnp.einsum(
            "nhkv,nhk->nhv", S_NHKV, jnp.exp(x.log_decay) * x.k, precision=jax.lax.Precision.HIGHEST
        )
        o, S_NHKV = delta_step(S_NHKV, *x)
        return S_NHKV, (o, x.beta[..., None] * error)

    S_NHKV, (o, update) = jax.lax.scan(step, _rows(pool.state, index), jax.tree.map(lambda a: a.swapaxes(0, 1), x))
    o = jnp.where(live[:, None, None, None], o.swapaxes(0, 1), 0).astype(tokens[2].dtype)
    return o, S_NHKV, (x.k, jnp.cumsum(x.log_decay, axis=1), update.swapaxes(0, 1))


def short_conv(x_NMHK, history_NJHK, weight_JHK):
    """Causal depthwise convolution and SiLU of m tokens behind their history, in float32, rounded to x's dtype."""
    m, taps = x_NMHK.shape[1], weight_JHK.shape[0]
    window = jnp.concatenate([history_NJHK.astype(jnp.float32), x_NMHK.astype(jnp.float32)], 1)
    total = sum(weight_JHK[j].astype(jnp.float32) * window[:, j : j + m] for j in range(taps))
    return jax.nn.silu(total).astype(x_NMHK.dtype)


def _rows(array, index):
    return array[jnp.maximum(index, 0)]


def _write(pool, index, new):
    """The pool with rows replaced; a negative index would count from the end, so padding points behind it instead."""
    to = jnp.where(index >= 0, index, pool.state.shape[0])
    return jax.tree.map(lambda old, x: old.at[to].set(x.astype(old.dtype), mode="drop"), pool, new)


def _validate(tokens, pool, index, parameters, lower_bound):
    q, k, v, gate, beta = tokens
    A_log, dt_bias, *weights = parameters
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(f"q must have at least one token, head and channel, got shape {q.shape[:1] + q.shape[2:]}")
    N, m, H, K = q.shape
    P, V, J = pool.state.shape[0], v.shape[-1], weights[0].shape[0]
    wanted = {"k": (k, (N, m, H, K)), "v": (v, (N, m, H, V)), "gate": (gate, (N, m, H, K)), "beta": (beta, (N, m, H))}
    wanted |= {"index": (index, (N,)), "A_log": (A_log, (H,)), "dt_bias": (dt_bias, (H, K))}
    wanted |= {"pool.state": (pool.state, (P, H, K, V))}
    for name, width, weight, history in zip("qkv", (K, K, V), weights, pool.conv):
        wanted[f"conv_weights of {name}"] = weight, (J, H, width)
        wanted[f"pool.conv of {name}"] = history, (P, J - 1, H, width)
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; with q of shape {q.shape} it must be {shape}")
    inputs.validate_dtypes(q, k, v, gate, beta, A_log, dt_bias, pool.state)
    inputs.validate_lower_bound(lower_bound)
    _validate_range("index", index, None, P - 1)
    if not isinstance(index, jax.core.Tracer):
        slots, counts = np.unique(np.asarray(index)[np.asarray(index) >= 0], return_counts=True)
        if np.any(counts > 1):
            raise ValueError(f"index names slot {slots[counts > 1][0]} twice")


def _validate_range(name, x, least, most):
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {x.dtype}")
    if isinstance(x, jax.core.Tracer) or x.size == 0:
        return
    low, high = int(np.min(x)), int(np.max(x))
    if high > most or (least is not None and low < least):
        above = "" if least is None else f"at least {least} and "
        raise ValueError(f"{name} must be {above}at most {most}, got values from {low} to {high}")
