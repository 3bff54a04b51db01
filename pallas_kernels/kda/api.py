"""The public functions of Kimi Delta Attention."""

import functools
from typing import Literal, get_args

import jax

from pallas_kernels import target
from pallas_kernels.kda import inputs
from pallas_kernels.kda.chunked import kda_chunked
from pallas_kernels.kda.mosaic_tpu import kda_mosaic_tpu, missing_support
from pallas_kernels.kda.reference import kda_reference
from pallas_kernels.target import Choice

Implementation = Literal["reference", "chunked", "mosaic_tpu"]

# Up to this many tokens the recurrence does less work than one padded chunk.
SHORT = 4
# Up to this width of keys the chunk form is faster with chunks of 32 tokens: C x C products outweigh those with states.
NARROW = 32


def kda(
    q,
    k,
    v,
    gate,
    beta,
    *,
    A_log,
    dt_bias,
    lower_bound=-5.0,
    segment_ids=None,
    initial_state=None,
    num_segments=None,
    implementation: Implementation | None = None,
    chunk_size: int | None = None,
):
    """Kimi Delta Attention from what the short convolution and the projections give to the output of every head.

    Kimi Linear (arXiv 2510.26692), eq. 1, with the decay of Kimi K3. Per head, with q and k divided by
    sqrt(sum of squares + 1e-6), q scaled by K**-0.5, beta_t = sigmoid(beta logit) and alpha_t = exp(log-decay):

      S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T        o_t = S_t^T q_t

    Norms, gates, sums of log-decays, the solve inside a chunk and the state are float32 whatever the input, because
    errors there grow with the length; float64 if an input is float64.

    Args:
      q: [B, T, H, K] bfloat16, float32 or float64, after the short convolution, not normalized.
      k: [B, T, H, K], likewise.
      v: [B, T, H, V].
      gate: [B, T, H, K], raw: before the bias is added.
      beta: [B, T, H] logits.
      A_log: [H], logarithm of the gate's slope.
      dt_bias: [H, K], added to the gate.
      lower_bound: least log-decay per token, < 0: log-decay = lower_bound * sigmoid(exp(A_log) * (gate + dt_bias)).
        None: log-decay = -exp(A_log) * softplus(gate + dt_bias), which has no bound.
      segment_ids: int [B, T], document of each token, non-decreasing along T; -1 is padding, which may stand anywhere,
        changes no state, and has output and gradients exactly zero. None: every row is one document.
      initial_state: state that the first document of each row starts from, [B, H, K, V] float32 (float64 with float64
        inputs); with num_segments the state of every document, [B, num_segments, H, K, V]. None: zeros.
      num_segments: number N of documents per row, whose numbers are then 0 .. N - 1. Asks for one state per document.
      implementation: "reference" (token recurrence), "chunked" (plain JAX, any device) or "mosaic_tpu" (fused kernels).
        None takes the best one for the target that the program is lowered for, the TPU kernels where they take the
        arrays as they are (`describe` tells). Which one it is is logged once per shape.
      chunk_size: tokens per chunk, 16, 32, 64 or 128. None takes what suits the implementation and K.

    Returns:
      (o, final_state): o [B, T, H, V] in v's dtype; final_state like initial_state: the state after the last token of
      each row or, with num_segments, of each document (the initial one for a document without tokens). Differentiable
      in all arrays but segment_ids.

    Raises:
      ValueError: a shape, lower_bound, chunk_size, num_segments or (where its values are known) segment_ids is not as
        above.
      TypeError: a dtype is not as above; float16 is refused because its exponents are too short for products of decays.
      NotImplementedError: the named implementation cannot run; the message says why.
    """
    arrays = (q, k, v, gate, beta, A_log, dt_bias, initial_state, segment_ids)
    inputs.validate(*arrays, lower_bound=lower_bound, num_segments=num_segments, chunk_size=chunk_size)
    run = functools.partial(_run, lower_bound=lower_bound, num_segments=num_segments, chunk_size=chunk_size)
    tpu = target.is_tpu()
    known = implementation is not None or tpu is not None
    on_tpu, elsewhere = (_choose(q, v, implementation, chunk_size, tpu if known else x) for x in (True, False))
    title = f"kda of q {q.shape} and v {v.shape} {v.dtype}:"
    if on_tpu.implementation == elsewhere.implementation:
        target.log_once(f"{title} {on_tpu.implementation}, {on_tpu.reason}")
        return run(on_tpu.implementation, *arrays)
    target.log_once(f"{title} {on_tpu.implementation} if it is lowered for TPU, else {elsewhere.implementation}")
    branches = dict(tpu=functools.partial(run, on_tpu.implementation))
    return jax.lax.platform_dependent(*arrays, default=functools.partial(run, elsewhere.implementation), **branches)


def describe(q, v, *, platform: str, implementation: Implementation | None = None, chunk_size=None) -> Choice:
    """What ``kda`` runs for q and v (arrays or jax.ShapeDtypeStruct) in a program lowered for "cpu", "gpu" or "tpu".

    Raises:
      ValueError: implementation is not a known name.
      NotImplementedError: the named implementation cannot run there.
    """
    return _choose(q, v, implementation, chunk_size, platform == "tpu")


def _choose(q, v, implementation, chunk_size, tpu: bool | None) -> Choice:
    """The choice for a target that is a TPU, is none, or (None) is not known before the program is lowered."""
    if implementation is None:
        if q.shape[1] <= SHORT:
            return Choice("reference", f"at most {SHORT} tokens")
        if not tpu:
            return Choice("chunked", "the target is no TPU")
        missing = missing_support(q, v, chunk_size)
        return Choice("chunked", missing) if missing else Choice("mosaic_tpu", "the target is a TPU")
    if implementation not in get_args(Implementation):
        raise ValueError(f"implementation must be one of {get_args(Implementation)} or None, got {implementation!r}")
    if implementation == "mosaic_tpu" and tpu is False:
        raise NotImplementedError("kda: implementation='mosaic_tpu' runs on TPU, and the target is none; use None")
    return Choice(implementation, "named by the caller")


def _run(implementation, *arrays, chunk_size, **static):
    run = {"reference": kda_reference, "chunked": kda_chunked, "mosaic_tpu": kda_mosaic_tpu}[implementation]
    narrow = implementation == "chunked" and arrays[0].shape[-1] <= NARROW
    return run(*arrays, chunk_size=chunk_size or (32 if narrow else 64), **static)


def kda_step(q, k, v, gate, beta, state, *, A_log, dt_bias, lower_bound=-5.0):
    """One token of ``kda`` for a batch of sequences, for decoding.

    Args:
      q, k, gate: [B, H, K]; v: [B, H, V]; beta: [B, H] logits; all raw, as for ``kda``.
      state: [B, H, K, V] float32 (float64 with float64 inputs).
      A_log, dt_bias, lower_bound: as for ``kda``.

    Returns:
      (o [B, H, V] in v's dtype, new state).

    Raises:
      ValueError, TypeError: as ``kda``.
    """
    token = [x[:, None] for x in (q, k, v, gate, beta)]
    o, state = kda(
        *token, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, initial_state=state, implementation="reference"
    )
    return o[:, 0], state
