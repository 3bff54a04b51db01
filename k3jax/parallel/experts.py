"""Mixture of experts over the devices of a mesh: called inside ``jax.shard_map``, once per layer.

Rank r of R owns experts ``[r E/R, (r+1) E/R)`` and tokens of its own. All shapes are static and nothing is dropped: a
rank with more rows than its buffer holds takes another pass.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.grouped import grouped_ffn
from k3jax.parallel import lending
from k3jax.parallel.dispatch import counts, dispatch, exchange, exchange_scalars, one_pass, passes
from k3jax.parallel.plan_balanced import balanced_assignment
from k3jax.parallel.transport import AllGather, Balanced, RaggedAllToAll, Transport

Axis = str | tuple[str, ...]


def expert_mix(
    z_NL: Array, routing, gate, up, down, activation, *, axis: Axis, transport: Transport, beside: Array | None = None
) -> tuple[Array, Array | None]:
    """``sum_a p_a E_a(z)`` for this rank's tokens: [N, L] in z's dtype, products with p and the sum in float32; and
    ``beside``.

    To be called inside ``jax.shard_map(..., check_vma=False)``.

    Args:
      z_NL: [N, L], the rank's own tokens; other ranks have others, equally many. Padding is routed like the rest.
      routing: ``experts`` [N, A] int32, numbered over all ranks, and ``weights`` [N, A] float32.
      gate, up, down: [E/R, L, F], the rank's own experts; any width F, so that it can be a shard of a wider one (the
        result is then a partial sum).
      activation: gated activation, a configuration.
      axis: the mesh axis or axes that the experts are spread over, in the order of their sharding.
      transport: how tokens travel, see :mod:`k3jax.parallel.transport`.
      beside: something that needs nothing of the experts, such as the shared ones. No expert begins before it is
        there, so that a compiler has it to compute while tokens travel.
    """
    gate, up, down = (w.astype(z_NL.dtype) for w in (gate, up, down))
    weights = routing.weights.astype(jnp.float32)
    copies = routing.experts.size
    match transport:
        case AllGather(factor):
            return _all_gather_mix(z_NL, routing.experts, weights, gate, up, down, activation, axis, factor, beside)
        case RaggedAllToAll(factor):
            rows = min(math.ceil(copies * factor), copies * lax.axis_size(axis))
            return _dispatched_mix(
                z_NL, routing.experts, weights, gate, up, down, activation, axis, rows, False, beside
            )
        case Balanced():
            return _dispatched_mix(
                z_NL, routing.experts, weights, gate, up, down, activation, axis, copies, True, beside
            )
    raise TypeError(f"transport = {transport!r}, but it must be AllGather, RaggedAllToAll or Balanced")


def _all_gather_mix(z, experts, weights, gate, up, down, activation, axis, factor, beside):
    """Ids and weights are gathered, not logits, which would be E/A times larger."""
    E, copies = gate.shape[0], experts.size
    z_all, experts_all, weights_all = (lax.all_gather(x, axis, tiled=True) for x in (z, experts, weights))
    z_all, beside = lax.optimization_barrier((z_all, beside))
    own = experts_all - lax.axis_index(axis) * E
    own = jnp.where((own >= 0) & (own < E), own, E)
    rows = min(math.ceil(copies * factor), experts_all.size)
    y = _own_experts(activation, rows, z_all, own, weights_all, gate, up, down)
    return lax.psum_scatter(y.astype(z.dtype), axis, scatter_dimension=0, tiled=True), beside


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _own_experts(activation, rows, z, own, weights, gate, up, down):
    """What this rank's experts add to every token, [N, L] float32, ``rows`` copies of tokens at a time.

    own: [N, A], a local expert or E for none. As many passes as there are rows to compute; the gradient computes the
    hidden activations again, so nothing but the arguments is kept.
    """
    passes, select = _passes(rows, own, gate.shape[0])

    def add(i, y):
        token, copy, sizes = select(i)
        x, scale = _take(z, token), _take(weights.reshape(-1), copy)
        return y.at[token].add(grouped_ffn(x, sizes, scale, gate, up, down, activation).astype(y.dtype), mode="drop")

    return lax.fori_loop(0, passes, add, jnp.zeros(z.shape, jnp.float32))


def _own_experts_forward(activation, rows, *args):
    return _own_experts(activation, rows, *args), args


def _own_experts_backward(activation, rows, kept, dy):
    z, own, weights, *matrices = kept
    passes, select = _passes(rows, own, matrices[0].shape[0])

    def add(i, carry):
        dz, dweights, dmatrices = carry
        token, copy, sizes = select(i)

        def ffn(x, scale, *matrices):
            return grouped_ffn(x, sizes, scale, *matrices, activation)

        _, pull = jax.vjp(ffn, _take(z, token), _take(weights.reshape(-1), copy), *matrices)
        dx, dscale, *more = pull(_take(dy, token).astype(z.dtype))
        dz = dz.at[token].add(dx.astype(dz.dtype), mode="drop")
        return dz, dweights.at[copy].add(dscale, mode="drop"), [d + m for d, m in zip(dmatrices, more)]

    zeros = jnp.zeros(z.shape, jnp.float32), jnp.zeros(weights.size), [jnp.zeros_like(w) for w in matrices]
    dz, dweights, dmatrices = lax.fori_loop(0, passes, add, zeros)
    return dz.astype(z.dtype), None, dweights.reshape(weights.shape), *dmatrices


_own_experts.defvjp(_own_experts_forward, _own_experts_backward)


def _passes(rows, own, E):
    """How many passes there are, and what names the tokens, copies and group sizes of one: no copy is the index one
    past the last."""
    (N, A), flat = own.shape, own.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    ends = jnp.cumsum(jnp.bincount(flat, length=E).astype(jnp.int32))
    order = jnp.pad(jnp.where(jnp.arange(N * A) < ends[-1], order, N * A), (0, rows), constant_values=N * A)

    def select(i):
        copy = lax.dynamic_slice(order, (i * rows,), (rows,))
        inside = jnp.clip(ends - i * rows, 0, rows)
        return copy // A, copy, jnp.diff(inside, prepend=0)

    return -(-ends[-1] // rows), select


def _dispatched_mix(z, experts, weights, gate, up, down, activation, axis, rows, balance, beside):
    """Copies of tokens travel to the experts' ranks, or with ``balance`` to where the balanced plan wants them."""
    R, E = lax.axis_size(axis), gate.shape[0] * lax.axis_size(axis)
    table = counts(experts, E, axis)
    assignment = balanced_assignment(table.sum(axis=0), R) if balance else None
    plan = dispatch(experts, table, assignment, axis)
    return _travelling_mix(activation, axis, rows, z, weights, (gate, up, down), plan, assignment, beside)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _travelling_mix(activation, axis, rows, z, weights, matrices, plan, assignment, beside):
    """The mix under a plan, and ``beside``. The gradient carries copies again, and nothing but the arguments is kept.

    Forward, rows travel twice; backward three times: the inputs, the output's gradient, the inputs' gradient.
    """
    held = _held(matrices, assignment, axis)
    copies, scale = _spread(z, plan), weights.reshape(-1)[plan.order]

    def work(step, arrived, y):
        x, s = arrived
        out = grouped_ffn(x, step.slots, s, *held, activation)
        return exchange(out[step.place], y, step.leg.back(), axis)

    y, beside = _each_pass(plan, rows, axis, assignment, (copies, scale), work, jnp.zeros_like(copies), beside)
    return _collect(y, plan), beside


