"""Matrix products of rows that belong to experts: the forms of one gated expert, and which target gets which.

Accelerators multiply rows sorted by expert with one grouped matmul per matrix (:func:`grouped_matmul`). On CPU that
would compute every expert for every row, so there rows are laid out in blocks of one expert each.
"""

from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
from jax import Array

from k3jax.model.ffn import gated

ROW_BLOCK = 128
_ROW_TILES, _WIDTH_TILES = (512, 256, 128), (1024, 1024)  # with two buffers each, 10 MB of VMEM: a v5e has 16
GPU_KERNEL = "tokamax" if find_spec("tokamax") else "xla"


def grouped_matmul(x_ML: Array, w_ELF: Array, sizes_E: Array) -> Array:
    """``x @ w[e]`` for consecutive groups of rows: [M, F] in x's dtype; rows beyond the last group may hold anything.

    ``lax.ragged_dot`` becomes a dense product, E times too large, on every target but v4 and v5p. So on TPU bfloat16
    goes to megablox, which comes with JAX, and on GPU to tokamax where it is installed; which of its kernels, that
    decides by the GPU that it sees while tracing (without one: none). The name of the scope says which library a
    program uses: ``grouped_matmul_megablox``, ``grouped_matmul_tokamax`` or ``grouped_matmul_xla``.
    """
    tpu = _megablox if x_ML.dtype == jnp.bfloat16 else _xla
    return jax.lax.platform_dependent(x_ML, w_ELF, sizes_E, tpu=tpu, cuda=_KERNELS[GPU_KERNEL], default=_xla)


@jax.custom_vjp
def grouped_matmul_transposed(x_MF: Array, w_ELF: Array, sizes_E: Array) -> Array:
    """``x @ w[e].T``, [M, L], otherwise as :func:`grouped_matmul`, of which it is the transpose.

    So is its gradient: that of the weights comes out as [E, L, F] and not turned around, and where the second axis of
    weights is spread over devices, adding it up is a reduce-scatter along an axis that is not the last in memory.
    """
    return grouped_matmul(x_MF, w_ELF.swapaxes(1, 2), sizes_E)


def _transposed_forward(x, w, sizes):
    return grouped_matmul_transposed(x, w, sizes), (x, w, sizes)


def _transposed_backward(kept, dy):
    x, w, sizes = kept
    dx, pull = jax.vjp(lambda w: grouped_matmul(dy, w, sizes), w)
    return dx, *pull(x), None


grouped_matmul_transposed.defvjp(_transposed_forward, _transposed_backward)


def _xla(x, w, sizes):
    with jax.named_scope("grouped_matmul_xla"):
        return jax.lax.ragged_dot(x, w, sizes)


