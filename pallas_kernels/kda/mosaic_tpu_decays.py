"""Decays inside a chunk on TPU, and the products of queries and keys that they weigh.

The decay from token j to a later token i is split into a factor of the row i and one of the column j, with an anchor
between them. Bounded log-decays have one anchor per block of 16 rows, unbounded ones one per level of a binary tree, so
that no exponent is positive.

Anchors of blocks are whole numbers in base 2: moving a column from one anchor to another multiplies by a power of two,
which rounds nothing. So every term sees the same rounded columns, and what must cancel in the gradient of the decays
(`mosaic_tpu_backward.py`) does.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.mosaic_tpu_math import BLOCK, NT, concatenate, halves, iota


class Term(NamedTuple):
    """decay(j -> i) = row_i * column_j for rows start..stop, each [rows, K] float32.

    Unbounded: column covers the chunk, with zeros where another term serves the pair. Bounded: column covers the rows
    of this block; those of earlier blocks are theirs times every `shrink` [1, K] of a block since (None in the first).
    """

    start: int
    stop: int
    row: jax.Array
    column: jax.Array
    shrink: jax.Array | None = None


class Decays(NamedTuple):
    """Decays of one head for one chunk, float32. `terms` cover every pair i > j once."""

    enter: jax.Array  # [C, K], from the start of the chunk to i
    leave: jax.Array  # [C, K], from i to the end of the chunk
    whole: jax.Array  # [1, K]
    terms: tuple[Term, ...]
    last: jax.Array | None = None  # [1, K], from the last anchor to the end of the chunk; None without a bound


def pair_decays(plan, masks, heads):
    """Generator: decays of two heads."""
    C, K = plan.chunk, plan.key
    g = plan.pieces(jnp.concatenate([h.gate.g for h in heads], 1), 2 if plan.bounded else 3)
    until = jnp.where(iota((C, C), 0) >= iota((C, C), 1), 1.0, 0.0)
    sums = plan.product(until if plan.bounded else dyadic_masks(C), g)
    yield
    function = _bounded_decays if plan.bounded else _unbounded_decays
    return [_mask_decays(masks, function(plan, sums[:, n * K : (n + 1) * K])) for n in range(2)]


def _bounded_decays(plan, G):
    """Decays from running sums G [C, K] when no log-decay is below SAFE_LOWER_BOUND.

    A block's anchor is the sum at its first row plus a constant, which centers the exponents without looking at later
    tokens, so later tokens change no bit of earlier results.
    """
    center = 0.5 * (BLOCK - 1) * plan.lower_bound / math.log(2)
    terms, before = [], None
    for start in range(0, plan.chunk, BLOCK):
        stop = start + BLOCK
        anchor = jnp.floor(G[start : start + 1] + center)
        distance = G[start:stop] - anchor
        shrink = None if before is None else jnp.exp2(anchor - before)
        before = anchor
        terms.append(Term(start, stop, jnp.exp2(distance), jnp.exp2(-distance), shrink))
    last = G[plan.chunk - 1 :]
    return Decays(jnp.exp2(G), jnp.exp2(last - G), jnp.exp2(last), tuple(terms), jnp.exp2(last - before))


def dyadic_masks(C):
    """0/1 matrices [(2 + log2 C) * C, C]: sums of log-decays to a token, after it, and to the anchor of each level.

    At the level of blocks of b tokens a pair is split at the first row of the later block: i sums from there to itself,
    j sums from behind itself to there. All exponents are sums of log-decays, <= 0 and without cancellation.
    """
    i, m = iota((C, C), 0), iota((C, C), 1)
    masks = [m <= i, m > i]
    for b in _dyadic_levels(C):
        odd = (i // b) % 2 == 1
        anchor = jnp.where(odd, i // b * b, (i // b + 1) * b)
        masks.append(jnp.where(odd, (m > anchor) & (m <= i), (m > i) & (m <= anchor)))
    return jnp.concatenate([jnp.where(x, 1.0, 0.0) for x in masks], 0)


def _dyadic_levels(C):
    return [1 << n for n in range(C.bit_length() - 1)]


def _unbounded_decays(plan, sums):
    """Decays from sums [(2 + log2 C) * C, K] over `dyadic_masks`; finite for every log-decay <= 0."""
    C = plan.chunk
    parts = [jnp.exp2(sums[n * C : (n + 1) * C]) for n in range(sums.shape[0] // C)]
    row = iota((C, sums.shape[1]), 0)
    terms = []
    for b, decay in zip(_dyadic_levels(C), parts[2:]):
        odd = (row // b) % 2 == 1
        terms.append(Term(0, C, jnp.where(odd, decay, 0.0), jnp.where(odd, 0.0, decay)))
    return Decays(parts[0], parts[1], parts[0][C - 1 :], tuple(terms))


def _mask_decays(masks, decays):
    """Cuts a chunk's contact with the state for tokens of documents that do not enter or leave it."""
    if masks.enter is None:
        return decays
    enter, leave = decays.enter * masks.enter, decays.leave * masks.leave
    return decays._replace(enter=enter, leave=leave, whole=decays.whole * masks.keep)


