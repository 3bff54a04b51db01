"""Arithmetic of one chunk on a TPU core, shared by the forward and the backward kernel.

C tokens of a chunk, K and V widths of keys and values. Matrices between tokens of a chunk are kept for two heads side
by side, [C, 2C]: 2C = 128 lanes fill a vector register, and one product against a block diagonal matrix serves both
heads. States are transposed, [V, K], so that decays multiply along lanes. Log-decays are in base 2.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.inputs import L2_EPSILON, MAX_A_LOG

NN = ((1,), (0,))
NT = ((1,), (1,))
TN = ((0,), (0,))

BLOCK = 16  # rows that share one anchor for their decays when log-decays are bounded
SAFE_LOWER_BOUND = -80.0 / BLOCK
UPPER_HALF = -(1 << 16)
BASE = 8  # rows of the blocks that are inverted by substitution


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is fixed when a kernel is built. heads per program (even); dtype of the operands of matrix products."""

    heads: int
    chunk: int
    key: int
    value: int
    dtype: Any
    lower_bound: float | None
    documents: bool  # tokens carry document numbers, or some are padding
    slots: bool  # one state per document, each step of the grid serves one document of one chunk
    scale: float = 1.0
    recent: bool = True  # v6e or later: selects in bfloat16, two stores per cycle

    @property
    def bounded(self):
        return self.lower_bound is not None and self.lower_bound >= SAFE_LOWER_BOUND

    def pieces(self, x, count=1):
        """x as a sum of `count` bfloat16 arrays, or as it is when products are float32."""
        if self.dtype == jnp.float32:
            return (x.astype(jnp.float32),)
        out = [x.astype(jnp.bfloat16)]
        for _ in range(count - 1):
            x = x - out[-1].astype(jnp.float32)
            out.append(x.astype(jnp.bfloat16))
        return tuple(out)

    def product(self, a, b, dims=NN):
        """Product of two matrices, each an array or a tuple of pieces; accumulates in float32.

        Pieces are concatenated along the contraction, so the unit adds them up; small times small is left out.
        """
        a, b = (x if isinstance(x, tuple) else self.pieces(x) for x in (a, b))
        used = [(i, j) for i in range(len(a)) for j in range(len(b)) if i == 0 or j == 0]
        ((along_a,), (along_b,)) = dims
        a = concatenate([a[i] for i, _ in used], along_a)
        b = concatenate([b[j] for _, j in used], along_b)
        precision = jax.lax.Precision.HIGHEST if self.dtype == jnp.float32 else None
        return jax.lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=jnp.float32, precision=precision)


class Head(NamedTuple):
    """Activated inputs of one head for one chunk, float32."""

    q: jax.Array  # [C, K], unit norm times the scale
    k: jax.Array  # [C, K], unit norm
    q_root: jax.Array  # [C, 1], 1 / norm of q
    k_root: jax.Array  # [C, 1]
    gate: "Gate"
    beta: jax.Array  # [C, 1]


class Gate(NamedTuple):
    """Log-decay of one head, [C, K], and its derivatives in base e, which the forward leaves out."""

    g: jax.Array  # base 2
    by_input: jax.Array | None
    by_a_log: jax.Array | None  # with a bound, derivative of the raw gate; else of the log-decay


class Masks(NamedTuple):
    """Which tokens of a chunk meet; the last four are None without documents."""

    until: jax.Array  # bool [C, 2C]: j <= i, same document, for two heads
    from_i: jax.Array  # float32 [C, C]: 1 if j >= i, same document
    valid: jax.Array | None  # bool [C, 1], False on padding
    enter: jax.Array | None  # float32 [C, 1]: 1 if the token belongs to the document that enters the chunk
    leave: jax.Array | None  # float32 [C, 1]: 1 if it belongs to the document that leaves the chunk
    keep: jax.Array | None  # float32 [1, 1]: 1 if both are the same document


