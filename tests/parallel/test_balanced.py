"""The balanced plan alone: every rank the same number of rows, few experts lent, whatever the routing."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.parallel.plan_balanced import balanced_assignment


def _hostile(rng, plans, experts, copies):
    """Rows of each expert, [plans, experts]: from nearly even to nearly all on one expert."""
    skew = 10 ** rng.uniform(-1.5, 1, (plans, 1))
    popularity = rng.gamma(np.broadcast_to(skew, (plans, experts))) + 1e-30
    return np.stack([rng.multinomial(copies, p / p.sum()) for p in popularity]).astype(np.int32)


def _plan(rows, ranks):
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(partial(balanced_assignment, ranks=ranks)))(rows))


def _check(rows, ranks):
    """What every plan must hold, for many at once; returns how many experts each rank borrows."""
    kept, donor, lent = _plan(rows, ranks)
    home = rows.reshape(len(rows), ranks, -1)
    assert (kept >= 0).all() and (lent >= 0).all()
    np.testing.assert_array_equal(
        kept.sum(2) + lent.sum(2), np.broadcast_to(rows.sum(1) // ranks, (ranks, len(rows))).T
    )
    given = np.zeros_like(home)
    for plan in range(len(rows)):
        np.add.at(given[plan], donor[plan], lent[plan])
    np.testing.assert_array_equal(kept + given, home)
    assert not lent[donor == np.arange(ranks)].any()
    return (lent > 0).sum(2)


@pytest.mark.parametrize("ranks, experts", [(2, 8), (4, 4), (8, 32), (16, 896)])
def test_every_rank_computes_the_same_number_of_rows_on_250_random_routings(ranks, experts):
    """1,000 routings in all. Borrowed experts never exceed E/R; on average they are few."""
    rows = _hostile(np.random.default_rng(ranks), 250, experts, copies=ranks * 240)
    borrowed = _check(rows, ranks)
    assert borrowed.max() <= experts // ranks
    assert borrowed.mean() <= 1.5


@pytest.mark.parametrize("ranks, experts", [(8, 32), (64, 896)])
def test_the_instance_that_needs_most_experts(ranks, experts):
    """A rank whose experts nobody wants, the rest wanted equally: no plan has it borrow fewer than E(R-1)/R^2."""
    own = experts // ranks
    rows = np.full((1, experts), ranks * (ranks - 1), np.int32)
    rows[0, :own] = 0
    borrowed = _check(rows, ranks)
    bound = math.ceil(experts * (ranks - 1) / ranks**2)
    assert borrowed[0, 0] == bound <= own and borrowed.max() <= own


def test_an_even_routing_lends_nothing():
    kept, donor, lent = _plan(np.full((1, 12), 5, np.int32), 4)
    assert not lent.any() and (kept == 5).all() and (donor == np.arange(4)).all()


def test_without_fills_the_check_fails(monkeypatch):
    """Negative control: experts computed where they lie are not balanced."""
    from k3jax.parallel import plan_balanced

    monkeypatch.setattr(plan_balanced, "_fills", lambda load: (jnp.zeros_like(load), jnp.arange(len(load))))
    with pytest.raises(AssertionError):
        _check(_hostile(np.random.default_rng(0), 4, 8, copies=64), 4)


def test_ranks_that_do_not_divide_the_experts_are_refused():
    with pytest.raises(ValueError, match="896 experts over 5 ranks"):
        balanced_assignment(jnp.zeros(896, jnp.int32), 5)