def _megablox(x, w, sizes):
    """Rows are filled up to whole tiles of at least 128, which the kernel needs."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm  # imported here: Pallas takes a second to load

    rows = next((n for n in _ROW_TILES if len(x) % n == 0), _ROW_TILES[-1])
    filled = jnp.pad(x, ((0, -len(x) % rows), (0, 0)))
    with jax.named_scope("grouped_matmul_megablox"):
        return gmm(filled, w, sizes, x.dtype, (rows, *_WIDTH_TILES))[: len(x)]


def _tokamax(x, w, sizes):
    import tokamax  # imported here: an optional package that takes seconds to load

    with jax.named_scope("grouped_matmul_tokamax"):
        return tokamax.ragged_dot(x, w, sizes)


_KERNELS = {"tokamax": _tokamax, "xla": _xla}


def grouped_ffn(rows_ML, sizes_E, scale_M, gate_ELF, up_ELF, down_ELF, activation) -> Array:
    """``scale * E_e(row)`` for rows sorted by expert, ``sizes_E`` of each: [M, L] in the rows' dtype.

    The scale, float32, multiplies the hidden activation: so its gradient needs no output of the experts (K3 report,
    section 5.2). Rows beyond the last group have no gradient and may come back as anything.
    """
    return jax.lax.platform_dependent(
        *(rows_ML, sizes_E, scale_M, gate_ELF, up_ELF, down_ELF),
        cpu=partial(_blocked_ffn, activation=activation),
        default=partial(_ragged_ffn, activation=activation),
    )


def _ragged_ffn(rows, sizes, scale, gate, up, down, *, activation):
    inside = jnp.arange(len(rows))[:, None] < sizes.sum()
    g, u = (jnp.where(inside, grouped_matmul(rows, w, sizes), 0) for w in (gate, up))
    hidden = (gated(activation, g, u).astype(jnp.float32) * scale[:, None]).astype(rows.dtype)
    return grouped_matmul_transposed(hidden, down, sizes)


def _blocked_ffn(rows, sizes, scale, gate, up, down, *, activation):
    expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(rows), dtype=jnp.int32), side="right")
    return blocked(rows, expert[:, None], gate, up, down, activation=activation, scale_NA=scale[:, None])[:, 0]


def ragged(z_NL, experts_NA, gate, up, down, *, activation):
    """Each token's A expert outputs, [N, A, L], through ragged matmuls over the copies sorted by expert."""
    N, A = experts_NA.shape
    order = jnp.argsort(experts_NA.reshape(-1), stable=True)
    sizes = jnp.bincount(experts_NA.reshape(-1), length=gate.shape[0]).astype(jnp.int32)
    rows = z_NL[order // A]
    g, u = grouped_matmul(rows, gate, sizes), grouped_matmul(rows, up, sizes)
    y = grouped_matmul_transposed(gated(activation, g, u), down, sizes)
    return y[jnp.argsort(order)].reshape(N, A, -1)


def blocked(z_NL, experts_NA, gate, up, down, *, activation, scale_NA=None):
    """The same through equal blocks of rows: every expert has whole blocks, ``N A / block + E`` of them in all.

    The number of experts as a choice means none: zeros. With ``scale_NA``, float32, outputs are multiplied by it.
    """
    (N, A), E = experts_NA.shape, gate.shape[0]
    block = min(ROW_BLOCK, N * A)
    blocks = -(-N * A // block) + E
    flat = experts_NA.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=E)
    padded = -(-sizes // block) * block
    starts, padded_starts = jnp.cumsum(sizes) - sizes, jnp.cumsum(padded) - padded
    expert_of_copy = flat[order]
    row_of_sorted = padded_starts[expert_of_copy] + jnp.arange(N * A) - starts[expert_of_copy]
    row_of_sorted = jnp.where(expert_of_copy < E, row_of_sorted, blocks * block).astype(jnp.int32)
    row_of_copy = jnp.zeros(N * A, jnp.int32).at[order].set(row_of_sorted)
    copy_of_row = jnp.full(blocks * block, N * A, jnp.int32).at[row_of_sorted].set(order.astype(jnp.int32))
    owner = jnp.searchsorted(jnp.cumsum(padded), jnp.arange(blocks) * block, side="right").clip(0, E - 1)
    rows = jnp.take(z_NL, copy_of_row // A, axis=0, mode="fill", fill_value=0).reshape(blocks, block, -1)
    g = jnp.einsum("xnl,xlf->xnf", rows, gate[owner])
    u = jnp.einsum("xnl,xlf->xnf", rows, up[owner])
    hidden = gated(activation, g, u)
    if scale_NA is not None:
        scale = jnp.take(scale_NA.reshape(-1), copy_of_row, mode="fill", fill_value=0).reshape(blocks, block, 1)
        hidden = (hidden.astype(jnp.float32) * scale).astype(hidden.dtype)
    y = jnp.einsum("xnf,xlf->xnl", hidden, down[owner])
    return jnp.take(y.reshape(blocks * block, -1), row_of_copy, axis=0, mode="fill", fill_value=0).reshape(N, A, -1)
