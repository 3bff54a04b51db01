"""KDA backward on TPU: one kernel that walks the steps of the forward in reverse and gives every gradient.

It reads the raw inputs, the cotangent of the output, and per step what the forward saved: the state at its start and
X = (I + L)^-1. With N the solution and P its right-hand side, dP = X^T dN and dL = -stril(dP N^T): the inverse needs no
derivative of its own, and beta's is <dP, N> / beta, for N = beta (R - B N): the two parts of the product rule would
cancel when keys are alike. B itself is not needed again. The cotangent of the state stays, float32 and transposed, in
the block of the initial state's gradient.

The log-decay's gradient is a reverse running sum of q dq + k dk(as row) - k dk(as column), in which every pair of later
tokens appears twice and must cancel, while strong decay leaves little else. So what has no decay is kept out of it (the
diagonal of A, the last token's way into the state), and both sides of a pair take the same rounded operands. Decays
without a bound leave nothing at all: there every sum of log-decays has a gradient of its own, and nothing cancels.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.mosaic_tpu_decays import columns, dyadic_masks, pair_decays, pair_matrices, term_mask
from pallas_kernels.kda.mosaic_tpu_forward import COMPILER, token_specs
from pallas_kernels.kda.mosaic_tpu_math import (
    NN,
    NT,
    TN,
    Plan,
    block_diagonal,
    chunk_masks,
    halves,
    iota,
    load_pair,
    mask_rows,
    prepare_beta,
    prepare_pair,
    run_in_lockstep,
    spread,
    store_pair,
    times_pair,
)


def backward(plan: Plan, tokens, parameters, steps, saved, do, dfinal_BNHVK, *, interpret):
    """Gradients of tokens (as `forward` takes them), of A_log and dt_bias as sums [B, H, K], of the states."""
    q, k, v, gate, beta = tokens
    B, _, H, K = q.shape
    count, heads = steps.chunk.shape[1], plan.heads
    specs = token_specs(plan, lambda s: count - 1 - s)
    in_names = ["key", "key", "value", "key", "beta", "A_log", "dt_bias"]
    in_names += ["value", "saved_state", "saved_inverse", "anywhere"]
    arguments = [*tokens, *parameters, do, *saved, dfinal_BNHVK]
    if plan.documents:
        in_names.append("documents")
        arguments.append(steps.documents)
    out_names = ["key", "key", "value", "key", "beta", "parameter_sums", "parameter_sums", "state"]
    sums = jax.ShapeDtypeStruct((B, H, K), jnp.float32)
    out_shape = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v, gate)]
    out_shape += [jax.ShapeDtypeStruct(beta.shape, jnp.float32), sums, sums]
    out_shape.append(jax.ShapeDtypeStruct(dfinal_BNHVK.shape, jnp.float32))
    return pl.pallas_call(
        functools.partial(_kernel, plan, count),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, H // heads, count),
            in_specs=[specs[x] for x in in_names],
            out_specs=[specs[x] for x in out_names],
        ),
        out_shape=out_shape,
        compiler_params=COMPILER,
        interpret=interpret,
        name="kda_backward",
    )(steps.chunk, steps.slot, *arguments)


def _kernel(plan, count, chunk_ref, slot_ref, *refs):
    q_ref, k_ref, v_ref, gate_ref, beta_ref, a_log_ref, bias_ref, do_ref, *refs = refs
    saved_state_ref, saved_inverse_ref, dfinal_ref, *refs = refs
    documents_ref = refs.pop(0) if plan.documents else None
    dq_ref, dk_ref, dv_ref, dgate_ref, dbeta_ref, da_log_ref, dbias_ref, dstate_ref = refs
    C = plan.chunk
    b, h, done = (pl.program_id(axis) for axis in range(3))
    s = count - 1 - done
    after = jnp.minimum(s + 1, count - 1)
    slot = slot_ref[b, s]
    revisits = (done > 0) & (chunk_ref[b, s] == chunk_ref[b, after]) if plan.slots else None

    @pl.when((done == 0) | (slot != slot_ref[b, after]))
    def _():
        pltpu.sync_copy(dfinal_ref.at[b, slot, pl.ds(h * plan.heads, plan.heads)], dstate_ref.at[0, 0])

    masks = chunk_masks(plan, documents_ref)
    beta, beta_slope = prepare_beta(masks, beta_ref[0, 0].astype(jnp.float32))
    da_log, dbias, dbeta = [], [], []

    def program(j):
        raw = [load_pair(ref, j) for ref in (q_ref, k_ref, gate_ref)]
        heads = yield from prepare_pair(plan, masks, j, raw, beta, a_log_ref, bias_ref, slopes=True)
        decays = yield from pair_decays(plan, masks, heads)
        A, *_ = yield from pair_matrices(plan, masks, heads, decays, between_keys=False)
        values, douts = ([mask_rows(masks, x) for x in load_pair(ref, j)] for ref in (v_ref, do_ref))
        states = [saved_state_ref[0, 0, 2 * j + n] for n in range(2)]
        dstates = [dstate_ref[0, 0, 2 * j + n] for n in range(2)]
        N, dP = yield from _solve(plan, heads, decays, A, saved_inverse_ref[0, 0, j], values, douts, states, dstates)
        dA, dB = yield from _matrix_gradients(plan, masks, heads, N, dP, douts)
        dlog_beta, diagonals = ([jnp.sum(x * y, -1, keepdims=True) for x, y in zip(left, N)] for left in (dP, douts))
        dR = [head.beta * x for head, x in zip(heads, dP)]
        store_pair(dv_ref, j, dR, add=revisits)
        for _ in range(j):  # from here on one pair after another: what eight of them keep alive does not fit registers
            yield
        inner = yield from _inside_chunk(plan, heads, decays, dA, dB)
        outer = yield from _through_state(plan, heads, decays, N, dR, douts, states, dstates)
        dq, dk, dG = [], [], []
        for n, (head, decay) in enumerate(zip(heads, decays)):
            of_pairs, *within = inner[n]
            dG.append(_sum_gradients(plan, head, decay, of_pairs, outer[n], states[n], dstates[n]))
            rows_q, rows_k, columns_k = (x + y for x, y in zip(within, outer[n]))
            dq.append(rows_q + diagonals[n] * head.k)
            dk.append(rows_k + columns_k + diagonals[n] * head.q)
            entering = jnp.concatenate([head.q * decay.enter, head.k * decay.enter], 0)
            added = plan.product(_outward(plan, douts[n], dR[n]), entering, TN)
            dstate_ref[0, 0, 2 * j + n] = dstates[n] * decay.whole + added
        store_pair(dq_ref, j, [_unnormalize(x.q, x.q_root, y, plan.scale) for x, y in zip(heads, dq)], add=revisits)
        store_pair(dk_ref, j, [_unnormalize(x.k, x.k_root, y, 1.0) for x, y in zip(heads, dk)], add=revisits)
        back = (masks.from_i, NN) if plan.bounded else (dyadic_masks(C), TN)
        dg = plan.product(back[0], plan.pieces(jnp.concatenate(dG, 1), 2), back[1])
        yield
        dg = [dg[:, : plan.key], dg[:, plan.key :]]
        dgate = [x * head.gate.by_input for x, head in zip(dg, heads)]
        store_pair(dgate_ref, j, dgate, add=revisits)
        for n in range(2):
            dbias.append((2 * j + n, jnp.sum(dgate[n], 0, keepdims=True)))
            through = dg[n] if plan.lower_bound is None else dgate[n]
            da_log.append((2 * j + n, jnp.sum(through * heads[n].gate.by_a_log, 0, keepdims=True)))
            dbeta.append((2 * j + n, dlog_beta[n]))

    run_in_lockstep((0, program(j)) for j in range(plan.heads // 2))
    for ref, rows in ((da_log_ref, da_log), (dbias_ref, dbias)):
        new = jnp.concatenate([x for _, x in sorted(rows, key=lambda x: x[0])], 0)
        ref[0] = new + jnp.where(done == 0, 0.0, ref[0])
    lane = iota((C, plan.heads), 1)
    new = beta_slope * sum(jnp.where(lane == n, x, 0.0) for n, x in dbeta)
    dbeta_ref[0, 0] = new if revisits is None else new + jnp.where(revisits, dbeta_ref[0, 0], 0.0)


def _solve(plan, heads, decays, A, inverse, values, douts, states, dstates):
    """Generator: N = X (beta R) and dP = X^T dN of two heads; R = V - K+ S, dN = A^T dO + K- dS'."""
    C = plan.chunk
    inverse_T, A_T = inverse.astype(jnp.float32).T, A.T
    R, dN = [], []
    for n, (head, decay) in enumerate(zip(heads, decays)):
        R.append(values[n] - plan.product(head.k * decay.enter, states[n], NT))
        from_out = plan.product(A_T[n * C : (n + 1) * C], douts[n])
        dN.append(from_out + plan.product(head.k * decay.leave, dstates[n], NT))
    yield
    N = times_pair(plan, (inverse,), [plan.pieces(head.beta * x) for head, x in zip(heads, R)])
    dP = [plan.product(inverse_T[n * C : (n + 1) * C], dN[n]) for n in range(2)]
    yield
    return N, dP


