"""Where each copy of a token goes, and the collective that carries it there and back.

A *copy* is one of a token's A choices. A rank sends its copies sorted by destination and, within, by the slot of the
destination: its own J = E/R experts and, in the balanced plan, the J of its donor. They arrive in the order of source
and slot, ``rows`` at a time: a *pass*. Everything follows from one table of counts, which all ranks hold.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from k3jax.parallel.plan_balanced import Assignment, overlap

LANES = 128


class Dispatch(NamedTuple):
    """Integers only. R ranks, B slots.

    position: [N, A], place of each copy in what this rank sends. order: [N A], its inverse. sent: [R, R], rows from
    each rank to each. arriving: [R, B], rows that this rank gets from each rank for each slot.
    """

    position: Array
    order: Array
    sent: Array
    arriving: Array


class Leg(NamedTuple):
    """One ragged exchange: rows from rank r to rank d, and where they begin at either end; each [R, R] (r, d)."""

    sizes: Array
    begin: Array
    end: Array

    def back(self) -> "Leg":
        """The same rows, the other way."""
        return Leg(self.sizes.T, self.end.T, self.begin.T)


class Pass(NamedTuple):
    """One pass: how its rows travel, how many arrive here for each slot ([B]), the place of each arriving row when they
    are sorted by slot ([rows]), and that permutation's inverse."""

    leg: Leg
    slots: Array
    place: Array
    inverse: Array


def counts(experts_NA: Array, E: int, axis) -> Array:
    """[R, E] int32: how many copies each rank has for each expert."""
    return lax.all_gather(jnp.bincount(experts_NA.reshape(-1), length=E).astype(jnp.int32), axis)


def dispatch(experts_NA: Array, counts_RE: Array, assignment: Assignment | None, axis) -> Dispatch:
    """The plan of this rank; without an assignment every expert is computed where it lies."""
    (R, E), me = counts_RE.shape, lax.axis_index(axis)
    J, ranks, flat = E // R, jnp.arange(R), experts_NA.reshape(-1)
    before = _exclusive(counts_RE, 0)
    place = before[me][flat] + _place_within_expert(flat, E)
    home, slot = flat // J, flat % J
    expert, start, rows = jnp.arange(E).reshape(R, J), jnp.zeros((R, J), jnp.int32), counts_RE.sum(axis=0).reshape(R, J)
    if assignment is not None:
        kept, donor, lent = assignment
        earlier = (donor[:, None] == donor) & (ranks < ranks[:, None])
        lent_start = kept[donor] + jnp.einsum("ud,dj->uj", earlier.astype(jnp.int32), lent)
        goes = (donor == home[:, None]) & (place[:, None] >= lent_start.T[slot])
        goes &= place[:, None] < (lent_start + lent).T[slot]
        borrowed = goes.any(axis=1)
        home, slot = jnp.where(borrowed, goes.argmax(axis=1), home), jnp.where(borrowed, slot + J, slot)
        expert, rows = jnp.concatenate([expert, expert[donor]], 1), jnp.concatenate([kept, lent], 1)
        start = jnp.concatenate([start, lent_start], 1)
    table = overlap(before[:, expert], counts_RE[:, expert], start, rows)
    begin = _exclusive(table[me].reshape(-1), 0).reshape(R, -1) - jnp.maximum(start, before[me][expert])
    position = place + begin[home, slot]
    order = jnp.zeros_like(position).at[position].set(jnp.arange(len(flat), dtype=jnp.int32), unique_indices=True)
    return Dispatch(position.reshape(experts_NA.shape), order, table.sum(axis=2), table[:, me])


