"""Weights of lent experts: to the ranks that borrow them, and their gradients back to the owner.

J experts lie on each rank. Neither function has a gradient of its own: each is the transpose of the other.
"""

from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from k3jax.parallel.plan_balanced import Assignment


def lend(w_JLF: Array, assignment: Assignment, axis) -> Array:
    """This rank's own experts, then its donor's, in the donor's order: [2 J, L, F].

    Only weights in use travel; in place of the others may be anything finite. XLA on CPU cannot do that: there all
    weights are gathered and the donor's chosen.
    """
    return lax.platform_dependent(
        *(w_JLF, assignment), cpu=partial(_gathered, axis=axis), default=partial(_ragged, axis=axis)
    )


def settle(dw_BLF: Array, assignment: Assignment, axis) -> Array:
    """Gradients of own and borrowed experts, [2 J, L, F], to those of this rank's own on all ranks: [J, L, F].

    One exchange for the first borrower of every expert, one for the second, and so on: as many as the most wanted
    expert has borrowers, so that an owner needs room for one gradient of each of its experts.
    """
    return lax.platform_dependent(
        *(dw_BLF, assignment), cpu=partial(_scattered, axis=axis), default=partial(_ragged_back, axis=axis)
    )


def _gathered(w, assignment, *, axis):
    return jnp.concatenate([w, lax.all_gather(w, axis)[assignment.donor[lax.axis_index(axis)]]])


def _scattered(dw, assignment, *, axis):
    own, borrowed = jnp.split(dw, 2)
    me, ranks = lax.axis_index(axis), jnp.arange(len(assignment.donor))
    counts = (ranks == assignment.donor[me])[:, None] & (assignment.lent[me] > 0)
    return own + lax.psum_scatter(jnp.where(counts[:, :, None, None], borrowed, 0), axis, scatter_dimension=0)


def _ragged(w, assignment, *, axis):
    J = len(w)
    return _travel(w, jnp.concatenate([w, jnp.zeros_like(w)]), _loans(assignment), axis, leave=0, arrive=J)


def _ragged_back(dw, assignment, *, axis):
    J, loans = len(dw) // 2, _loans(assignment)
    number = jnp.cumsum(loans, axis=1) - loans

    def add(i, total):
        back = (loans & (number == i)).swapaxes(0, 1)
        return total + _travel(dw, jnp.zeros_like(total), back, axis, leave=J, arrive=0)

    return lax.fori_loop(0, loans.sum(axis=1).max(), add, dw[:J])


def _loans(assignment):
    """[R, R, J] bool: rank r lends its j-th expert to rank d."""
    ranks = jnp.arange(len(assignment.donor))[:, None]
    return (ranks == assignment.donor)[:, :, None] & (assignment.lent > 0)


def _travel(w, into, moves, axis, *, leave, arrive):
    """``into`` with ``w[leave + j]`` of rank r at place ``arrive + j`` of rank d wherever ``moves[r, d, j]``."""
    me, (R, _, J) = lax.axis_index(axis), moves.shape
    place, sizes = jnp.tile(jnp.arange(J, dtype=jnp.int32), R), moves.astype(jnp.int32)
    tables = leave + place, sizes[me].reshape(-1), arrive + place, sizes[:, me].reshape(-1)
    return lax.ragged_all_to_all(w, into, *tables, axis_name=axis)
