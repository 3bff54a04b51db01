"""Decoding with KDA on TPU: one kernel for a step or a verification, one for committing what was verified.

Grid (groups of heads, sequences). A block is one sequence's slot in the pool, which the index selects; the pool is
updated in place. A padding row takes the block of the live row before it (of the first one when it leads), so that it
moves nothing, and computes nothing; without any live row, slot 0 is written as it was read.

One token needs two products of a state with a vector and an update of rank one: 16 registers of state per head of width
128 x 128 are read once and stay in registers over the tokens. Vectors along keys are turned into columns once per group
of heads. All arithmetic is float32, on the vector units: with one row, a matrix unit would only be loaded.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import target
from pallas_kernels.kda.inputs import L2_EPSILON, MAX_A_LOG, MIN_LOG_DECAY
from pallas_kernels.kda.mosaic_tpu_math import log_decay

LOG2_E = 1.4426950408889634
GROUP = 16  # heads per program
MOST_HEADS = 48  # of one program, where they do not divide into groups
VMEM_LIMIT = 60 * 2**20


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
    if H % GROUP and H > MOST_HEADS:
        return f"the TPU kernels of decoding take up to {MOST_HEADS} heads or a multiple of {GROUP}, got {H}"
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
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=interpret,
        name=name,
    )(*scalars, *arguments)


def _shape(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def blocks_of(index):
    """(slot whose block each row takes, 1 where the row is live), int32 [N]."""
    index = jnp.asarray(index, jnp.int32)
    live = index >= 0
    row = jnp.arange(len(index))
    latest = jax.lax.cummax(jnp.where(live, row, -1))
    source = jnp.where(latest >= 0, latest, jnp.argmax(live))
    return jnp.maximum(index[source], 0), live.astype(jnp.int32)


def _heads(H):
    return GROUP if H % GROUP == 0 else H


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
    if step.writes:
        _keep_first_block(live_ref, (state_ref, *history), outs)

    @pl.when(live_ref[n] == 0)
    def _():
        for ref in (o_ref, *(() if step.writes else outs)):
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    @pl.when(live_ref[n] != 0)
    def _():
        windows = [_window(h, x, step.tokens) for h, x in zip(history, (q_ref, k_ref, v_ref))]
        rate = jnp.exp(jnp.minimum(a_log_ref[...], MAX_A_LOG))
        tokens = []
        for t in range(step.tokens):
            recent = [w[t : t + step.taps] for w in windows]
            q, k, v = (_conv(w, tap, ref) for w, tap, ref in zip(recent, taps, (q_ref, k_ref, v_ref)))
            q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + L2_EPSILON) for x in (q, k))
            gate = log_decay(step.lower_bound, gate_ref[0, t].astype(jnp.float32) + bias_ref[...], rate)
            beta = jax.nn.sigmoid(beta_ref[0, t].astype(jnp.float32))
            tokens.append((q * q.shape[-1] ** -0.5, k, v, jnp.maximum(gate.g, MIN_LOG_DECAY), beta))
        o, updates, states = _recur(state_ref, tokens)
        for t, row in enumerate(o):
            o_ref[0, t] = row.astype(o_ref.dtype)
        if step.writes:
            for head, S in enumerate(states):
                outs[0][0, head] = S
            for ref, window in zip(outs[1:], windows):
                for j in range(step.taps - 1):
                    ref[0, j] = window[step.tokens + j].astype(ref.dtype)
            return
        total = jnp.zeros_like(tokens[0][3])
        for t, (_, k, _, g, _) in enumerate(tokens):
            total += g * (1 / LOG2_E)
            outs[0][0, t], outs[1][0, t], outs[2][0, t] = k, total, updates[t]


def _recur(state_ref, tokens):
    """(outputs [heads, V] and updates [heads, V] by token, states [K, V] by head) of tokens (q, k, v, g, beta)."""
    heads = tokens[0][0].shape[0]
    columns = [jnp.concatenate([jnp.exp2(g), k, q], 0).T for q, k, _, g, _ in tokens]
    outputs, updates, states = [[] for _ in tokens], [[] for _ in tokens], []
    for head in range(heads):
        S = state_ref[0, head]
        for t, (_, _, v, _, beta) in enumerate(tokens):
            a, k, q = (columns[t][:, n * heads + head : n * heads + head + 1] for n in range(3))
            S = a * S
            error = v[head : head + 1] - jnp.sum(k * S, 0, keepdims=True)
            update = beta[head : head + 1] * error
            S = S + k * update
            outputs[t].append(jnp.sum(q * S, 0, keepdims=True))
            updates[t].append(update)
        states.append(S)
    join = lambda rows: [jnp.concatenate(x, 0) for x in rows]  # noqa: E731
    return join(outputs), join(updates), states


def _commit_kernel(m, slot_ref, live_ref, accepted_ref, *refs):
    k_ref, decay_ref, update_ref, *refs = refs
    new, (state_ref, *history), outs = refs[:3], refs[3:7], refs[7:]
    n = pl.program_id(1)
    _keep_first_block(live_ref, (state_ref, *history), outs)

    @pl.when(live_ref[n] != 0)
    def _():
        accepted = accepted_ref[n]
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


def _keep_first_block(live_ref, ins, outs):
    """Where the first row is padding: its block holds what it held, in case that no live row follows."""

    @pl.when((pl.program_id(1) == 0) & (live_ref[0] == 0))
    def _():
        for x, out in zip(ins, outs):
            out[...] = x[...]


def _window(history_ref, ref, m):
    """Rows [heads, width] in float32: the history, then the new tokens."""
    rows = [history_ref[0, j] for j in range(history_ref.shape[1])] + [ref[0, t] for t in range(m)]
    return [x.astype(jnp.float32) for x in rows]


def _conv(window, tap_ref, ref):
    """Convolution and SiLU of the last token of the window, rounded to the dtype of the inputs."""
    total = sum(tap_ref[j] * x for j, x in enumerate(window))
    return jax.nn.silu(total).astype(ref.dtype).astype(jnp.float32)