def term_mask(plan, index):
    """bool [rows, 2C]: pairs that a term of unbounded decays covers."""
    C = plan.chunk
    i, j = iota((C, 2 * C), 0), iota((C, 2 * C), 1) % C
    size = 2 * _dyadic_levels(C)[index]
    return i // size == j // size


def columns(plan, head, decays, count):
    """Decayed keys of each term as `count` pieces [rows up to its end, K], alike in all terms but for powers of two."""
    out, before = [], None
    for term in decays.terms:
        own = plan.pieces(head.k[: term.stop][-len(term.column) :] * term.column, count)
        if before is not None and plan.bounded:
            own = tuple(concatenate([x * term.shrink.astype(x.dtype), y], 0) for x, y in zip(before, own))
        out.append(own)
        before = own
    return out


def pair_matrices(plan, masks, heads, decays, *, between_keys):
    """Generator: A_ij = <q_i, k_j decay>, i >= j, and B_ij = <k_i, k_j decay>, i > j; [C, 2C] of two heads.

    between_keys: with B, for the forward. Else B is None, and the diagonal of A, which no decay reaches, is exact.
    Third, the decayed keys of the last term of each head.
    """
    C = plan.chunk
    sides = 2 if between_keys else 1
    found = [[] for _ in range(sides)]
    decayed = [columns(plan, h, d, 2) for h, d in zip(heads, decays)]
    for index in range(len(decays[0].terms)):
        both = []
        for h, d, column in zip(heads, decays, decayed):
            term = d.terms[index]
            rows = concatenate([x[term.start : term.stop] * term.row for x in (h.q, h.k)[:sides]], 0)
            x = plan.product(rows, column[index], NT)
            if x.shape[1] < C:
                x = jnp.concatenate([x, jnp.zeros((x.shape[0], C - x.shape[1]), jnp.float32)], 1)
            both.append(x)
        yield
        both = jnp.concatenate(both, 1)
        size = len(both) // sides
        for n in range(sides):
            part = both[n * size : (n + 1) * size]
            found[n].append(part if plan.bounded else jnp.where(term_mask(plan, index), part, 0.0))
    A, *B = (jnp.concatenate(x, 0) if plan.bounded else sum(x) for x in found)
    A = jnp.where(masks.until, A, 0.0)
    i, j = iota((C, 2 * C), 0), iota((C, 2 * C), 1) % C
    if not (plan.bounded and between_keys):
        A = jnp.where(i == j, halves(plan, *(jnp.sum(h.q * h.k, -1, keepdims=True) for h in heads)), A)
    return A, jnp.where(masks.until & (i != j), B[0], 0.0) if between_keys else None, [x[-1] for x in decayed]
