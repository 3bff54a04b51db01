"""What the chunk form of KDA computes from one chunk alone: decayed products of queries and keys, and a triangular inverse.

The decay between token j and a later token i is exp(g_{j+1} + ... + g_i) per channel, inside a sum over channels, so it has
to be split into a factor of the row and a factor of the column before a matrix product can be used. Splitting at the start
of the chunk would overflow. Here a chunk is cut into blocks and a pair in different blocks is split at the start of the
row's block: both exponents are sums of log-decays and therefore <= 0 for any gate, and no large sums are subtracted.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Inside one block the column's exponent is positive, at most BLOCK * |log-decay|: exp(80) leaves room in float32.
BLOCK = 16
SAFE_LOWER_BOUND = -80.0 / BLOCK

einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Factors(NamedTuple):
    """All that depends on the decays of one chunk; leading axes [B, H]."""

    A_CC: jax.Array  # <q_i, k_j decay(j -> i)> for i >= j
    B_CC: jax.Array  # <k_i, k_j decay(j -> i)> for i > j
    q_in_CK: jax.Array  # q_i decay(start -> i)
    k_in_CK: jax.Array  # k_i decay(start -> i)
    k_out_CK: jax.Array  # k_i decay(i -> end)
    decay_CK: jax.Array  # decay(start -> i)


def factors(q_CK, k_CK, g_CK, same_BCC, *, lower_bound) -> Factors:
    """Decayed products and factors of a chunk; same_BCC [B, C, C] (or None) is True where two tokens share a document.

    Start and end are those of the chunk or, if nearer, of the token's document.
    """
    C = q_CK.shape[-2]
    until, after = np.tri(C, dtype=bool), np.tri(C, k=-1, dtype=bool).T
    if same_BCC is not None:
        until, after = until & same_BCC[:, None], after & same_BCC[:, None]
    decay_CK = jnp.exp(_masked_sum(until, g_CK))
    A_CC, B_CC = decayed_products(q_CK, k_CK, g_CK, lower_bound=lower_bound)
    if same_BCC is not None:
        A_CC, B_CC = (jnp.where(same_BCC[:, None], x, 0) for x in (A_CC, B_CC))
    A_CC = A_CC + jnp.sum(q_CK * k_CK, axis=-1, keepdims=True) * np.eye(C)
    return Factors(
        A_CC=A_CC,
        B_CC=B_CC,
        q_in_CK=q_CK * decay_CK,
        k_in_CK=k_CK * decay_CK,
        k_out_CK=k_CK * jnp.exp(_masked_sum(after, g_CK)),
        decay_CK=decay_CK,
    )


def decayed_products(q_CK, k_CK, g_CK, *, lower_bound):
    """Strictly lower triangular <q_i, k_j decay(j -> i)> and <k_i, k_j decay(j -> i)>, each [..., C, C].

    A lower bound of -5 or nearer to zero allows one product for all pairs. Otherwise blocks are cut again until they hold a
    single token: 16, 4, 1.
    """
    if lower_bound is not None and lower_bound >= SAFE_LOWER_BOUND:
        return _products_of_blocks(q_CK, k_CK, g_CK, BLOCK, within_bound=lower_bound)
    return _products_of_smaller_blocks(q_CK, k_CK, g_CK, BLOCK)


def _products_of_smaller_blocks(q_CK, k_CK, g_CK, block):
    A_CC, B_CC = _products_of_blocks(q_CK, k_CK, g_CK, block, within_bound=None)
    if block == 1:
        return A_CC, B_CC
    cut = (_split(x, block) for x in (q_CK, k_CK, g_CK))
    within = _products_of_smaller_blocks(*cut, block // 4)
    return A_CC + _block_diagonal(within[0]), B_CC + _block_diagonal(within[1])


def _products_of_blocks(q_CK, k_CK, g_CK, block, *, within_bound):
    """Products of pairs in different blocks and, if their log-decays are bounded, of pairs in the same one."""
    C = q_CK.shape[-2]
    n_blocks = C // block
    q, k, g = (_split(x, block) for x in (q_CK, k_CK, g_CK))  # [..., I, i, K]
    until, after = np.tri(block, dtype=bool), np.tri(block, k=-1, dtype=bool).T
    row_exponent = _masked_sum(until, g)  # block start -> i
    column_exponent = _masked_sum(after, g)  # j -> end of its block
    # [..., I, J, j, K]: j -> end of block J -> start of block I
    exponent = column_exponent[..., None, :, :, :] + _sums_between(g.sum(-2))[..., :, :, None, :]
    pairs = np.tri(n_blocks, k=-1, dtype=bool)[:, :, None, None]
    scale = 1.0
    if within_bound is not None:
        diagonal = np.eye(n_blocks, dtype=bool)[:, :, None, None]
        exponent = jnp.where(diagonal, -row_exponent[..., None, :, :, :], exponent)
        pairs = pairs | diagonal
        # Half a block's decay moves from the rows to the columns, else the gradient meets products near exp(-80).
        scale = math.exp(-within_bound * block / 2)
    columns = jnp.where(pairs, k[..., None, :, :, :] * _scaled_exp(jnp.where(pairs, exponent, 0), 1 / scale), 0)
    columns = columns.reshape(*columns.shape[:-3], C, -1)
    rows = jnp.concatenate([q, k], axis=-2) * jnp.tile(_scaled_exp(row_exponent, scale), (2, 1))
    products = einsum("...Iik,...Ijk->...Iij", rows, columns)
    strict = np.tri(C, k=-1, dtype=bool)
    halves = products[..., :block, :], products[..., block:, :]
    return tuple(jnp.where(strict, x.reshape(*x.shape[:-3], C, C), 0) for x in halves)


def unit_lower_inverse(L_CC):
    """(I + L)^-1 for strictly lower triangular L [..., C, C], C a multiple of 8.

    Blocks of 8 by (I - L)(I + L^2)(I + L^4), then pairs of blocks are merged. Powers of a larger block would grow like
    binomial coefficients when keys are nearly parallel and cancel nothing but digits.
    """
    C, block = L_CC.shape[-1], 8
    L = jnp.stack([L_CC[..., i : i + block, i : i + block] for i in range(0, C, block)], axis=-3)
    square = einsum("...ij,...jk->...ik", L, L)
    X = np.eye(block, dtype=L.dtype) - L
    X = X + einsum("...ij,...jk->...ik", X, square)
    X = X + einsum("...ij,...jk,...kl->...il", X, square, square)
    while block < C:
        below = [L_CC[..., i + block : i + 2 * block, i : i + block] for i in range(0, C, 2 * block)]
        first, second = X[..., 0::2, :, :], X[..., 1::2, :, :]
        corner = -einsum("...ij,...jk,...kl->...il", second, jnp.stack(below, axis=-3), first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        X = jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        block *= 2
    return X[..., 0, :, :]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _scaled_exp(x, scale):
    """scale * exp(x), whose derivative never holds the cotangent times scale alone."""
    return scale * jnp.exp(x)


@_scaled_exp.defjvp
def _scaled_exp_jvp(scale, primals, tangents):
    y = _scaled_exp(primals[0], scale)
    return y, y * tangents[0]


def _split(x_CK, block):
    return x_CK.reshape(*x_CK.shape[:-2], -1, block, x_CK.shape[-1])


def _masked_sum(mask, g_CK):
    return einsum("...ij,...jk->...ik", jnp.asarray(mask, g_CK.dtype), g_CK)


def _sums_between(total_JK):
    """[..., I, J, K]: the sum of the totals of the blocks strictly between J and I."""
    n = total_JK.shape[-2]
    I, J, L = np.ogrid[:n, :n, :n]
    return einsum("IJL,...Lk->...IJk", jnp.asarray((J < L) & (L < I), total_JK.dtype), total_JK)


def _block_diagonal(x):
    """[..., I, i, j] -> [..., I * i, I * j] with zeros elsewhere."""
    n, block = x.shape[-3], x.shape[-1]
    full = x[..., :, :, None, :] * np.eye(n, dtype=x.dtype)[:, None, :, None]
    return full.reshape(*x.shape[:-3], n * block, n * block)
