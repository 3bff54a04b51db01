"""Attention Residuals' mixture over depth, forward and backward, as one TPU kernel each.

h = sum_i w_i v_i with w = softmax_i(u . RMSNorm(v_i)) over S slots and the running sum (arXiv 2603.15031, section 3).
XLA reads every source several times and does all arithmetic on the vector units. Here a block of tokens is read once
with all of its sources, and the matrix units do most sums: with the sources of 16 tokens as rows of V, u V^T holds the
scores, dh V^T what the backward needs beside them, and the mixture is a sparse matrix of weights times V, as the
gradients are. The vector units, which are free for it, add up the squares. Products are exact for bfloat16 sources, u
and weights are split into pieces, sums are float32. The plain form, the derivative and the choice are in the model.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import target

GROUP = 16  # tokens whose sums are in registers at a time: the rows of a tile of bfloat16
LANES = 128
FORWARD_COLUMNS, BACKWARD_COLUMNS = 28, 14  # of LANES, per turn of a loop
U_PIECES = 3
MAX_SLOTS = 16
BLOCK_BYTES = 3 * 2**20  # of sources per step of the grid
VMEM_LIMIT = 60 * 2**20


def missing_support(sources_SBTD) -> str:
    """Why the kernels are not taken for these sources (an array or jax.ShapeDtypeStruct); empty if they are."""
    axes = target.axes_outside_shard_map()
    return _refusal(sources_SBTD) or (f"the compiler cannot split a kernel over mesh axes {axes}" if axes else "")


def _refusal(sources_SBTD) -> str:
    S, B, T, D = sources_SBTD.shape
    if D % LANES or (B * T) % GROUP or not 1 <= S <= MAX_SLOTS:
        return (
            f"the TPU kernel takes 1 to {MAX_SLOTS} sources, multiples of {GROUP} tokens and of {LANES} channels, not "
            f"{S}, {B * T} and {D}"
        )
    known = sources_SBTD.dtype in (jnp.bfloat16, jnp.float32)
    return "" if known else f"the TPU kernel takes bfloat16 and float32, not {sources_SBTD.dtype}"


def forward(running_BTD, sources_SBTD, count, u_D, *, eps, interpret=False):
    """[B, T, D] in running's dtype.

    Args:
      running_BTD: bfloat16 or float32, as the sources; B T a multiple of 16, D of 128.
      sources_SBTD: up to 16 slots, of which the first ``count`` (int scalar) are filled; the others weigh nothing,
        whatever finite numbers they hold.
      u_D: pseudo-query times the norm's gain.
      eps: of the RMS norm.

    Raises:
      ValueError: sizes or a dtype that the kernel does not take, or shapes that disagree.
    """
    arrays = _flat(running_BTD, sources_SBTD, count, u_D)
    _, running, sources, _ = arrays
    row, rows, vector = _specs(running, sources, lambda n: n)
    kernel = functools.partial(_forward_kernel, eps)
    grid = (running.shape[0] // row.block_shape[0],)
    call = _call(kernel, "depth_mix", grid, [row, rows, vector], row, _like(running), interpret)
    return call(*arrays).reshape(running_BTD.shape)


def backward(running_BTD, sources_SBTD, count, u_D, dh_BTD, *, eps, interpret=False):
    """Gradients of running, sources and u (float32) from the mixture's; the weights are computed again."""
    arrays = _flat(running_BTD, sources_SBTD, count, u_D)
    _, running, sources, u = arrays
    steps = running.shape[0] // _rows(running, sources)
    cores = 2 - steps % 2  # a chip may have two, and u's gradient is a sum along the grid
    row, rows, vector = _specs(running, sources, lambda core, n: core * (steps // cores) + n)
    partial_sums = pl.BlockSpec((1, 8, u.shape[1]), lambda core, n, count: (core, 0, 0))
    out_shape = [_like(running), _like(sources), jax.ShapeDtypeStruct((cores, 8, u.shape[1]), jnp.float32)]
    kernel, grid = functools.partial(_backward_kernel, eps), (cores, steps // cores)
    specs = [row, rows, vector, row], [row, rows, partial_sums]
    call = _call(kernel, "depth_mix_backward", grid, *specs, out_shape, interpret)
    drunning, dsources, du = call(*arrays, dh_BTD.reshape(running.shape))
    return drunning.reshape(running_BTD.shape), dsources.reshape(sources_SBTD.shape), du.sum((0, 1))


def _flat(running_BTD, sources_SBTD, count, u_D):
    """Arrays as the kernels take them: count [1], running [B T, D], sources [S, B T, D], pieces of u [GROUP, D], twice
    and then zeros."""
    D, refusal = u_D.shape[0], _refusal(sources_SBTD)
    if refusal:
        raise ValueError(f"depth_mix: {refusal}")
    shapes = running_BTD.shape, sources_SBTD.shape[1:]
    if shapes[0] != shapes[1] or shapes[0][-1:] != u_D.shape or running_BTD.dtype != sources_SBTD.dtype:
        raise ValueError(
            f"depth_mix takes running [B, T, D], sources [S, B, T, D] and u [D], got {running_BTD.dtype}"
            f"{shapes[0]}, {sources_SBTD.dtype}{sources_SBTD.shape} and {u_D.shape}"
        )
    running, sources = running_BTD.reshape(-1, D), sources_SBTD.reshape(len(sources_SBTD), -1, D)
    u, pieces = u_D.astype(jnp.float32), []
    for _ in range(U_PIECES):
        # Not a cast there and back, which XLA may leave out.
        rounded = u if running.dtype == jnp.float32 else jax.lax.reduce_precision(u, exponent_bits=8, mantissa_bits=7)
        pieces.append(rounded.astype(running.dtype))
        u = u - rounded
    rows = jnp.concatenate([jnp.stack(pieces * 2), jnp.zeros((GROUP - 2 * U_PIECES, D), running.dtype)], 0)
    return jnp.asarray(count, jnp.int32).reshape(1), running, sources, rows


def _like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _rows(running, sources):
    """Tokens per step of the grid: a power of two of groups that divides all of them and fits."""
    tokens, D = running.shape
    most = max(1, BLOCK_BYTES // ((sources.shape[0] + 1) * GROUP * D * sources.dtype.itemsize))
    return GROUP * math.gcd(tokens // GROUP, 2 ** (most.bit_length() - 1))


def _specs(running, sources, at):
    """Blocks of running, sources and u; at: the block of tokens of a step of the grid."""
    R, D, S = _rows(running, sources), running.shape[1], sources.shape[0]
    row = pl.BlockSpec((R, D), lambda *step: (at(*step[:-1]), 0))
    rows = pl.BlockSpec((S, R, D), lambda *step: (0, at(*step[:-1]), 0))
    return row, rows, pl.BlockSpec((GROUP, D), lambda *step: (0, 0))


def _call(kernel, name, grid, in_specs, out_specs, out_shape, interpret):
    order = ("parallel", "arbitrary")[: len(grid)]
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=grid, in_specs=in_specs, out_specs=out_specs
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(dimension_semantics=order, vmem_limit_bytes=VMEM_LIMIT),
        interpret=interpret,
        name=name,
    )


def _pieces(x, count, dtype):
    """float32 x as a sum of `count` arrays of a dtype; as it is for float32."""
    if dtype == jnp.float32:
        return [x]
    out = []
    for _ in range(count):
        out.append(x.astype(dtype))
        x = x - out[-1].astype(jnp.float32)
    return out


def _product(a, b, contracted=0):
    """a [M, n] times b [n, N], or, contracted=1, times the transpose of b [N, n]; accumulates in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = ((1,), (contracted,)), ((), ())
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32, precision=precision)


def _groups(ref, body):
    """body(slice of GROUP tokens) for all tokens of a block."""
    if ref.shape[0] == GROUP:
        body(pl.ds(0, GROUP))
    else:
        jax.lax.fori_loop(0, ref.shape[0] // GROUP, lambda n, _: body(pl.ds(n * GROUP, GROUP)), None)


def _columns(most, D, body, init):
    """Folds body(slice of up to most x LANES columns, carry) over all columns."""
    width = LANES * max(n for n in range(1, most + 1) if D // LANES % n == 0)
    return jax.lax.fori_loop(0, D // width, lambda n, x: body(pl.ds(n * width, width), x), init)


def _stack(rows, at, sources_ref, *refs):
    """Sources, then rows of other references, one below the other."""
    return jnp.concatenate(
        [*(sources_ref[i, rows, at] for i in range(len(sources_ref))), *(x[rows, at] for x in refs)], 0
    )


def _iota(shape, axis):
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _weights(eps, count, rows, running_ref, sources_ref, u_ref, dh_ref=None):
    """(weights, scores, inverse RMS, <v_i, dh>) of each source, running last, lists of [GROUP, 1] float32."""
    D, number = u_ref.shape[1], sources_ref.shape[0] + 1
    size = GROUP * number

    def add(at, sums):
        V = _stack(rows, at, sources_ref, running_ref)
        others = jnp.concatenate([u_ref[:, at]] + ([] if dh_ref is None else [dh_ref[rows, at]]), 0)
        parts = jnp.split(jnp.square(V.astype(jnp.float32)), V.shape[1] // LANES, axis=1)
        return sums[0] + _product(others, V, contracted=1), sum(parts, sums[1])

    columns = FORWARD_COLUMNS if dh_ref is None else BACKWARD_COLUMNS
    zeros = [jnp.zeros(shape, jnp.float32) for shape in ((GROUP * (1 if dh_ref is None else 2), size), (size, LANES))]
    products, squares = _columns(columns, D, add, tuple(zeros))
    token, lane = (_iota((GROUP, size), axis) for axis in range(2))
    own = [lane == i * GROUP + token for i in range(number)]

    def diagonals(blocks):
        return [jnp.sum(jnp.where(mask, x, 0.0), -1, keepdims=True) for mask, x in zip(own, blocks)]

    u_V = jnp.sum(jnp.where(token < U_PIECES, products[:GROUP], 0.0), 0, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.sum(squares, -1, keepdims=True) * (1 / D) + eps)
    inverses = jnp.split(inverse, number)
    filled = [i < count for i in range(number - 1)] + [True]
    along_u = diagonals([u_V] * number)
    scores = [jnp.where(f, x * r, -jnp.inf) for f, x, r in zip(filled, along_u, inverses)]
    most = functools.reduce(jnp.maximum, scores)
    weights = [jnp.exp(x - most) for x in scores]
    total = sum(weights)
    projected = None if dh_ref is None else diagonals([products[GROUP:]] * number)
    return [x / total for x in weights], scores, inverses, projected


def _by_token(columns):
    """[GROUP, GROUP n]: column i of [GROUP, 1] on the diagonal of block i."""
    size = GROUP * len(columns)
    token, lane = (_iota((GROUP, size), axis) for axis in range(2))
    return sum(jnp.where(lane == i * GROUP + token, x, 0.0) for i, x in enumerate(columns))


def _forward_kernel(eps, count_ref, running_ref, sources_ref, u_ref, mixed_ref):
    def group(rows):
        weights, *_ = _weights(eps, count_ref[0], rows, running_ref, sources_ref, u_ref)
        left = jnp.concatenate(_pieces(_by_token(weights), 2, running_ref.dtype), 0)

        def store(at, _):
            parts = _product(left, _stack(rows, at, sources_ref, running_ref))
            mixed_ref[rows, at] = sum(jnp.split(parts, len(parts) // GROUP)).astype(mixed_ref.dtype)

        _columns(FORWARD_COLUMNS, u_ref.shape[1], store, None)

    _groups(running_ref, group)


def _backward_kernel(eps, count_ref, running_ref, sources_ref, u_ref, dh_ref, drunning_ref, dsources_ref, du_ref):
    """dscore_i = w_i (dh . v_i - dh . h), dv_i = w_i dh + dscore_i r_i (u - score_i r_i v_i / D)."""
    D = u_ref.shape[1]

    @pl.when(pl.program_id(1) == 0)
    def _():
        du_ref[...] = jnp.zeros_like(du_ref)

    def group(rows):
        refs = running_ref, sources_ref, u_ref, dh_ref
        weights, scores, inverses, projected = _weights(eps, count_ref[0], rows, *refs)
        mean = sum(w * p for w, p in zip(weights, projected))
        along_u = [w * (p - mean) * r for w, p, r in zip(weights, projected, inverses)]
        along_v = [jnp.where(w > 0, a * s * r * (1 / D), 0.0) for w, a, s, r in zip(weights, along_u, scores, inverses)]
        left = _gradient_matrix(running_ref.dtype, weights, along_u, along_v)
        size = GROUP * len(weights)

        def store(at, _):
            dh = dh_ref[rows, at]
            parts = _product(
                left, jnp.concatenate([_stack(rows, at, sources_ref, running_ref), dh, dh, u_ref[:, at]], 0)
            )
            for i in range(len(weights) - 1):
                dsources_ref[i, rows, at] = parts[i * GROUP : (i + 1) * GROUP].astype(dsources_ref.dtype)
            drunning_ref[rows, at] = parts[size - GROUP : size].astype(drunning_ref.dtype)
            du_ref[0, :, at] += sum(jnp.split(parts[size:], (len(parts) - size) // 8))

        _columns(BACKWARD_COLUMNS, D, store, None)

    _groups(running_ref, group)


def _gradient_matrix(dtype, weights, along_u, along_v):
    """What gives, times [V; dh; dh; u], the gradients of the sources and, in the last rows, those of u by token.

    The first piece of `weights` meets the first dh, the second one the other; the pieces of u come twice, for those of
    `along_u`. Of `along_v` one piece is enough: its product is no larger than that with u.
    """
    size = GROUP * len(weights)
    wide = size + 3 * GROUP
    row, lane = (_iota((size, wide), axis) for axis in range(2))
    (w_high, *w_low), (a_high, *a_low) = (
        [x.astype(jnp.float32) for x in _pieces(jnp.concatenate(columns, 0), 2, dtype)]
        for columns in (weights, along_u)
    )
    left = jnp.where(lane == row, -jnp.concatenate(along_v, 0), 0.0)
    token, first_u = row % GROUP, size + 2 * GROUP
    left = jnp.where(lane == size + token, w_high, left)
    left = jnp.where((lane >= first_u) & (lane < first_u + U_PIECES), a_high, left)
    for w, a in zip(w_low, a_low):
        left = jnp.where(lane == size + GROUP + token, w, left)
        left = jnp.where((lane >= first_u + U_PIECES) & (lane < first_u + 2 * U_PIECES), a, left)
    by_token = jnp.concatenate(_pieces(_by_token(along_u), 2, dtype), 0)
    below = jnp.concatenate([by_token, jnp.zeros((len(by_token), 3 * GROUP), dtype)], 1)
    return jnp.concatenate([left.astype(dtype), below], 0)