def _matrix_gradients(plan, masks, heads, N, dP, douts):
    """Generator: strictly lower dA and dB [C, 2C] of two heads."""
    C = plan.chunk
    left = jnp.concatenate([jnp.concatenate(x, 1) for x in (douts, dP)], 0)
    both = plan.product(left, block_diagonal(*(plan.pieces(x)[0] for x in N)), NT)
    yield
    strict = masks.until & (iota((C, 2 * C), 0) != iota((C, 2 * C), 1) % C)
    dA, dL = jnp.where(strict, both[:C], 0.0), jnp.where(strict, -both[C:], 0.0)
    return dA, halves(plan, heads[0].beta, heads[1].beta) * dL


def _inside_chunk(plan, heads, decays, dA, dB):
    """Generator: gradients through A and B of sums of log-decays, q, k as row and k as column, for two heads."""
    C = plan.chunk
    right = [columns(plan, h, d, 1) for h, d in zip(heads, decays)]
    rows, parts = [[], []], [[], []]
    for index in range(len(decays[0].terms)):
        terms = [d.terms[index] for d in decays]
        start, stop = terms[0].start, terms[0].stop
        cotangent = [x[start:stop] for x in (dA, dB)]
        if not plan.bounded:
            cotangent = [jnp.where(term_mask(plan, index), x, 0.0) for x in cotangent]
        cotangent = jnp.concatenate(cotangent, 0)
        (low,) = plan.pieces(cotangent)
        by_row = plan.product(spread(plan, low), jnp.concatenate([_fill(x[index][0], C) for x in right], 0))
        flipped = cotangent.T
        for n, (h, t) in enumerate(zip(heads, terms)):
            left = plan.pieces(jnp.concatenate([x[start:stop] * t.row for x in (h.q, h.k)], 0))
            parts[n].append(plan.product(flipped[n * C : n * C + len(right[n][index][0])], left))
            raw = by_row[n * len(cotangent) : (n + 1) * len(cotangent)]
            both = raw * left[0].astype(jnp.float32), raw * jnp.concatenate([t.row] * 2, 0)
            rows[n].append([x[: stop - start] + x[stop - start :] for x in both[:1]] + jnp.split(both[1], 2))
        yield
    return [_sum_terms(plan, decays[n].terms, right[n], rows[n], parts[n]) for n in range(2)]


