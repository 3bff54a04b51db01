"""Attention Residuals' mixture over depth, forward and backward, as one TPU kernel each.

h = sum_i w_i v_i with w = softmax_i(u . RMSNorm(v_i)) over S slots and the running sum (arXiv 2603.15031, section 3).
XLA reads every source several times and reduces along lanes for each of its registers. Here a block of tokens is read
once with all of its sources; partial sums stay spread over lanes and are reduced once per source. Scores, weights and
sums are float32. The plain form, the derivative and the choice between the two are in the model.
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
UNROLL = 4  # columns per turn of a loop
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
    """Arrays as the kernels take them: count [1], running [B T, D], sources [S, B T, D], u [1, D] float32."""
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
    return jnp.asarray(count, jnp.int32).reshape(1), running, sources, u_D.astype(jnp.float32)[None]


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
    return row, rows, pl.BlockSpec((1, D), lambda *step: (0, 0))


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


class _Sources:
    """The sources of a group of tokens with the running sum last, by columns of LANES."""

    def __init__(self, running_ref, sources_ref, group):
        self.refs, self.group, self.count = (running_ref, sources_ref), group, sources_ref.shape[0] + 1

    def load(self, i, at):
        running_ref, sources_ref = self.refs
        x = sources_ref[i, self.group, at] if i < self.count - 1 else running_ref[self.group, at]
        return x.astype(jnp.float32)


def _groups(ref, body):
    """body(slice of GROUP tokens) for all tokens of a block."""
    if ref.shape[0] == GROUP:
        body(pl.ds(0, GROUP))
    else:
        jax.lax.fori_loop(0, ref.shape[0] // GROUP, lambda n, _: body(pl.ds(n * GROUP, GROUP)), None)


def _columns(D, body, init):
    """Folds body(slice of LANES columns, carry) over the columns, UNROLL of them per turn of a loop."""
    turns, together = D // LANES, 1
    while turns % 2 == 0 and together < UNROLL:
        turns, together = turns // 2, 2 * together

    def turn(n, carry):
        for i in range(together):
            carry = body(pl.ds((n * together + i) * LANES, LANES), carry)
        return carry

    return jax.lax.fori_loop(0, turns, turn, init)


def _weights(eps, count, sources, u_ref, dh_ref=None):
    """(weights, scores, inverse RMS, <v_i, dh>) of each source, lists of [GROUP, 1]."""
    D, zero = u_ref.shape[1], jnp.zeros((GROUP, LANES), jnp.float32)
    sums = [[zero] * sources.count for _ in range(2 if dh_ref is None else 3)]

    def add(at, sums):
        factors = [u_ref[:, at]] + ([] if dh_ref is None else [dh_ref[sources.group, at].astype(jnp.float32)])
        out = [list(x) for x in sums]
        for i in range(sources.count):
            v = sources.load(i, at)
            for n, factor in enumerate((v, *factors)):
                out[n][i] += v * factor
        return out

    squares, scores, *projected = ([jnp.sum(x, -1, keepdims=True) for x in y] for y in _columns(D, add, sums))
    inverses = [jax.lax.rsqrt(x * (1 / D) + eps) for x in squares]
    filled = [i < count for i in range(sources.count - 1)] + [True]
    scores = [jnp.where(f, x * r, -jnp.inf) for f, x, r in zip(filled, scores, inverses)]
    most = functools.reduce(jnp.maximum, scores)
    weights = [jnp.exp(x - most) for x in scores]
    total = sum(weights)
    return [x / total for x in weights], scores, inverses, projected[0] if projected else None


def _forward_kernel(eps, count_ref, running_ref, sources_ref, u_ref, mixed_ref):
    def group(rows):
        sources = _Sources(running_ref, sources_ref, rows)
        weights, *_ = _weights(eps, count_ref[0], sources, u_ref)

        def store(at, _):
            mixed = sum(w * sources.load(i, at) for i, w in enumerate(weights))
            mixed_ref[rows, at] = mixed.astype(mixed_ref.dtype)

        _columns(u_ref.shape[1], store, None)

    _groups(running_ref, group)


def _backward_kernel(eps, count_ref, running_ref, sources_ref, u_ref, dh_ref, drunning_ref, dsources_ref, du_ref):
    """dscore_i = w_i (dh . v_i - dh . h), dv_i = w_i dh + dscore_i r_i (u - score_i r_i v_i / D)."""
    D = u_ref.shape[1]

    @pl.when(pl.program_id(1) == 0)
    def _():
        du_ref[...] = jnp.zeros_like(du_ref)

    def group(rows):
        sources = _Sources(running_ref, sources_ref, rows)
        weights, scores, inverses, projected = _weights(eps, count_ref[0], sources, u_ref, dh_ref)
        mean = sum(w * p for w, p in zip(weights, projected))
        along_u = [w * (p - mean) * r for w, p, r in zip(weights, projected, inverses)]
        along_v = [jnp.where(w > 0, a * s * r * (1 / D), 0.0) for w, a, s, r in zip(weights, along_u, scores, inverses)]

        def store(at, _):
            dh, u = dh_ref[rows, at].astype(jnp.float32), u_ref[:, at]
            du = jnp.zeros((GROUP, LANES), jnp.float32)
            for i in range(sources.count):
                v = sources.load(i, at)
                dv = weights[i] * dh + along_u[i] * u - along_v[i] * v
                du += along_u[i] * v
                if i < sources.count - 1:
                    dsources_ref[i, rows, at] = dv.astype(dsources_ref.dtype)
                else:
                    drunning_ref[rows, at] = dv.astype(drunning_ref.dtype)
            du_ref[0, :, at] += du[:8] + du[8:]

        _columns(D, store, None)

    _groups(running_ref, group)
