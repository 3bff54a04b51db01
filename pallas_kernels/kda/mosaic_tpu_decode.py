"""Decoding with KDA on TPU: one kernel for a step or a verification, one for committing what was verified.

Grid (groups of heads, sequences). A block is one sequence's slot in the pool, which the index selects; the pool is
updated in place. A padding row takes the block of the live row before it (of the first one when it leads), so that it
moves nothing, and computes nothing; without any live row, the first one writes slot 0 as it was read.

One token needs two products of a state with a vector and an update of rank one: 16 registers of state per head of width
128 x 128, read once. All arithmetic is float32, on the vector units: with one row, a matrix unit would only be loaded.
Vectors along keys have to fill the lanes of every row, 16 registers each. Decays are broadcast by the cross-lane units;
keys and queries by the matrix unit, as products with ones, which are exact: what the convolutions give has the dtype of
the inputs (float32 takes three pieces), and the norms are applied to rows.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import target
from pallas_kernels.kda.inputs import L2_EPSILON, MAX_A_LOG, MIN_LOG_DECAY
from pallas_kernels.kda.mosaic_tpu_math import log_decay

LOG2_E = 1.4426950408889634
GROUPS = (96, 48, 32, 16)  # heads per program, the first that divides them
MOST_HEADS = 48  # of one program, where they do not divide into groups
VMEM_LIMIT = 60 * 2**20
LIVE, KEPT = 1, 2  # rows that compute; a row of padding that writes its block as it was read


@dataclasses.dataclass(frozen=True)
class Step:
    """What is fixed when a kernel is built: tokens, heads per program, taps, and whether the pool is written."""

    tokens: int
    heads: int
    taps: int
    lower_bound: float | None
    writes: bool


def missing_support(pool) -> str:
    """Why the kernels cannot run on this pool; empty if they can."""
    _, H, K, V = pool.state.shape
    if K % 128 or V % 128:
        return f"the TPU kernels of decoding take widths that are multiples of 128, got K={K}, V={V}"
    if H % GROUPS[-1] and H > MOST_HEADS:
        return f"the TPU kernels of decoding take up to {MOST_HEADS} heads or a multiple of {GROUPS[-1]}, got {H}"
    return ""


def decode(tokens, parameters, pool, index, *, lower_bound, interpret=False):
    """(o [N, m, H, V], the pool after m tokens); arguments as ``decode._decode_xla``."""
    return _run(tokens, parameters, pool, index, lower_bound=lower_bound, writes=True, interpret=interpret)


def verify(tokens, parameters, pool, index, *, lower_bound, interpret=False):
    """(o, keys, sums of log-decays, updates); arguments as ``decode._verify_xla``."""
    return _run(tokens, parameters, pool, index, lower_bound=lower_bound, writes=False, interpret=interpret)


def _run(tokens, parameters, pool, index, *, lower_bound, writes, interpret):
    q, k, v, gate, beta = tokens
    A_log, dt_bias, *weights = (x.astype(jnp.float32) for x in parameters)
    N, m, H, K = q.shape
    V, taps = v.shape[-1], weights[0].shape[0]
    step = Step(m, _heads(H), taps, lower_bound, writes)
    spec = _Specs(step.heads)
    slots = [spec.state(pool.state), *map(spec.slot, pool.conv)]
    arguments = [q, k, v, gate, beta[..., None], A_log[:, None], dt_bias, *weights, pool.state, *pool.conv]
    in_specs = [spec.row(x) for x in arguments[:5]] + [spec.heads_first(x) for x in arguments[5:7]]
    in_specs += [spec.taps(x) for x in weights] + slots
    key, value = (jax.ShapeDtypeStruct((N, m, H, width), jnp.float32) for width in (K, V))
    others = [_shape(x) for x in (pool.state, *pool.conv)] if writes else [key, key, value]
    out_shape = [_shape(v), *others]
    out_specs = [spec.row(v)] + (slots if writes else [spec.row(x) for x in others])
    o, *rest = _call(
        functools.partial(_kernel, step),
        ("kda_decode" if writes else "kda_verify", (H // step.heads, N), interpret),
        (index,),
        arguments,
        (in_specs, out_specs, out_shape),
        aliases={10 + n: 1 + n for n in range(4)} if writes else {},
    )
    return (o, type(pool)(rest[0], tuple(rest[1:]))) if writes else (o, *rest)


def commit(pool, index, records, accepted, *, interpret=False):
    """The pool after the first accepted [N] tokens of the records; arguments as ``decode._commit_xla``."""
    N, m, H, _ = records.k.shape
    heads = _heads(H)
    spec = _Specs(heads)
    slots = [spec.state(pool.state), *map(spec.slot, pool.conv)]
    rows = [records.k, records.decay_sum, records.update, *records.conv]
    arguments = [*rows, pool.state, *pool.conv]
    out = _call(
        functools.partial(_commit_kernel, m),
        ("kda_commit", (H // heads, N), interpret),
        (index, accepted),
        arguments,
        ([spec.row(x) for x in rows] + slots, slots, [_shape(x) for x in (pool.state, *pool.conv)]),
        aliases={6 + n: n for n in range(4)},
    )
    return type(pool)(out[0], tuple(out[1:]))


def _call(kernel, how, scalars, arguments, specs, aliases):
    """scalars: the index of slots, and what else the kernel reads per row; aliases count from the first argument."""
    (name, grid, interpret), (in_specs, out_specs, out_shape) = how, specs
    slot, live = blocks_of(scalars[0])
    if not interpret:
        slot = target.only_on_tpu(slot, name=f"{name}, implementation='mosaic_tpu',")
    scalars = [slot, live, *(x.astype(jnp.int32) for x in scalars[1:])]
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=grid, in_specs=in_specs, out_specs=out_specs
        ),
        out_shape=out_shape,
        input_output_aliases={len(scalars) + n: out for n, out in aliases.items()},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
            disable_bounds_checks=True,  # slots are clipped or checked where the values are known
        ),
        interpret=interpret,
        name=name,
    )(*scalars, *arguments)


def _shape(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def blocks_of(index):
    """(slot whose block each row takes, LIVE where the row is live), int32 [N]; without any, row 0 keeps its block."""
    index = jnp.asarray(index, jnp.int32)
    live = index >= 0
    row = jnp.arange(len(index))
    latest = jax.lax.cummax(jnp.where(live, row, -1))
    source = jnp.where(latest >= 0, latest, jnp.argmax(live))
    kept = jnp.where((row == 0) & ~jnp.any(live), KEPT, 0)
    return jnp.maximum(index[source], 0), jnp.where(live, LIVE, kept).astype(jnp.int32)


def _heads(H):
    return next((group for group in GROUPS if H % group == 0), H)


class _Specs:
    """Blocks of one group of heads, by where the heads stand; grid (groups, sequences)."""

    def __init__(self, heads):
        self.heads = heads

    def row(self, x):
        return pl.BlockSpec((1, x.shape[1], self.heads, x.shape[3]), lambda h, n, *_: (n, 0, h, 0))

    def heads_first(self, x):
        return pl.BlockSpec((self.heads, x.shape[1]), lambda h, n, *_: (h, 0))

    def taps(self, x):
        return pl.BlockSpec((x.shape[0], self.heads, x.shape[2]), lambda h, n, *_: (0, h, 0))

    def slot(self, x):
        return pl.BlockSpec((1, x.shape[1], self.heads, x.shape[3]), lambda h, n, slot, *_: (slot[n], 0, h, 0))

    def state(self, x):
        return pl.BlockSpec((1, self.heads, *x.shape[2:]), lambda h, n, slot, *_: (slot[n], h, 0, 0))


def _kernel(step, slot_ref, live_ref, *refs):
    q_ref, k_ref, v_ref, gate_ref, beta_ref, a_log_ref, bias_ref, *refs = refs
    taps, (state_ref, *history), (o_ref, *outs) = refs[:3], refs[3:7], refs[7:]
    n = pl.program_id(1)
    computes = live_ref[n] != 0 if step.writes else live_ref[n] == LIVE

    @pl.when(jnp.logical_not(computes))
    def _():
        for ref in (o_ref, *(() if step.writes else outs)):
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    @pl.when(computes)
    def _():
        live = live_ref[n] == LIVE
        windows = [_window(h, x, step.tokens) for h, x in zip(history, (q_ref, k_ref, v_ref))]
        rate = jnp.exp(jnp.minimum(a_log_ref[...], MAX_A_LOG))
        tokens = []
        for t in range(step.tokens):
            recent = [w[t : t + step.taps] for w in windows]
            q, k, v = (_conv(w, tap, ref) for w, tap, ref in zip(recent, taps, (q_ref, k_ref, v_ref)))
            roots = [jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + L2_EPSILON) for x in (q, k)]
            gate = log_decay(step.lower_bound, gate_ref[0, t].astype(jnp.float32) + bias_ref[...], rate, slopes=False)
            beta = jax.nn.sigmoid(beta_ref[0, t].astype(jnp.float32))
            roots[0] *= q.shape[-1] ** -0.5
            token = Token(q, k, v, jnp.maximum(gate.g, MIN_LOG_DECAY), beta, *roots)
            tokens.append(Token(*(jnp.where(live, x, 0.0) for x in token)) if step.writes else token)
        count = 1 if k_ref.dtype == q_ref.dtype == jnp.bfloat16 else 3
        o, updates = _recur(state_ref, tokens, count, outs[0] if step.writes else None)
        for t, row in enumerate(o):
            o_ref[0, t] = row.astype(o_ref.dtype)
        if step.writes:
            for ref, window in zip(outs[1:], windows):
                for j in range(step.taps - 1):
                    ref[0, j] = jnp.where(live, window[step.tokens + j], window[j]).astype(ref.dtype)
            return
        total = jnp.zeros_like(tokens[0].g)
        for t, token in enumerate(tokens):
            total += token.g * (1 / LOG2_E)
            outs[0][0, t], outs[1][0, t], outs[2][0, t] = token.k * token.k_root, total, updates[t]


class Token(NamedTuple):
    """One token of a group of heads, float32: [heads, K], [heads, V] or, the last three, [heads, 1]."""

    q: jax.Array  # as the convolution gives it; q_root is its norm's reciprocal times the scale
    k: jax.Array
    v: jax.Array
    g: jax.Array  # log-decay in base 2
    beta: jax.Array
    q_root: jax.Array
    k_root: jax.Array


def _recur(state_ref, tokens, count, new_ref):
    """(outputs [heads, V], updates [heads, V]) by token; new states go to new_ref unless it is None.

    count: pieces of bfloat16 that give q and k exactly.
    """
    heads, width = tokens[0].v.shape
    decays = [jnp.exp2(x.g).T for x in tokens]
    rows = [_pieces(x.k, count) + _pieces(x.q, count) for x in tokens]
    outputs, updates = [[] for _ in tokens], [[] for _ in tokens]
    for head in range(heads):
        S, at = state_ref[0, head], slice(head, head + 1)
        for t, token in enumerate(tokens):
            k, q = _fill_lanes([x[at] for x in rows[t]], width)
            S = decays[t][:, at] * S
            error = token.v[at] - token.k_root[at] * jnp.sum(k * S, 0, keepdims=True)
            update = token.beta[at] * error
            S = S + k * (token.k_root[at] * update)
            outputs[t].append(token.q_root[at] * jnp.sum(q * S, 0, keepdims=True))
            updates[t].append(update)
        if new_ref is not None:
            new_ref[0, head] = S
    join = lambda rows: [jnp.concatenate(x, 0) for x in rows]  # noqa: E731
    return join(outputs), join(updates)


def _pieces(x, count):
    """x as a sum of float32 arrays that bfloat16 holds; itself if count is 1."""
    out = []
    for _ in range(count - 1):
        out.append(x.astype(jnp.bfloat16).astype(jnp.float32))
        x = x - out[-1]
    return [*out, x]


def _fill_lanes(rows, width):
    """Two vectors, each a sum of rows [1, K] that bfloat16 holds, as columns in every lane: two of [K, width]."""
    left = jnp.concatenate([*rows, *[jnp.zeros_like(rows[0])] * (8 - len(rows))], 0).astype(jnp.bfloat16)
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, (8, 2 * width), n) for n in range(2))
    half = len(rows) // 2
    ones = jnp.where((row < 2 * half) & (row // half == lane // width), 1.0, 0.0).astype(jnp.bfloat16)
    both = jax.lax.dot_general(left, ones, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return both[:, :width], both[:, width:]


def _commit_kernel(m, slot_ref, live_ref, accepted_ref, *refs):
    k_ref, decay_ref, update_ref, *refs = refs
    new, (state_ref, *history), outs = refs[:3], refs[3:7], refs[7:]
    n = pl.program_id(1)

    @pl.when(live_ref[n] != 0)
    def _():
        accepted = jnp.where(live_ref[n] == LIVE, accepted_ref[n], 0)
        last = sum(jnp.where(accepted == t + 1, decay_ref[0, t], 0.0) for t in range(m))
        decays = [jnp.exp(jnp.minimum(last - decay_ref[0, t], 0.0)) for t in range(m)]
        kept = [jnp.where(t < accepted, k_ref[0, t] * decay, 0.0) for t, decay in enumerate(decays)]
        columns = jnp.concatenate([jnp.exp(last), *kept], 0).T
        heads = last.shape[0]
        for head in range(heads):
            S = columns[:, head : head + 1] * state_ref[0, head]
            for t in range(m):
                at = (t + 1) * heads + head
                S = S + columns[:, at : at + 1] * update_ref[0, t, head : head + 1]
            outs[0][0, head] = S
        for old, x, ref in zip(history, new, outs[1:]):
            window = _window(old, x, m)
            for j in range(ref.shape[1]):
                row = sum(jnp.where(accepted == a, window[a + j], 0.0) for a in range(m + 1))
                ref[0, j] = row.astype(ref.dtype)


def _window(history_ref, ref, m):
    """Rows [heads, width] in float32: the history, then the new tokens."""
    rows = [history_ref[0, j] for j in range(history_ref.shape[1])] + [ref[0, t] for t in range(m)]
    return [x.astype(jnp.float32) for x in rows]


def _conv(window, tap_ref, ref):
    """Convolution and SiLU of the last token of the window, rounded to the dtype of the inputs."""
    total = sum(tap_ref[j] * x for j, x in enumerate(window))
    return jax.nn.silu(total).astype(ref.dtype).astype(jnp.float32)