def _sum_gradients(plan, head, decay, of_pairs, outer, state, dstate):
    """Gradients of the sums of log-decays that `pair_decays` forms: [C, K], or unbounded [(2 + log2 C) * C, K]."""
    rows_q, rows_k, columns_k = outer
    entering, leaving = head.q * rows_q + head.k * rows_k, head.k * columns_k
    through = decay.whole * jnp.sum(state.astype(jnp.float32) * dstate, 0, keepdims=True)
    at_end = iota(leaving.shape, 0) == plan.chunk - 1
    if not plan.bounded:
        return jnp.concatenate([entering + jnp.where(at_end, through, 0.0), leaving, of_pairs], 0)
    tail = jnp.where(at_end, 0.0, leaving)[-8:]
    last = through + jnp.sum(leaving[:-8], 0, keepdims=True) + jnp.sum(tail, 0, keepdims=True)
    inside = of_pairs + entering
    end = inside[-8:] - tail + jnp.where(at_end[-8:], last, 0.0)
    return jnp.concatenate([inside[:-8] - leaving[:-8], end], 0)


def _sum_terms(plan, terms, right, rows, parts):
    """The results of `_inside_chunk` for one head from those of its terms."""
    if not plan.bounded:
        dG, dq, dk_row = zip(*rows)
        dG = [x + y[0].astype(jnp.float32) * z for x, y, z in zip(dG, right, parts)]
        return jnp.concatenate(dG, 0), sum(dq), sum(dk_row), sum(t.column * y for t, y in zip(terms, parts))
    total = parts[-1]
    for term, after, part in reversed(list(zip(terms, terms[1:], parts))):
        total = jnp.concatenate([total[: term.stop] * after.shrink + part, total[term.stop :]], 0)
    dG, dq, dk_row = (jnp.concatenate(x, 0) for x in zip(*rows))
    own = jnp.concatenate([x[0][t.start : t.stop] for x, t in zip(right, terms)], 0).astype(jnp.float32)
    return dG - own * total, dq, dk_row, jnp.concatenate([t.column for t in terms], 0) * total


def _fill(x, size):
    """x with zeros below up to `size` rows."""
    missing = size - len(x)
    return jnp.concatenate([x, jnp.zeros((missing, x.shape[1]), x.dtype)], 0) if missing else x


def _through_state(plan, heads, decays, N, dR, douts, states, dstates):
    """Generator: gradients of q, of k as row and as column through the states at the start and the end of the chunk."""
    C = plan.chunk
    out = []
    for n, decay in enumerate(decays):
        start = plan.product(_outward(plan, douts[n], dR[n]), states[n])
        end = plan.product(N[n], dstates[n])
        out.append((start[:C] * decay.enter, start[C:] * decay.enter, end * decay.leave))
    yield
    return out


def _outward(plan, dout, dR):
    """[dO; -dR], rounded for products."""
    (up,), (down,) = plan.pieces(dout), plan.pieces(dR)
    return jnp.concatenate([up, -down], 0)


def _unnormalize(y, root, dy, scale):
    """Gradient of x from that of y = scale * x * root, root = 1 / norm of x."""
    inner = jnp.sum(y * dy, -1, keepdims=True) * (1.0 / scale**2)
    return (dy - y * inner) * (root * scale)
