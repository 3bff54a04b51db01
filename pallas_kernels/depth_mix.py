"""Attention Residuals' mixture over depth, forward and backward, as one TPU kernel each.

h = sum_i w_i v_i with w = softmax_i(u . RMSNorm(v_i)) over S filled sources and the running sum (arXiv 2603.15031,
section 3). XLA reads every source several times and reduces along lanes for each of its registers. Here a block of
tokens is read once with all of its sources; partial sums stay spread over lanes and are reduced once per source.
Scores, weights and sums are float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

TOKENS = 16  # per step of the grid
LANES = 128
VMEM_LIMIT = 60 * 2**20


def depth_mix(running_BTD, sources_SBTD, count, u_D, *, eps, interpret=False):
    """[B, T, D] in running's dtype.

    Args:
      running_BTD: bfloat16 or float32; D a multiple of 128.
      sources_SBTD: the sources, of which the first ``count`` (int scalar) are filled; the others have weight zero.
      u_D: float32, pseudo-query times the norm's gain.
      eps: of the RMS norm.

    Differentiable in running, sources and u. The backward keeps these and computes the weights again.

    Raises:
      ValueError: D is no multiple of 128, or shapes disagree.
    """
    B, T, D = running_BTD.shape
    if D % LANES or sources_SBTD.shape[1:] != (B, T, D) or u_D.shape != (D,):
        raise ValueError(
            f"depth_mix takes running [B, T, 128 n], sources [S, B, T, 128 n] and u [128 n], got {running_BTD.shape}, "
            f"{sources_SBTD.shape} and {u_D.shape}"
        )
    missing = -B * T % TOKENS
    flat = jnp.pad(running_BTD.reshape(B * T, D), ((0, missing), (0, 0)))
    sources = jnp.pad(sources_SBTD.reshape(-1, B * T, D), ((0, 0), (0, missing), (0, 0)))
    count = jnp.asarray(count, jnp.int32).reshape(1)
    mixed = _mix(eps, interpret, flat, sources, count, u_D.astype(jnp.float32)[None])
    return mixed[: B * T].reshape(B, T, D)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mix(eps, interpret, running, sources, count, u):
    specs = _specs(running, sources)
    return _call(
        functools.partial(_forward_kernel, eps), "depth_mix", running, specs[:3], specs[0], _like(running), interpret
    )(count, running, sources, u)


def _mix_fwd(eps, interpret, running, sources, count, u):
    return _mix(eps, interpret, running, sources, count, u), (running, sources, count, u)


def _mix_bwd(eps, interpret, saved, dh):
    running, sources, count, u = saved
    row, rows, vector = _specs(running, sources)
    out = [_like(running), _like(sources), _like(u)]
    kernel = functools.partial(_backward_kernel, eps)
    call = _call(kernel, "depth_mix_backward", running, [row, rows, vector, row], [row, rows, vector], out, interpret)
    drunning, dsources, du = call(count, running, sources, u, dh)
    return drunning, dsources, np.zeros(count.shape, jax.dtypes.float0), du


_mix.defvjp(_mix_fwd, _mix_bwd)


def _like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _specs(running, sources):
    D, S = running.shape[1], sources.shape[0]
    row = pl.BlockSpec((TOKENS, D), lambda t, count: (t, 0))
    rows = pl.BlockSpec((S, TOKENS, D), lambda t, count: (0, t, 0))
    return row, rows, pl.BlockSpec((1, D), lambda t, count: (0, 0))


def _call(kernel, name, running, in_specs, out_specs, out_shape, interpret):
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(running.shape[0] // TOKENS,), in_specs=list(in_specs), out_specs=out_specs
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT),
        interpret=interpret,
        name=name,
    )


class _Sources:
    """The sources of a block of tokens with the running sum last, by columns of LANES."""

    def __init__(self, running_ref, sources_ref):
        self.refs, self.count = (running_ref, sources_ref), sources_ref.shape[0] + 1

    def load(self, i, at):
        running_ref, sources_ref = self.refs
        return (sources_ref[i, :, at] if i < self.count - 1 else running_ref[:, at]).astype(jnp.float32)


def _columns(D, body, init):
    """Folds body(slice of LANES columns, carry) over the columns."""
    return jax.lax.fori_loop(0, D // LANES, lambda n, x: body(pl.ds(n * LANES, LANES), x), init)


def _weights(eps, count, sources, u_ref, extra=None):
    """(weights, scores, inverse RMS, <v_i, extra>) of each source, lists of [TOKENS, 1]."""
    D, zero = u_ref.shape[1], jnp.zeros((TOKENS, LANES), jnp.float32)
    sums = [[zero] * sources.count for _ in range(2 if extra is None else 3)]

    def add(at, sums):
        u, other = u_ref[:, at], None if extra is None else extra[:, at].astype(jnp.float32)
        out = [list(x) for x in sums]
        for i in range(sources.count):
            v = sources.load(i, at)
            for n, factor in enumerate((v, u, other)[: len(out)]):
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
    sources = _Sources(running_ref, sources_ref)
    weights, *_ = _weights(eps, count_ref[0], sources, u_ref)

    def store(at, _):
        mixed = sum(_nothing_unfilled(w, sources.load(i, at)) for i, w in enumerate(weights))
        mixed_ref[:, at] = mixed.astype(mixed_ref.dtype)
        return 0

    _columns(u_ref.shape[1], store, 0)


def _nothing_unfilled(weight, v):
    """weight * v; zero where the weight is, whatever the slot holds."""
    return jnp.where(weight > 0, weight * v, 0.0)


def _backward_kernel(eps, count_ref, running_ref, sources_ref, u_ref, dh_ref, drunning_ref, dsources_ref, du_ref):
    """dscore_i = w_i (dh . v_i - dh . h), dv_i = w_i dh + dscore_i r_i (u - score_i r_i v_i / D)."""
    sources, D = _Sources(running_ref, sources_ref), u_ref.shape[1]
    weights, scores, inverses, projected = _weights(eps, count_ref[0], sources, u_ref, dh_ref)
    projected = [jnp.where(w > 0, p, 0.0) for w, p in zip(weights, projected)]
    mean = sum(w * p for w, p in zip(weights, projected))
    along_u = [jnp.where(w > 0, w * (p - mean) * r, 0.0) for w, p, r in zip(weights, projected, inverses)]
    along_v = [jnp.where(w > 0, a * s * r * (1 / D), 0.0) for w, a, s, r in zip(weights, along_u, scores, inverses)]

    @pl.when(pl.program_id(0) == 0)
    def _():
        du_ref[...] = jnp.zeros_like(du_ref)

    def store(at, _):
        dh, u = dh_ref[:, at].astype(jnp.float32), u_ref[:, at]
        du = jnp.zeros((TOKENS, LANES), jnp.float32)
        for i in range(sources.count):
            v = jnp.where(weights[i] > 0, sources.load(i, at), 0.0)
            dv = weights[i] * dh + along_u[i] * u - along_v[i] * v
            du += along_u[i] * v
            if i < sources.count - 1:
                dsources_ref[i, :, at] = dv.astype(dsources_ref.dtype)
            else:
                drunning_ref[:, at] = dv.astype(drunning_ref.dtype)
        du_ref[:, at] += jnp.sum(du, 0, keepdims=True)
        return 0

    _columns(D, store, 0)
