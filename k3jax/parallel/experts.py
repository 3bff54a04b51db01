"""Mixture of experts over the devices of a mesh: called inside ``jax.shard_map``, once per layer.

Rank r of R owns experts ``[r E/R, (r+1) E/R)`` and tokens of its own. Nothing is ever dropped and all shapes are static:
a rank with more rows than its buffer holds takes another pass.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.grouped import grouped_ffn
from k3jax.parallel.transport import AllGather, Transport

Axis = str | tuple[str, ...]


def expert_mix(z_NL: Array, routing, gate, up, down, activation, *, axis: Axis, transport: Transport) -> Array:
    """``sum_a p_a E_a(z)`` for this rank's tokens: [N, L] in z's dtype, products with p and the sum in float32.

    To be called inside ``jax.shard_map(..., check_vma=False)``.

    Args:
      z_NL: [N, L], the rank's own tokens; other ranks have others, equally many. Padding is routed like the rest.
      routing: ``experts`` [N, A] int32, numbered over all ranks, and ``weights`` [N, A] float32.
      gate, up, down: [E/R, L, F], the rank's own experts; any width F, so that it can be a shard of a wider one (the
        result is then a partial sum).
      activation: gated activation, a configuration.
      axis: the mesh axis or axes that the experts are spread over, in the order of their sharding.
      transport: how tokens travel, see :mod:`k3jax.parallel.transport`.
    """
    gate, up, down = (w.astype(z_NL.dtype) for w in (gate, up, down))
    weights = routing.weights.astype(jnp.float32)
    match transport:
        case AllGather(factor):
            return _all_gather_mix(z_NL, routing.experts, weights, gate, up, down, activation, axis, factor)
    raise TypeError(f"transport = {transport!r}, but it must be AllGather, RaggedAllToAll or Balanced")


def _all_gather_mix(z, experts, weights, gate, up, down, activation, axis, factor):
    """Ids and weights are gathered, not logits, which would be E/A times larger."""
    E, copies = gate.shape[0], experts.size
    z_all, experts_all, weights_all = (lax.all_gather(x, axis, tiled=True) for x in (z, experts, weights))
    own = experts_all - lax.axis_index(axis) * E
    own = jnp.where((own >= 0) & (own < E), own, E)
    rows = min(math.ceil(copies * factor), experts_all.size)
    y = _own_experts(activation, rows, z_all, own, weights_all, gate, up, down)
    return lax.psum_scatter(y.astype(z.dtype), axis, scatter_dimension=0, tiled=True)


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


def _take(x, index):
    """Rows of x, zeros for an index past the end."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)