def concatenate(parts, axis):
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def iota(shape, axis):
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def load_pair(ref, j):
    """Heads 2j and 2j + 1 of a [1, C, heads, D] block as two float32 [C, D] arrays, by strided loads.

    bfloat16 heads lie in pairs in 32-bit words: the upper half of a word is one float32, the lower half the other.
    """
    _, C, heads, D = ref.shape
    if ref.dtype == jnp.bfloat16:
        words = ref.bitcast(jnp.int32).reshape(C * heads // 2, D)[pl.ds(j, C, stride=heads // 2), :]
        return tuple(pltpu.bitcast(x, jnp.float32) for x in (words << 16, words & UPPER_HALF))
    rows = ref.reshape(C * heads, D)
    return tuple(rows[pl.ds(2 * j + n, C, stride=heads), :].astype(jnp.float32) for n in range(2))


def store_pair(ref, j, pair, *, add):
    """Inverse of `load_pair`. Where the scalar `add` is true, adds to what is there (None: never)."""
    if add is not None:
        pair = tuple(x + jnp.where(add, old, 0.0) for x, old in zip(pair, load_pair(ref, j)))
    _, C, heads, D = ref.shape
    if ref.dtype == jnp.bfloat16:
        words = jax.lax.platform_dependent(*pair, mosaic=_pack, default=_pack_as_interpreted)
        ref.bitcast(jnp.uint32).reshape(C * heads // 2, D)[pl.ds(j, C, stride=heads // 2), :] = words
        return
    for n, x in enumerate(pair):
        ref.reshape(C * heads, D)[pl.ds(2 * j + n, C, stride=heads), :] = x.astype(ref.dtype)


def _pack(low, high):
    return pltpu.pack_elementwise((low, high), packed_dtype=jnp.bfloat16)


def _pack_as_interpreted(low, high):
    """What `_pack` does, which has no interpretation."""
    low, high = (pltpu.bitcast(x.astype(jnp.bfloat16).astype(jnp.float32), jnp.uint32) for x in (low, high))
    return high | (low >> 16)


def run_in_lockstep(programs):
    """Advances generators together, one yield at a time, so that independent heads stand side by side in the program.

    programs: pairs (round in which it starts, generator). The compiler schedules near its program order, and a chain of
    dependent products leaves most units idle.
    """
    programs, now = list(programs), 0
    while programs:
        programs = [p for p in programs if p[0] > now or next(p[1], StopIteration) is not StopIteration]
        now += 1


def block_diagonal(a, b):
    """[[a, 0], [0, b]] of two equal shapes."""
    zero = jnp.zeros_like(a)
    return jnp.concatenate([jnp.concatenate([a, zero], 1), jnp.concatenate([zero, b], 1)], 0)


def spread(plan, pair):
    """[C, 2C] of two heads -> block diagonal [2C, 2C]."""
    dtype, low = pair.dtype, pair.dtype == jnp.bfloat16
    if low:  # selected by lane alone: in words of two rows where that costs nothing
        pair = pltpu.bitcast(pair, jnp.int32) if plan.recent else pair.astype(jnp.float32)
    first, zero = iota(pair.shape, 1) < pair.shape[1] // 2, jnp.zeros_like(pair)
    out = jnp.concatenate([jnp.where(first, pair, zero), jnp.where(first, zero, pair)], 0)
    return pltpu.bitcast(out, dtype) if low and plan.recent else out.astype(dtype)


def times_pair(plan, left, right):
    """Products of two heads: of matrices [C, 2C] in pieces with two right sides, each pieces [C, D]; two [C, D].

    The left side is made block diagonal, which loads a right side into the matrix unit without zeros.
    """
    below = tuple(jnp.concatenate(x, 0) for x in zip(*right))
    out = plan.product(tuple(spread(plan, x) for x in left), below)
    return [out[: len(out) // 2], out[len(out) // 2 :]]


def chunk_masks(plan, documents_ref):
    """Masks of this step from rows (document, valid, entering document) of int32 [1, 1, 3, C]."""
    C = plan.chunk
    i, j = iota((C, 2 * C), 0), iota((C, 2 * C), 1) % C
    from_i = iota((C, C), 0) <= iota((C, C), 1)
    if not plan.documents:
        return Masks(j <= i, jnp.where(from_i, 1.0, 0.0), None, None, None, None)
    ids, valid, entering = (documents_ref[0, 0, n : n + 1, :] for n in range(3))
    column, valid, entering = (jnp.broadcast_to(x, (C, C)).T[:, :1] for x in (ids, valid, entering))
    enter = jnp.where(column == entering, 1.0, 0.0)
    leave = jnp.where(column == ids[:, C - 1 :], 1.0, 0.0)
    return Masks(
        until=(j <= i) & (column == jnp.concatenate([ids, ids], 1)),
        from_i=jnp.where(from_i & (column == ids), 1.0, 0.0),
        valid=valid != 0,
        enter=enter,
        leave=leave,
        keep=enter[C - 1 :],
    )


def prepare_beta(masks, logits):
    """(beta, the derivative of its logarithm) from logits [C, heads]; beta is zero on padding."""
    if masks.valid is not None:
        logits = jnp.where(masks.valid, logits, 0.0)
    beta, rest = jax.nn.sigmoid(logits), jax.nn.sigmoid(-logits)
    if masks.valid is not None:
        beta = jnp.where(masks.valid, beta, 0.0)
    return beta, rest


def mask_rows(masks, x):
    return x if masks.valid is None else jnp.where(masks.valid, x, 0.0)


def prepare_pair(plan, masks, j, raw, beta, a_log_ref, bias_ref, *, slopes):
    """Generator: norms and gates of heads 2j and 2j + 1.

    raw: (q, k, gate), each a pair of [C, K]; beta [C, heads] activated; slopes: whether gates need derivatives.
    """
    heads = []
    for n, row in enumerate(slice(n, n + 1) for n in (2 * j, 2 * j + 1)):
        own = [x[n] for x in raw]
        heads.append(prepare_head(plan, masks, *own, beta[:, row], a_log_ref[row], bias_ref[row], slopes=slopes))
        if n == 0:
            yield
    return heads


def prepare_head(plan, masks, q, k, x, beta, a_log, bias, *, slopes):
    """Norms and gates of one head. q, k, x: [C, K] raw; beta [C, 1] activated; a_log [1, 1]; bias [1, K]."""
    q, k, x = (mask_rows(masks, y) for y in (q, k, x))
    q_root, k_root = (jax.lax.rsqrt(jnp.sum(y * y, -1, keepdims=True) + L2_EPSILON) for y in (q, k))
    gate = log_decay(plan.lower_bound, x + bias, jnp.exp(jnp.minimum(a_log, MAX_A_LOG)), slopes=slopes)
    gate = Gate(*(None if y is None else mask_rows(masks, y) for y in gate))
    return Head(q * (q_root * plan.scale), k * k_root, q_root, k_root, gate, beta)


def log_decay(lower_bound, shifted, rate, *, slopes):
    """Gate of Kimi K3 (bounded) or Kimi Linear from raw gate + bias [C, K] and rate = exp(A_log) [1, 1]."""
    if lower_bound is None:
        g = -rate * (jnp.maximum(shifted, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(shifted))))
        own = (-rate * jax.nn.sigmoid(shifted), g) if slopes else (None, None)
        return Gate(g * (1 / math.log(2)), *own)
    power = shifted * (rate * (-1 / math.log(2)))
    if not slopes:
        return Gate((lower_bound / math.log(2)) * pltpu.reciprocal(1.0 + jnp.exp2(power), full_range=False), None, None)
    # The smaller of gate and 1 - gate is computed on its own: as a difference it has no digits left.
    ratio = jnp.exp2(-jnp.abs(power))
    larger = pltpu.reciprocal(1.0 + ratio, full_range=False)
    smaller = ratio * larger
    gate = jnp.where(power <= 0, larger, smaller)
    return Gate(gate * (lower_bound / math.log(2)), larger * smaller * (lower_bound * rate), shifted)


def halves(plan, a, b):
    """Columns [C, 1] of two heads -> [C, 2C], each over its head's lanes."""
    C = plan.chunk
    return jnp.where(iota((C, 2 * C), 1) < C, a, b)


def unit_lower_inverse(plan, L):
    """Generator: (I + L)^-1 of two strictly lower triangular matrices [C, 2C].

    Blocks of 8 by substitution in float32, merged pairwise (X_21 = -X_22 L_21 X_11) with rounded operands, then one
    Newton step whose residual I - (I + L) X is exact for the rounded X. Powers of L are never formed: they grow like
    binomials when keys are alike.
    """
    C, P = L.shape
    i, j = iota((C, P), 0), iota((C, P), 1) % C
    pieces = plan.pieces(L, 2)
    table, X, size = spread(plan, pieces[0]), _base_inverse(L), BASE
    while size < C:
        lower = [slice(start, start + size) for start in range(size, C, 2 * size)]
        Z = plan.product(jnp.concatenate([X[s] for s in lower], 0), table)
        yield
        beside = iota(Z.shape, 0) // size * 2 == iota(Z.shape, 1) % C // size
        (whole,) = plan.pieces(X)
        Y = plan.product(jnp.where(beside, Z, 0.0), spread(plan, whole))
        yield
        parts = []
        for n, s in enumerate(lower):
            parts += [X[s.start - size : s.start], X[s] - Y[n * size : (n + 1) * size]]
        X = jnp.concatenate(parts, 0)
        size *= 2
    if plan.dtype == jnp.float32:
        return X
    (rounded,) = plan.pieces(X)
    LX = plan.product(jnp.concatenate(pieces, 0), spread(plan, rounded))
    yield
    X = rounded.astype(jnp.float32)
    (residual,) = plan.pieces(jnp.where(i == j, 1.0, 0.0) - X - (LX[:C] + LX[C:]))
    X = X + plan.product(rounded, spread(plan, residual))
    yield
    return X


def _base_inverse(L):
    """Inverses of the diagonal blocks of 8, [C, 2C]; all blocks of both heads share the lanes of one [8, 2C] array."""
    C, P = L.shape[0], L.shape[1]
    row, lane = iota((BASE, P), 0), iota((BASE, P), 1)
    blocks = range(C // BASE)
    D = sum(jnp.where(lane % C // BASE == n, L[n * BASE : (n + 1) * BASE], 0.0) for n in blocks)
    X = jnp.where(lane % BASE == row, 1.0, 0.0)
    for s in range(BASE - 1):
        column = jnp.take_along_axis(D, lane // BASE * BASE + s, axis=1)
        X = X - jnp.where(row > s, column, 0.0) * X[s : s + 1]
    return jnp.concatenate([jnp.where(lane % C // BASE == n, X, 0.0) for n in blocks], 0)
