"""KDA forward on TPU: one kernel from raw inputs to outputs, one grid step per chunk and group of heads.

Grid (rows of the batch, groups of heads, steps); a step is one chunk or, with one state per document, the part of one
chunk that belongs to one document. The state stays in the block of the final state, float32 and transposed, over the
steps. Operands of products are bfloat16 for bfloat16 inputs, in two pieces (exact to 2^-16) where errors of tokens add
up instead of canceling: columns of the decayed products, N, and the keys that enter the state.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.mosaic_tpu_decays import pair_decays, pair_matrices
from pallas_kernels.kda.mosaic_tpu_math import (
    NN,
    NT,
    TN,
    Plan,
    block_diagonal,
    chunk_masks,
    halves,
    load_pair,
    mask_rows,
    prepare_beta,
    prepare_pair,
    run_in_lockstep,
    store_pair,
    unit_lower_inverse,
)

VMEM_LIMIT = 100 * 2**20


def forward(plan: Plan, tokens, parameters, initial_BNHVK, steps, *, saves, interpret):
    """Runs the kernel.

    tokens: q, k, v, gate [B, T, H, D], beta [B, H / heads, T, heads]; parameters: A_log [H, 1], dt_bias [H, K];
    steps: `Steps` of mosaic_tpu.py. Returns (o, final state [B, N, H, V, K], residuals or ()).
    """
    q, k, v, gate, beta = tokens
    B, H = q.shape[0], q.shape[2]
    N, count = initial_BNHVK.shape[1], steps.chunk.shape[1]
    heads, C, K, V = plan.heads, plan.chunk, plan.key, plan.value
    specs = token_specs(plan)
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
            num_scalar_prefetch=2, grid=(B, H // heads, count), in_specs=in_specs, out_specs=out_specs
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=interpret,
        name="kda_forward",
    )(steps.chunk, steps.slot, *arguments)
    return out[0], out[1], tuple(out[2:])


def token_specs(plan, reverse=None):
    """Blocks by kind of array. `reverse`: number of steps when they run from the last to the first."""
    heads, C, K, V = plan.heads, plan.chunk, plan.key, plan.value

    def at(s):
        return s if reverse is None else reverse - 1 - s

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


def _kernel(plan, saves, chunk_ref, slot_ref, *refs):
    q_ref, k_ref, v_ref, gate_ref, beta_ref, a_log_ref, bias_ref, initial_ref, *refs = refs
    documents_ref = refs.pop(0) if plan.documents else None
    o_ref, state_ref = refs[:2]
    C, V = plan.chunk, plan.value
    b, h, s = (pl.program_id(axis) for axis in range(3))
    before = jnp.maximum(s - 1, 0)
    slot = slot_ref[b, s]
    revisits = (s > 0) & (chunk_ref[b, s] == chunk_ref[b, before]) if plan.slots else None

    @pl.when((s == 0) | (slot != slot_ref[b, before]))
    def _():
        pltpu.sync_copy(initial_ref.at[b, slot, pl.ds(h * plan.heads, plan.heads)], state_ref.at[0, 0])

    masks = chunk_masks(plan, documents_ref)
    beta, _ = prepare_beta(masks, beta_ref[0, 0].astype(jnp.float32))

    def program(j):
        raw = [load_pair(ref, j) for ref in (q_ref, k_ref, gate_ref)]
        heads = prepare_pair(plan, masks, j, raw, beta, a_log_ref, bias_ref)
        decays = yield from pair_decays(plan, masks, heads)
        A, B = yield from pair_matrices(plan, masks, heads, decays)
        inverse = yield from unit_lower_inverse(plan, halves(plan, heads[0].beta, heads[1].beta) * B)
        N, from_state = yield from _solve(j, heads, decays, inverse)
        split = [plan.pieces(x, 2) for x in N]
        inside = plan.product(A, tuple(block_diagonal(*x) for x in zip(*split)))
        yield
        store_pair(o_ref, j, [inside[:, n * V : (n + 1) * V] + from_state[n] for n in range(2)], add=revisits)
        for n in range(2):
            added = plan.product(split[n], plan.pieces(heads[n].k * decays[n].leave, 2), TN)
            state_ref[0, 0, 2 * j + n] = state_ref[0, 0, 2 * j + n] * decays[n].whole + added

    def _solve(j, heads, decays, inverse):
        values = load_pair(v_ref, j)
        right, from_state = [], []
        for n, (head, decay) in enumerate(zip(heads, decays)):
            state = state_ref[0, 0, 2 * j + n]
            if saves:
                refs[2][0, 0, 2 * j + n] = state.astype(plan.dtype)
            both = plan.product(jnp.concatenate([head.k * decay.enter, head.q * decay.enter], 0), state, NT)
            value = mask_rows(masks, values[n])
            right.append(plan.pieces(head.beta * (value - both[:C])))
            from_state.append(both[C:])
        yield
        if saves:
            refs[3][0, 0, j] = inverse.astype(plan.dtype)
        N = plan.product(plan.pieces(inverse, 2), tuple(block_diagonal(*x) for x in zip(*right)), NN)
        yield
        return [N[:, n * V : (n + 1) * V] for n in range(2)], from_state

    run_in_lockstep(program(j) for j in range(plan.heads // 2))
