"""The balanced plan: which experts are lent to which rank so that every rank computes equally many rows (MoonEP).

K3 report (arXiv 2607.24653), section 5.2.1 and appendix E. Every rank makes the same plan from the same counts, inside
the step: a few small integer arrays, static shapes, no word to the host.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Assignment(NamedTuple):
    """Who computes how many rows of what, for R ranks that own J experts each.

    kept: [R, J] int32, rows of its own experts that each rank computes. donor: [R] int32, the only rank that lends
    experts to each rank; itself if none does. lent: [R, J] int32, rows of its donor's experts that each rank computes.
    """

    kept: Array
    donor: Array
    lent: Array


def balanced_assignment(rows_E: Array, ranks: int) -> Assignment:
    """The assignment that gives every rank ``sum(rows) / ranks`` rows. ``rows_E``: [E] int32, the rows of each expert.

    Appendix E's construction: the rank with the fewest rows is filled up, exactly, by the one with the most, at most
    R - 1 times. So a rank borrows from one donor only and never more than E/R experts. A donor lends its experts from
    the largest down, one rank after another, so that a hot expert goes to many and few are lent in all.

    Raises:
      ValueError: ``ranks`` does not divide the number of experts.
    """
    if len(rows_E) % ranks:
        raise ValueError(f"{len(rows_E)} experts over {ranks} ranks, but the ranks must divide the experts")
    home = rows_E.reshape(ranks, -1).astype(jnp.int32)
    quota, donor = _fills(home.sum(axis=1))
    first = _starts(home)
    rank = jnp.arange(ranks)
    earlier = (donor[:, None] == donor) & (rank < rank[:, None])
    begin = jnp.where(earlier, quota, 0).sum(axis=1)[:, None]
    lent = overlap(begin, quota[:, None], first[donor], home[donor])
    given = jnp.zeros_like(home).at[donor].add(lent)
    return Assignment(home - given, donor, lent)


def overlap(start, length, other_start, other_length) -> Array:
    """How many places two intervals share, elementwise."""
    end = jnp.minimum(start + length, other_start + other_length)
    return jnp.maximum(end - jnp.maximum(start, other_start), 0)


def _fills(load_R):
    """How many rows each rank is given and by whom. A giver always has them: whoever is above the mean owns more rows
    of its own than the mean, and nobody lacks more than that."""
    ranks = jnp.arange(len(load_R), dtype=jnp.int32)

    def fill(_, carry):
        surplus, quota, donor = carry
        low, high = jnp.argmin(surplus), jnp.argmax(surplus)
        moved = jnp.maximum(-surplus[low], 0)
        surplus = surplus.at[high].add(-moved).at[low].add(moved)
        donor = donor.at[low].set(jnp.where(moved > 0, ranks[high], donor[low]))
        return surplus, quota.at[low].add(moved), donor

    start = load_R - load_R.sum() // len(load_R), jnp.zeros_like(load_R), ranks
    return lax.fori_loop(0, len(load_R) - 1, fill, start)[1:]


def _starts(rows_RJ):
    """Where each expert's rows begin when its rank lays them out from the largest expert down."""
    other, this = rows_RJ[:, None, :], rows_RJ[:, :, None]
    number = jnp.arange(rows_RJ.shape[1])
    before = (other > this) | ((other == this) & (number < number[:, None]))
    return jnp.where(before, other, 0).sum(axis=2)