def _travelling_mix_forward(activation, axis, rows, *args):
    return _travelling_mix(activation, axis, rows, *args), args[:-1]


def _travelling_mix_backward(activation, axis, rows, kept, cotangents):
    z, weights, matrices, plan, assignment = kept
    dy, dbeside = cotangents
    held = _held(matrices, assignment, axis)
    copies, scale, dcopies = _spread(z, plan), weights.reshape(-1)[plan.order], _spread(dy, plan)

    def work(step, arrived, carry):
        (x, s, d), (dz, dscale, dheld) = arrived, carry
        _, pull = jax.vjp(lambda x, s, *held: grouped_ffn(x, step.slots, s, *held, activation), x, s, *held)
        dx, ds, *more = pull(d)
        dz = exchange(dx[step.place], dz, step.leg.back(), axis)
        dscale = exchange_scalars(ds[step.place], dscale, step.leg.back(), axis)
        return dz, dscale, [a + b for a, b in zip(dheld, more)]

    zeros = jnp.zeros_like(copies), jnp.zeros_like(scale), [jnp.zeros_like(w) for w in held]
    (dz, dscale, dheld), _ = _each_pass(plan, rows, axis, assignment, (copies, scale, dcopies), work, zeros, None)
    dmatrices = tuple(d if assignment is None else lending.settle(d, assignment, axis) for d in dheld)
    return _collect(dz, plan), dscale[plan.position], dmatrices, None, None, dbeside


_travelling_mix.defvjp(_travelling_mix_forward, _travelling_mix_backward)


def _each_pass(plan, rows, axis, assignment, outgoing, work, result, beside):
    """``result`` after ``work(step, arrived, result)`` on what every pass brings of the arrays ``outgoing``, and
    ``beside``.

    What the first brings travels before the loop, and ``beside`` is waited for there. Under the balanced plan there is
    one pass, whatever the routing, and no loop.
    """

    def fetch(i):
        step = one_pass(plan, i, rows)
        return step, tuple(_arrive(x, step, rows, axis) for x in outgoing)

    step, arrived = fetch(0)
    if beside is not None:
        arrived, beside = lax.optimization_barrier((arrived, beside))
    if assignment is not None:
        return work(step, arrived, result), beside
    count = passes(plan, rows)

    def body(i, carry):
        fetched, result = carry
        return lax.cond(i + 1 < count, lambda: fetch(i + 1), lambda: fetched), work(*fetched, result)

    return lax.fori_loop(0, count, body, ((step, arrived), result))[1], beside


def _held(matrices, assignment, axis):
    """The experts that this rank computes: its own and, under the balanced plan, its donor's."""
    return matrices if assignment is None else tuple(lending.lend(w, assignment, axis) for w in matrices)


def _spread(z, plan):
    """A copy of its token for every choice, in the order of sending."""
    return z[plan.order // plan.position.shape[1]]


def _collect(copies, plan):
    """The sum over every token's copies, float32, in their dtype: the transpose of :func:`_spread`."""
    return copies[plan.position].sum(axis=1, dtype=jnp.float32).astype(copies.dtype)


def _arrive(x, step, rows, axis):
    """What a pass brings to this rank, sorted by slot; zeros where fewer rows come."""
    carry = exchange if x.ndim > 1 else exchange_scalars
    return carry(x, jnp.zeros((rows, *x.shape[1:]), x.dtype), step.leg, axis)[step.inverse]


def _take(x, index):
    """Rows of x, zeros for an index past the end."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)
