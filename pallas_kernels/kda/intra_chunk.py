"""What the chunk form of KDA computes from one chunk alone: decayed products of queries and keys, a triangular inverse.

The decay from token j to a later token i is exp(g_{j+1} + ... + g_i) per channel, inside a sum over channels. To be a
matrix product it has to be split into a factor of the row and a factor of the column. Split at the start of the chunk,
one of them would overflow. Here a chunk is cut into blocks, and a pair in different blocks is split at the start of the
row's block: both exponents are sums of log-decays, <= 0 for any gate, and no large sums are subtracted.
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
matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class Factors(NamedTuple):
    """All that depends on the decays of one chunk; leading axes [B, H]."""

    A_CC: jax.Array  # <q_i, k_j decay(j -> i)> for j <= i, else zero
    B_CC: jax.Array  # <k_i, k_j decay(j -> i)> for j < i, else zero
    q_start_CK: jax.Array  # q_i decay(start -> i)
    k_start_CK: jax.Array  # k_i decay(start -> i)
    k_end_CK: jax.Array  # k_i decay(i -> end)
    decay_CK: jax.Array  # decay(start -> i); only for the last token, [..., 1, K], if start and end are the chunk's


class _Decays(NamedTuple):
    """Decays in I blocks of i tokens."""

    log_prefix_IiK: jax.Array  # logarithm of the next
    prefix_IiK: jax.Array  # from the start of the block up to and including the token
    suffix_IiK: jax.Array  # after the token until the end of the block
    between_IJK: jax.Array  # from the start of block J to the start of block I, 0 <= J <= I <= number of blocks


def factors(q_CK, k_CK, g_CK, same_BCC, *, lower_bound, by_document) -> Factors:
    """Decayed products and factors of a chunk; same_BCC [B, C, C] (or None) is True where two tokens share a document.

    Start and end are those of the chunk or, by_document, those of the token's document if they are nearer.
    """
    decays = _block_decays(_split(g_CK, BLOCK))
    A_CC, B_CC = decayed_products(q_CK, k_CK, g_CK, decays, lower_bound=lower_bound)
    if same_BCC is not None:
        A_CC, B_CC = (jnp.where(same_BCC[:, None], x, 0) for x in (A_CC, B_CC))
    # A token's own product has no decay: kept apart, it adds no rounding to the gradient of the gates.
    A_CC = A_CC + jnp.sum(q_CK * k_CK, axis=-1, keepdims=True) * np.eye(q_CK.shape[-2], dtype=q_CK.dtype)
    if by_document:
        start_CK, end_CK, total_CK = _decays_within_documents(g_CK, same_BCC)
    else:
        start_CK, end_CK, total_CK = _decays_within_chunk(decays)
    return Factors(A_CC, B_CC, q_CK * start_CK, k_CK * start_CK, k_CK * end_CK, total_CK)


def _decays_within_documents(g_CK, same_BCC):
    C = g_CK.shape[-2]
    until, after = np.tri(C, dtype=bool), np.tri(C, k=-1, dtype=bool).T
    start_CK, end_CK = (jnp.exp(_masked_sum(mask & same_BCC[:, None], g_CK)) for mask in (until, after))
    return start_CK, end_CK, start_CK


def _decays_within_chunk(decays):
    between = decays.between_IJK
    start = decays.prefix_IiK * between[..., :-1, 0, None, :]
    end = decays.suffix_IiK * between[..., -1, 1:, None, :]
    start_CK, end_CK = (x.reshape(*x.shape[:-3], -1, x.shape[-1]) for x in (start, end))
    return start_CK, end_CK, between[..., -1, :1, :]


def decayed_products(q_CK, k_CK, g_CK, decays, *, lower_bound):
    """<q_i, k_j decay(j -> i)> and <k_i, k_j decay(j -> i)> for j < i, each [..., C, C], given decays in blocks of 16.

    A lower bound of -5 or nearer to zero allows one product for all pairs. Otherwise blocks are cut again until they
    hold a single token: 16, 4, 1.
    """
    if lower_bound is not None and lower_bound >= SAFE_LOWER_BOUND:
        return _products_of_blocks(q_CK, k_CK, decays, within_bound=lower_bound)
    between = _products_of_blocks(q_CK, k_CK, decays, within_bound=None)
    within = _products_within_blocks(q_CK, k_CK, g_CK, BLOCK)
    return tuple(x + _block_diagonal(y) for x, y in zip(between, within))


def _products_within_blocks(q_CK, k_CK, g_CK, block):
    """Products of pairs in the same block, each [..., I, i, i]."""
    q, k, g = (_split(x, block) for x in (q_CK, k_CK, g_CK))
    smaller = block // 4
    products = _products_of_blocks(q, k, _block_decays(_split(g, smaller)), within_bound=None)
    if smaller == 1:
        return products
    return tuple(x + _block_diagonal(y) for x, y in zip(products, _products_within_blocks(q, k, g, smaller)))


def _products_of_blocks(q_CK, k_CK, decays, *, within_bound):
    """Products of pairs in different blocks and, if their log-decays are bounded, of pairs in the same one."""
    n_blocks, block = decays.prefix_IiK.shape[-3:-1]
    C = n_blocks * block
    q, k = _split(q_CK, block), _split(k_CK, block)
    # Half a block's decay moves from the rows to the columns, else the gradient meets products near exp(-80).
    scale = 1.0 if within_bound is None else math.exp(-within_bound * block / 2)
    row_decay = decays.prefix_IiK * scale
    rows = jnp.concatenate([q * row_decay, k * row_decay], axis=-2)
    earlier = np.tri(n_blocks, k=-1, dtype=k.dtype)[:, :, None, None] / scale
    columns = (k * decays.suffix_IiK)[..., None, :, :, :] * (decays.between_IJK[..., :-1, 1:, None, :] * earlier)
    if within_bound is not None:
        same = np.eye(n_blocks, dtype=k.dtype)[:, :, None, None]
        columns = columns + (k * _scaled_exp(-decays.log_prefix_IiK, 1 / scale))[..., None, :, :, :] * same
    columns = columns.reshape(*columns.shape[:-3], C, -1)
    products = einsum("...Iik,...Ijk->...Iij", rows, columns)
    strict = np.tri(C, k=-1, dtype=bool)
    halves = products[..., :block, :], products[..., block:, :]
    return tuple(jnp.where(strict, x.reshape(*x.shape[:-3], C, C), 0) for x in halves)


def _block_decays(g_IiK) -> _Decays:
    n_blocks, block = g_IiK.shape[-3:-1]
    masks = np.concatenate([np.tri(block, dtype=bool), np.tri(block, k=-1, dtype=bool).T])
    sums = _masked_sum(masks, g_IiK)
    prefix_IiK, suffix_IiK = jnp.split(jnp.exp(sums), 2, axis=-2)
    I, J, L = np.ogrid[: n_blocks + 1, : n_blocks + 1, :n_blocks]
    between = jnp.exp(_masked_sum(((J <= L) & (L < I)).reshape(-1, n_blocks), sums[..., block - 1, :]))
    between_IJK = between.reshape(*g_IiK.shape[:-3], n_blocks + 1, n_blocks + 1, -1)
    return _Decays(sums[..., :block, :], prefix_IiK, suffix_IiK, between_IJK)


def unit_lower_inverse(L_CC):
    """(I + L)^-1 for strictly lower triangular L [..., C, C].

    Diagonal blocks of 8 by (I - L)(I + L^2)(I + L^4), then neighbors are merged. For nearly parallel keys powers of L
    grow like binomial coefficients and cancel, which blocks of 8 can afford in float32 and blocks of 64 cannot.
    """
    C, block = L_CC.shape[-1], 8
    i, j = np.ogrid[:C, :C]
    L = L_CC * (i // block == j // block)
    square = matmul(L, L)
    X = np.eye(C, dtype=L.dtype) - L
    X = X + matmul(X, square)
    X = X + matmul(X, matmul(square, square))
    while block < C:
        below = (i // block % 2 == 1) & (i // block == j // block + 1)
        X = X - matmul(X, matmul(L_CC * below, X))
        block *= 2
    return X


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


def _masked_sum(mask_ij, g_jK):
    """Sums of log-decays as a matrix product; a mask for every matrix, so that no operand has to be transposed."""
    mask_ij = jnp.broadcast_to(jnp.asarray(mask_ij, g_jK.dtype), g_jK.shape[:-2] + mask_ij.shape[-2:])
    return einsum("...ij,...jk->...ik", mask_ij, g_jK)


def _block_diagonal(x):
    """[..., I, i, j] -> [..., I * i, I * j] with zeros elsewhere."""
    n, block = x.shape[-3], x.shape[-1]
    full = x[..., :, :, None, :] * np.eye(n, dtype=x.dtype)[:, None, :, None]
    return full.reshape(*x.shape[:-3], n * block, n * block)
