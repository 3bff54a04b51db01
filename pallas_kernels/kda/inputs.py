"""What happens to the inputs of KDA before the recurrence, and what is refused.

Every implementation shares these functions, so that a gate, a norm or an error message exists once. All arithmetic here
is float32 (float64 when an input is float64): bfloat16 inputs are widened first.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

L2_EPSILON = 1e-6  # added to the sum of squares, inside the root
# exp(80) times a raw gate is finite in float32; a steeper gate is a step function.
MAX_A_LOG = 80.0
# exp(MIN_LOG_DECAY) is exactly zero in float32 and float64: the floor changes no result and keeps sums finite.
MIN_LOG_DECAY = -1e4


class Prepared(NamedTuple):
    """Inputs of the recurrence: normalized, scaled, activated, in the arithmetic dtype, padding made inert."""

    q: jax.Array  # [B, T, H, K], unit norm times K**-0.5
    k: jax.Array  # [B, T, H, K], unit norm
    v: jax.Array  # [B, T, H, V]
    log_decay: jax.Array  # [B, T, H, K], <= 0
    beta: jax.Array  # [B, T, H], in (0, 1)


class Documents(NamedTuple):
    """Which document each token belongs to.

    ids: int32 [B, T], non-decreasing; a padding token carries the number of the document before it (of the first
      document when it leads the row), which is harmless because padding changes no state.
    valid: bool [B, T], False on padding.
    """

    ids: jax.Array
    valid: jax.Array


def arithmetic_dtype(*arrays):
    """float64 if any array is float64, else float32."""
    return jnp.float64 if any(a is not None and a.dtype == jnp.float64 for a in arrays) else jnp.float32


@jax.custom_jvp
def sigmoid(x):
    """The logistic function, with a derivative that keeps its digits where the function is close to 1."""
    return jax.nn.sigmoid(x)


@sigmoid.defjvp
def _sigmoid_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return sigmoid(x), jax.nn.sigmoid(x) * jax.nn.sigmoid(-x) * dx


def log_decay(gate, A_log, dt_bias, lower_bound):
    """Logarithm of the decay of each key channel, [..., H, K], always <= 0.

    With a bound: lower_bound * sigmoid(exp(A_log) * (gate + dt_bias)) (Kimi K3). Without: -exp(A_log) * softplus(gate +
    dt_bias) (Kimi Linear, arXiv 2510.26692). A_log [H] is one number per head, dt_bias [H, K] one per channel.
    """
    rate = jnp.exp(jnp.minimum(A_log, MAX_A_LOG))[:, None]
    shifted = gate + dt_bias
    if lower_bound is None:
        return jnp.maximum(-rate * jax.nn.softplus(shifted), MIN_LOG_DECAY)
    return lower_bound * sigmoid(rate * shifted)


def l2_normalize(x):
    """x / sqrt(sum(x**2) + 1e-6) over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPSILON)


def prepare(q, k, v, gate, beta, A_log, dt_bias, valid=None, *, lower_bound) -> Prepared:
    """Normalizes q and k, scales q, activates gate and beta; valid [B, T] (or None) is False on padding.

    Masking comes before the nonlinear functions, so that whatever padding holds (NaN included) reaches no value and no
    gradient, and again after the gates, whose value at zero input is not zero.
    """
    dtype = arithmetic_dtype(q, k, v, gate, beta, A_log, dt_bias)
    q, k, v, gate, beta, A_log, dt_bias = (x.astype(dtype) for x in (q, k, v, gate, beta, A_log, dt_bias))

    def mask(x):
        return x if valid is None else jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, 0)

    q, k, v, gate, beta = (mask(x) for x in (q, k, v, gate, beta))
    return Prepared(
        q=l2_normalize(q) * q.shape[-1] ** -0.5,
        k=l2_normalize(k),
        v=v,
        log_decay=mask(log_decay(gate, A_log, dt_bias, lower_bound)),
        beta=mask(sigmoid(beta)),
    )