def one_pass(plan: Dispatch, number: Array | int, rows: int) -> Pass:
    """The pass of this number, of ``rows`` rows."""
    first = number * rows
    arrive, leave = _exclusive(plan.sent, 0), _exclusive(plan.sent, 1)
    sizes = overlap(arrive, plan.sent, first, rows)
    skipped = jnp.clip(first - arrive, 0, plan.sent)
    leg = Leg(sizes, leave + skipped, jnp.clip(arrive - first, 0, rows))
    inside = jnp.clip(jnp.cumsum(plan.arriving.reshape(-1)) - first, 0, rows)
    here = jnp.diff(inside, prepend=0).reshape(plan.arriving.shape)
    slots = here.sum(axis=0)
    shift = (_exclusive(slots, 0) + _exclusive(here, 0)).reshape(-1) - (inside - here.reshape(-1))
    row = jnp.arange(rows, dtype=jnp.int32)
    pair = jnp.searchsorted(inside, row, side="right", method="compare_all")
    place = jnp.where(row < inside[-1], row + shift.at[pair].get(mode="clip"), row)
    inverse = jnp.zeros_like(row).at[place].set(row, unique_indices=True)
    return Pass(leg, slots, place, inverse)


def passes(plan: Dispatch, rows: int) -> Array:
    """How many passes all ranks take: as many as the fullest needs."""
    return -(-plan.sent.sum(axis=0).max() // rows)


def exchange(x: Array, into: Array, leg: Leg, axis) -> Array:
    """``into`` with the rows of every rank's ``x`` that the leg brings here; no gradient of its own.

    ``lax.ragged_all_to_all``, which moves these rows and no others. XLA on CPU has none: there everything is gathered
    and the same rows are chosen.
    """
    return lax.platform_dependent(
        *(x, into, leg), cpu=partial(_gathered_exchange, axis=axis), default=partial(_ragged_exchange, axis=axis)
    )


def _ragged_exchange(x, into, leg, *, axis):
    me = lax.axis_index(axis)
    tables = leg.begin[me], leg.sizes[me], leg.end[me], leg.sizes[:, me]
    return lax.ragged_all_to_all(x, into, *tables, axis_name=axis)


def _gathered_exchange(x, into, leg, *, axis):
    me = lax.axis_index(axis)
    comes, source, number = _arrivals(leg, me, len(into))
    rows = lax.all_gather(x, axis, tiled=True).at[source * len(x) + leg.begin[source, me] + number].get(mode="clip")
    return jnp.where(comes.reshape(-1, *[1] * (x.ndim - 1)), rows, into)


def exchange_scalars(x: Array, into: Array, leg: Leg, axis) -> Array:
    """The same for one number per row, packed in lines of 128: a TPU would send 128 lanes for each."""
    me, R = lax.axis_index(axis), len(leg.sizes)
    lines = -(-leg.sizes // LANES)
    packed = Leg(lines, _exclusive(lines, 1), _exclusive(lines, 0))
    line = jnp.arange(-(-len(x) // LANES) + R, dtype=jnp.int32)
    to = (line >= jnp.cumsum(lines[me])[:-1, None]).sum(axis=0)
    number = (line - packed.begin[me][to])[:, None] * LANES + jnp.arange(LANES)
    index = jnp.where(number < leg.sizes[me][to][:, None], leg.begin[me][to][:, None] + number, len(x))
    received = jnp.zeros((-(-len(into) // LANES) + R, LANES), x.dtype)
    received = exchange(x.at[index].get(mode="fill", fill_value=0), received, packed, axis).reshape(-1)
    comes, source, number = _arrivals(leg, me, len(into))
    return jnp.where(comes, received.at[packed.end[source, me] * LANES + number].get(mode="clip"), into)


def _arrivals(leg, me, length):
    """Of each of ``length`` places on this rank: whether a row comes, from which rank, and its number in what does."""
    number = jnp.arange(length, dtype=jnp.int32) - leg.end[:, me, None]
    comes = (number >= 0) & (number < leg.sizes[:, me, None])
    return comes.any(axis=0), comes.argmax(axis=0), jnp.where(comes, number, 0).sum(axis=0)


def _place_within_expert(flat, E):
    """Number of each copy among this rank's copies of the same expert."""
    order = jnp.argsort(flat, stable=True)
    starts = _exclusive(jnp.bincount(flat, length=E).astype(jnp.int32), 0)
    within = jnp.arange(len(flat), dtype=jnp.int32) - starts[flat[order]]
    return jnp.zeros_like(within).at[order].set(within, unique_indices=True)


def _exclusive(x, dim):
    return jnp.cumsum(x, axis=dim, dtype=jnp.int32) - x
