"""KDA forward on TPU: one kernel from raw inputs to outputs.

Grid (rows of the batch, groups of heads, steps); a step is one chunk or, with one state per document, the part of one
chunk that belongs to one document. The state stays in the block of the final state, float32 and transposed, over the
steps.

A chunk has two halves. The first needs no state: norms, gates, decays, A, B, the inverse; vector units, then a chain of
small products. The second does: K+ S, N, outputs, the update; matrix units. On recent chips a step of the grid runs the
second half of the chunk before beside the first half of its own, and hands what it found over in scratch, so there is
one step more than chunks. Before v6e the stores that this takes cost more than it gains.

Operands of products are bfloat16 for bfloat16 inputs, in two pieces (exact to 2^-16) where errors of tokens add up
instead of canceling: columns of the decayed products, the inverse, N in the output, and the keys that enter the state.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.mosaic_tpu_decays import pair_decays, pair_matrices
from pallas_kernels.kda.mosaic_tpu_math import (
    BLOCK,
    NT,
    TN,
    Plan,
    chunk_masks,
    halves,
    load_pair,
    prepare_beta,
    prepare_pair,
    run_in_lockstep,
    store_pair,
    times_pair,
    unit_lower_inverse,
)

# Indices of blocks are clipped where they are made (`Steps` in mosaic_tpu.py).
COMPILER = pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "arbitrary"),
    vmem_limit_bytes=100 * 2**20,
    disable_bounds_checks=True,
)


def forward(plan: Plan, tokens, parameters, initial_BNHVK, steps, *, saves, interpret):
    """Runs the kernel.

    tokens: q, k, v, gate [B, T, H, D], beta [B, H / heads, T, heads]; parameters: A_log [H, 1], dt_bias [H, K];
    steps: `Steps` of mosaic_tpu.py. Returns (o, final state [B, N, H, V, K], residuals or ()).
    """
    q, k, v, gate, beta = tokens
    B, H = q.shape[0], q.shape[2]
    N, count = initial_BNHVK.shape[1], steps.chunk.shape[1]
    heads, C, K, V = plan.heads, plan.chunk, plan.key, plan.value
    first, second = lambda s: s, lambda s: s
    if plan.recent:
        first, second = lambda s: jnp.minimum(s, count - 1), lambda s: jnp.maximum(s - 1, 0)
    specs = token_specs(plan, second) | {n: token_specs(plan, first)[n] for n in ("key", "beta", "documents")}
    out_shape = [jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct((B, N, H, V, K), jnp.float32)]
    out_specs = [specs["value"], specs["state"]]
    if saves:
        out_shape.append(jax.ShapeDtypeStruct((B, count, H, V, K), plan.dtype))
        out_shape.append(jax.ShapeDtypeStruct((B, count, H // 2, C, 2 * C), plan.dtype))
        out_specs += [specs["saved_state"], specs["saved_inverse"]]
    in_specs = [specs[x] for x in ("key", "key", "value", "key", "beta", "A_log", "dt_bias", "anywhere")]
    arguments = [q, k, v, gate, beta, *parameters, initial_BNHVK]
    if plan.documents:
        in_specs.append(specs["documents"])
        arguments.append(steps.documents)
    out = pl.pallas_call(
        functools.partial(_kernel, plan, saves),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, H // heads, count + 1 if plan.recent else count),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=_scratch(plan) if plan.recent else [],
        ),
        out_shape=out_shape,
        compiler_params=COMPILER,
        interpret=interpret,
        name="kda_forward",
    )(steps.chunk, steps.slot, *arguments)
    return out[0], out[1], tuple(out[2:])


def token_specs(plan, at):
    """Blocks by kind of array. at: from a step of the grid to the step of `Steps` that it serves."""
    heads, C, K, V = plan.heads, plan.chunk, plan.key, plan.value

    def spec(shape, index):
        return pl.BlockSpec(shape, lambda b, h, s, chunk, slot: index(b, h, at(s), chunk, slot))

    def per_step(*shape):
        return spec((1, 1, *shape), lambda b, h, s, chunk, slot: (b, s, h) + (0,) * (len(shape) - 1))

    def per_token(width):
        return spec((1, C, heads, width), lambda b, h, s, chunk, slot: (b, chunk[b, s], h, 0))

    return {
        "key": per_token(K),
        "value": per_token(V),
        "beta": spec((1, 1, C, heads), lambda b, h, s, chunk, slot: (b, h, chunk[b, s], 0)),
        "A_log": spec((heads, 1), lambda b, h, s, chunk, slot: (h, 0)),
        "dt_bias": spec((heads, K), lambda b, h, s, chunk, slot: (h, 0)),
        "documents": spec((1, 1, 3, C), lambda b, h, s, chunk, slot: (b, s, 0, 0)),
        "state": spec((1, 1, heads, V, K), lambda b, h, s, chunk, slot: (b, slot[b, s], h, 0, 0)),
        "saved_state": per_step(heads, V, K),
        "saved_inverse": per_step(heads // 2, C, 2 * C),
        "parameter_sums": spec((1, heads, K), lambda b, h, s, chunk, slot: (b, h, 0)),
        "anywhere": pl.BlockSpec(memory_space=pl.ANY),
    }


class Half(NamedTuple):
    """What the first half of a chunk leaves to the second for two heads; in scratch, references to that."""

    A: Any  # [C, 2C]
    inverse: list  # pieces [C, 2C]
    enter: list  # by head: keys over queries, decayed from the start of the chunk, [2C, K]
    leave: list  # by head: pieces [C, K] of keys, decayed towards the end of the chunk
    ends: list  # by head: [2, K] float32, the decay of the whole chunk, and what keys still lack


def _scratch(plan):
    """Scratch for one `Half` per pair of heads, and beta."""
    heads, C, K = plan.heads, plan.chunk, plan.key
    count = 1 if plan.dtype == jnp.float32 else 2
    shapes = (heads // 2, C, 2 * C), (count, heads // 2, C, 2 * C), (heads, 2 * C, K), (count, heads, C, K)
    float32 = (heads, 2, K), (C, heads)
    return [pltpu.VMEM(x, plan.dtype) for x in shapes] + [pltpu.VMEM(x, jnp.float32) for x in float32]


def _half_in_scratch(refs, j):
    A, inverse, enter, leave, ends, _ = refs
    both, pieces = (2 * j, 2 * j + 1), range(inverse.shape[0])
    by_head = [leave.at[n, head] for head in both for n in pieces]
    leaves = [by_head[n * len(pieces) : (n + 1) * len(pieces)] for n in range(2)]
    return Half(
        A.at[j], [inverse.at[n, j] for n in pieces], [enter.at[n] for n in both], leaves, [ends.at[n] for n in both]
    )


def _kernel(plan, saves, chunk_ref, slot_ref, *refs):
    q_ref, k_ref, v_ref, gate_ref, beta_ref, a_log_ref, bias_ref, initial_ref, *refs = refs
    documents_ref = refs.pop(0) if plan.documents else None
    o_ref, state_ref, *refs = refs
    saved = refs[:2] if saves else None
    scratch = refs[-6:]
    b, h, s = (pl.program_id(axis) for axis in range(3))
    done = jnp.maximum(s - 1, 0) if plan.recent else s  # the step whose second half runs
    before = jnp.maximum(done - 1, 0)
    slot = slot_ref[b, done]
    revisits = (done > 0) & (chunk_ref[b, done] == chunk_ref[b, before]) if plan.slots else None

    # In step 0 of a recent chip the second half has nothing to run on; step 1 writes all of it again.
    @pl.when((done == 0) | (slot != slot_ref[b, before]))
    def _():
        pltpu.sync_copy(initial_ref.at[b, slot, pl.ds(h * plan.heads, plan.heads)], state_ref.at[0, 0])

    masks = chunk_masks(plan, documents_ref)
    beta, _ = prepare_beta(masks, beta_ref[0, 0].astype(jnp.float32))

    def first_half(j):
        raw = [load_pair(ref, j) for ref in (q_ref, k_ref, gate_ref)]
        heads = yield from prepare_pair(plan, masks, j, raw, beta, a_log_ref, bias_ref, slopes=False)
        half, inverse = yield from _first_half(plan, masks, heads)
        if plan.recent:
            assert j in read  # what lies in scratch is of the chunk before
            _write(_half_in_scratch(scratch, j), half)
        pieces = plan.pieces((yield from inverse), 2)
        if not plan.recent:
            return half._replace(inverse=pieces)
        for ref, x in zip(_half_in_scratch(scratch, j).inverse, pieces):
            ref[...] = x

    def second_half(j, half, beta):
        values = load_pair(v_ref, j)
        states = [state_ref.at[0, 0, 2 * j + n] for n in range(2)]
        o = yield from _second_half(plan, j, half, beta, values, states, [x.at[0, 0] for x in saved] if saves else None)
        store_pair(o_ref, j, o, add=revisits)
        read.add(j)

    def whole(j):
        half = yield from first_half(j)
        yield from second_half(j, half, beta)

    pairs, read = range(plan.heads // 2), set()
    if not plan.recent:
        run_in_lockstep((0, whole(j)) for j in pairs)
        return
    beta_before = scratch[-1][...]
    scratch[-1][...] = beta
    # The latest start with which a second half has read its scratch before the first half of the pair writes there.
    latest = plan.chunk // BLOCK
    ends = [(latest * j // len(pairs), second_half(j, _half_in_scratch(scratch, j), beta_before)) for j in pairs]
    run_in_lockstep(ends + [(0, first_half(j)) for j in pairs])


def _first_half(plan, masks, heads):
    """Generator: (the `Half` of two heads but for the inverse, the generator of the inverse)."""
    decays = yield from pair_decays(plan, masks, heads)
    A, B, keys = yield from pair_matrices(plan, masks, heads, decays, between_keys=True)
    enter, leave, ends = [], [], []
    for head, decay, key in zip(heads, decays, keys):
        enter.append(plan.pieces(jnp.concatenate([head.k * decay.enter, head.q * decay.enter], 0))[0])
        shared = _shares_keys(plan)
        leave.append(key if shared else plan.pieces(head.k * decay.leave, 2))
        ends.append(jnp.concatenate([decay.whole, decay.last if shared else decay.whole], 0))
    L = halves(plan, heads[0].beta, heads[1].beta) * B
    return Half(plan.pieces(A)[0], (), enter, leave, ends), unit_lower_inverse(plan, L)


def _shares_keys(plan):
    """Whether the last columns of B, up to a factor per channel, are the keys that enter the state."""
    return plan.bounded and not plan.documents


def _write(refs, half):
    """Everything but the inverse."""
    flat = lambda x: [x.A, *x.enter, *x.leave[0], *x.leave[1], *x.ends]  # noqa: E731
    for ref, x in zip(flat(refs), flat(half)):
        ref[...] = x


def _second_half(plan, j, half, beta, values, states, saved):
    """Generator: outputs of heads 2j and 2j + 1; updates their states, saves what the backward needs."""
    C = plan.chunk
    right, from_state = [], []
    for n in range(2):
        state = states[n][...]
        if saved:
            saved[0][2 * j + n] = state.astype(plan.dtype)
        both = plan.product(half.enter[n][...], state, NT)
        weight = beta[:, 2 * j + n : 2 * j + n + 1]
        x = weight * (values[n] - both[:C])
        right.append(plan.pieces(jnp.where(weight == 0, 0.0, x) if plan.documents else x))  # padding holds anything
        from_state.append(both[C:])
    yield
    inverse = [x[...] for x in half.inverse]
    if saved:
        saved[1][j] = inverse[0]
    N = [plan.pieces(x, 2) for x in times_pair(plan, inverse, right)]
    yield
    inside = times_pair(plan, (half.A[...],), N)
    yield
    for n in range(2):
        added = plan.product(N[n][:1], tuple(x[...] for x in half.leave[n]), TN)
        if _shares_keys(plan):
            added = added * half.ends[n][1:2]
        states[n][...] = states[n][...] * half.ends[n][:1] + added
    return [x + y for x, y in zip(inside, from_state)]
