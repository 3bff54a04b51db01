"""Causal depthwise convolution of a few taps with SiLU, forward and backward, as one TPU kernel each.

XLA pads the whole row in float32 and reads it once per tap. Here tokens are the major axis of a block, so that shifts
along them are free, and a block is read once. The backward walks a row from its end and keeps what tokens hand to
earlier ones in scratch memory. All sums are float32. The plain form and the choice between the two are in the model.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import target

BLOCK = 128  # tokens per step of the grid
HALO = 8  # tokens before a block that are read with it
GROUPS = (16, 8)  # heads per step of the grid, unless there are fewer in all
LANES = 128
UNROLL = 25  # tokens per turn of a loop


def missing_support(x_BTHK, weight_JHK) -> str:
    """Why the kernels are not taken for these arrays (or jax.ShapeDtypeStruct); empty if they are."""
    (_, T, H, K), taps = x_BTHK.shape, weight_JHK.shape[0]
    if K % LANES or T % BLOCK or not _group(H) or not 1 < taps <= HALO + 1:
        return (
            f"the TPU kernel takes 2 to {HALO + 1} taps, multiples of {BLOCK} tokens and of {LANES} channels, up to "
            f"{GROUPS[0]} or {GROUPS[-1]} n heads, not {taps}, {T}, {K} and {H}"
        )
    if x_BTHK.dtype not in (jnp.bfloat16, jnp.float32):
        return f"the TPU kernel takes bfloat16 and float32, not {x_BTHK.dtype}"
    axes = target.axes_outside_shard_map()
    return f"the compiler cannot split a kernel over mesh axes {axes}" if axes else ""


def _group(H):
    """How many heads a step of the grid takes; None if they do not come out even."""
    return next((n for n in (H, *GROUPS) if n <= GROUPS[0] and H % n == 0), None)


def short_conv(x_BTHK, weight_JHK, segment_ids=None, *, interpret=False):
    """SiLU(y), ``y[t] = sum_j weight[j] x[t - J + 1 + j]`` over tokens of the same document.

    Args:
      x_BTHK: bfloat16 or float32; H a multiple of 8, or at most 16; on TPU K a multiple of 128.
      weight_JHK: two to nine taps; the last one is for the token itself.
      segment_ids: int [B, T], document of each token, or None.

    Returns:
      [B, T, H, K] in x's dtype; differentiable in x and weight.

    Raises:
      ValueError: the number of taps or the head count is not as above.
    """
    B, T, H, _ = x_BTHK.shape
    taps = weight_JHK.shape[0]
    if not 1 < taps <= HALO + 1 or not _group(H):
        raise ValueError(f"short_conv takes 2 to {HALO + 1} taps and up to 16 or 8 n heads, got {taps} and {H}")
    reach = _reach(segment_ids, (B, T), taps)
    missing = -T % BLOCK
    if missing:
        x_BTHK = jnp.pad(x_BTHK, ((0, 0), (0, missing), (0, 0), (0, 0)))
        reach = jnp.pad(reach, ((0, 0), (0, missing)))
    return _conv(interpret, x_BTHK, weight_JHK.astype(jnp.float32), reach)[:, :T]


def _reach(segment_ids, shape_BT, taps):
    """int32 [B, T]: how many tokens before each one belong to its document, at most taps - 1."""
    B, T = shape_BT
    inside = jnp.broadcast_to(jnp.minimum(jnp.arange(T, dtype=jnp.int32), taps - 1), (B, T))
    if segment_ids is None:
        return inside
    reach = jnp.zeros((B, T), jnp.int32)
    for back in range(1, min(taps, T)):
        alike = segment_ids[:, back:] == segment_ids[:, : T - back]
        reach += jnp.pad(alike.astype(jnp.int32), ((0, 0), (back, 0)))
    return jnp.minimum(inside, reach)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conv(interpret, x, weight, reach):
    specs, grid = _specs(x, weight, reverse=False)
    names = ("row", "halo", "weight", "reach")
    return _call(_forward_kernel, "short_conv", grid, [specs[n] for n in names], specs["row"], _like(x), interpret)(
        x, x, weight, reach
    )


def _conv_fwd(interpret, x, weight, reach):
    return _conv(interpret, x, weight, reach), (x, weight, reach)


def _conv_bwd(interpret, saved, dy):
    x, weight, reach = saved
    specs, grid = _specs(x, weight, reverse=True)
    names = ("row", "halo", "weight", "reach", "row")
    heads = specs["weight"].block_shape[1]
    scratch = [pltpu.VMEM((weight.shape[0] - 1, heads, x.shape[3]), jnp.float32)]
    scratch.append(pltpu.SMEM((weight.shape[0] - 1,), jnp.int32))
    outputs = [specs["row"], specs["weight"]], [_like(x), _like(weight)]
    call = _call(_backward_kernel, "short_conv_backward", grid, [specs[n] for n in names], *outputs, interpret, scratch)
    dx, dweight = call(x, x, weight, reach, dy)
    return dx, dweight, np.zeros(reach.shape, jax.dtypes.float0)


_conv.defvjp(_conv_fwd, _conv_bwd)


def _like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _specs(x, weight, *, reverse):
    """Blocks by kind of array, and the grid (groups of heads, rows, blocks of tokens)."""
    B, T, H, K = x.shape
    heads, blocks = _group(H), T // BLOCK
    at = (lambda t: blocks - 1 - t) if reverse else (lambda t: t)
    before = BLOCK // HALO
    specs = {
        "row": pl.BlockSpec((1, BLOCK, heads, K), lambda h, b, t: (b, at(t), h, 0)),
        "halo": pl.BlockSpec((1, HALO, heads, K), lambda h, b, t: (b, jnp.maximum(at(t) * before - 1, 0), h, 0)),
        "weight": pl.BlockSpec((weight.shape[0], heads, K), lambda h, b, t: (0, h, 0)),
        "reach": pl.BlockSpec((1, 1, BLOCK), lambda h, b, t: (b, 0, at(t)), memory_space=pltpu.SMEM),
    }
    return specs, (H // heads, B, blocks)


def _call(kernel, name, grid, in_specs, out_specs, out_shape, interpret, scratch=()):
    call = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name=name,
    )
    return lambda x, halo, weight, reach, *rest: call(x, halo, weight, reach[:, None], *rest)


def _earlier(halo_ref, taps):
    """The taps - 1 tokens before the block, oldest first; `reach` masks them at the start of a row."""
    return [halo_ref[0, HALO - back].astype(jnp.float32) for back in range(taps - 1, 0, -1)]


def _masked(recent, reach):
    """The token and those before it, newest first, zero where they belong to another document."""
    return [x if back == 0 else jnp.where(reach >= back, x, 0.0) for back, x in enumerate(recent)]


def _forward_kernel(x_ref, halo_ref, weight_ref, reach_ref, y_ref):
    taps = weight_ref.shape[0]
    weight = [weight_ref[j] for j in range(taps)]

    def token(t, earlier):
        recent = [x_ref[0, t].astype(jnp.float32), *earlier]
        z = sum(w * x for w, x in zip(reversed(weight), _masked(recent, reach_ref[0, 0, t])))
        y_ref[0, t] = jax.nn.silu(z).astype(y_ref.dtype)
        return recent[:-1]

    _loop(BLOCK, token, _earlier(halo_ref, taps)[::-1])


def _loop(count, body, carry):
    """Folds body(n, carry) over n < count, up to UNROLL of them per turn of a loop."""
    together = max(n for n in range(1, UNROLL + 1) if count % n == 0)

    def turn(n, carry):
        for i in range(together):
            carry = body(n * together + i, carry)
        return carry

    return jax.lax.fori_loop(0, count // together, turn, carry)


def _backward_kernel(x_ref, halo_ref, weight_ref, reach_ref, dy_ref, dx_ref, dweight_ref, later_ref, later_reach_ref):
    """Tokens from the last to the first; `later` holds dy * silu' of the taps - 1 tokens behind, nearest first."""
    taps = weight_ref.shape[0]
    weight = [weight_ref[j] for j in range(taps)]
    b, done = pl.program_id(1), pl.program_id(2)

    @pl.when((b == 0) & (done == 0))
    def _():
        dweight_ref[...] = jnp.zeros_like(dweight_ref)

    @pl.when(done == 0)
    def _():
        later_ref[...] = jnp.zeros_like(later_ref)
        for n in range(later_reach_ref.shape[0]):
            later_reach_ref[n] = 0

    halo, start = _earlier(halo_ref, taps), [x_ref[0, BLOCK - 1 - n].astype(jnp.float32) for n in range(taps - 1)]

    def token(t, oldest, carry):
        recent, later, later_reach, dweight = carry
        recent, reach = [*recent, oldest], reach_ref[0, 0, t]
        seen = _masked(recent, reach)
        z = sum(w * x for w, x in zip(reversed(weight), seen))
        s = jax.nn.sigmoid(z)
        dz = dy_ref[0, t].astype(jnp.float32) * (s * (1 + z * (1 - s)))
        dx = weight[-1] * dz
        for back, (dz_later, reach_later) in enumerate(zip(later, later_reach), 1):
            dx += jnp.where(reach_later >= back, weight[-1 - back] * dz_later, 0.0)
        dx_ref[0, t] = dx.astype(dx_ref.dtype)
        dweight = [d + dz * x for d, x in zip(dweight, seen)]
        return recent[1:], [dz, *later][:-1], [reach, *later_reach][:-1], dweight

    def inside(n, carry):
        t = BLOCK - 1 - n
        return token(t, x_ref[0, t - (taps - 1)].astype(jnp.float32), carry)

    zeros = [jnp.zeros(weight[0].shape, jnp.float32)] * taps
    carry = start, [later_ref[n] for n in range(taps - 1)], [later_reach_ref[n] for n in range(taps - 1)], zeros
    carry = _loop(BLOCK - (taps - 1), inside, carry)
    for t in reversed(range(taps - 1)):
        carry = token(t, halo[t], carry)
    _, later, later_reach, dweight = carry
    for n in range(taps - 1):
        later_ref[n], later_reach_ref[n] = later[n], later_reach[n]
    for back, d in enumerate(dweight):
        dweight_ref[taps - 1 - back] += d