def documents(segment_ids) -> Documents | None:
    """Splits segment ids [B, T] (-1 marks padding) into document numbers without holes and a validity mask."""
    if segment_ids is None:
        return None
    ids = segment_ids.astype(jnp.int32)
    valid = ids >= 0
    first = jnp.min(jnp.where(valid, ids, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
    first = jnp.where(jnp.any(valid, axis=1, keepdims=True), first, 0)
    return Documents(ids=jnp.maximum(jax.lax.cummax(ids, axis=1), first), valid=valid)


def validate(q, k, v, gate, beta, A_log, dt_bias, initial_state, segment_ids, *, lower_bound, num_segments, chunk_size):
    """Raises ValueError or TypeError, with the numbers at fault, for anything `kda` does not define."""
    if q.ndim != 4:
        raise ValueError(f"q must be [B, T, H, K], got shape {q.shape}")
    if v.ndim != 4:
        raise ValueError(f"v must be [B, T, H, V], got shape {v.shape}")
    B, T, H, K = q.shape
    V = v.shape[-1]
    if 0 in (B, T, H, K, V):
        raise ValueError(f"every size must be at least 1, got q of shape {q.shape} and v of shape {v.shape}")
    expected = {"k": (k, (B, T, H, K)), "v": (v, (B, T, H, V)), "gate": (gate, (B, T, H, K)), "beta": (beta, (B, T, H))}
    expected |= {"A_log": (A_log, (H,)), "dt_bias": (dt_bias, (H, K))}
    if segment_ids is not None:
        expected["segment_ids"] = (segment_ids, (B, T))
    if initial_state is not None:
        expected["initial_state"] = (initial_state, state_shape(q, v, num_segments))
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; with q of shape {q.shape} it must be {shape}")
    validate_dtypes(q, k, v, gate, beta, A_log, dt_bias, initial_state)
    validate_lower_bound(lower_bound)
    if chunk_size not in (None, 16, 32, 64, 128):
        raise ValueError(f"chunk_size must be 16, 32, 64, 128 or None, got {chunk_size}")
    _validate_segments(segment_ids, num_segments)


def state_shape(q, v, num_segments):
    """[B, H, K, V], or [B, N, H, K, V] with one state per document."""
    B, _, H, K = q.shape
    slots = () if num_segments is None else (num_segments,)
    return (B, *slots, H, K, v.shape[-1])


def validate_lower_bound(lower_bound):
    if lower_bound is None:
        return
    if not (math.isfinite(lower_bound) and lower_bound < 0):
        raise ValueError(f"lower_bound must be a negative number (the least log-decay) or None, got {lower_bound}")


def validate_dtypes(q, k, v, gate, beta, A_log, dt_bias, initial_state):
    arrays = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
    for name, array in arrays.items():
        if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float64):
            raise TypeError(
                f"{name} is {array.dtype}; KDA takes bfloat16, float32 or float64 (float16 has too few exponent bits)"
            )
    state_dtype = arithmetic_dtype(*arrays.values())
    if initial_state is not None and initial_state.dtype != state_dtype:
        raise TypeError(f"initial_state must be {jnp.dtype(state_dtype)} for these inputs, got {initial_state.dtype}")


def _validate_segments(segment_ids, num_segments):
    if num_segments is not None and segment_ids is None:
        raise ValueError(f"num_segments={num_segments} needs segment_ids")
    if num_segments is not None and num_segments < 1:
        raise ValueError(f"num_segments must be at least 1, got {num_segments}")
    if segment_ids is None:
        return
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(f"segment_ids must be integers, got {segment_ids.dtype}")
    if isinstance(segment_ids, jax.core.Tracer):
        return
    ids = np.asarray(segment_ids)
    if ids.min() < -1:
        raise ValueError(f"segment_ids must be -1 (padding) or a document number, got {ids.min()}")
    if num_segments is not None and ids.max() >= num_segments:
        raise ValueError(
            f"segment_ids reach {ids.max()}, but num_segments={num_segments} allows at most {num_segments - 1}"
        )
    before = np.maximum.accumulate(ids, axis=1)
    if np.any((ids >= 0) & (ids < before)):
        row, token = np.argwhere((ids >= 0) & (ids < before))[0]
        raise ValueError(
            f"segment_ids decrease in row {row}: {ids[row, token]} at token {token} after {before[row, token]}"
        )
