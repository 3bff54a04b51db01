"""What the tests of KDA share: inputs by kind, and values and all gradients of an implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import testing
from pallas_kernels.kda import kda
from pallas_kernels.kda.mosaic_tpu import kda_mosaic_tpu

# The TPU kernels on CPU. Their operands are rounded as on the device; products are exact.
INTERPRETED = "mosaic_tpu interpreted"
# Interpreted kernels are long programs that run once: compile them with little optimization. Excess precision would let
# XLA widen a bfloat16 array that the interpreted kernel then reads as pairs of bits.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_allow_excess_precision": False,
}
# Sizes that interpreted kernels are compiled for, unless a test is about sizes: each compilation costs seconds.
BUCKET = dict(B=3, T=150, H=2, N=8, K=32, V=32)
ARRAYS = ("q", "k", "v", "gate", "beta", "A_log", "dt_bias", "initial_state")
AXES = dict(q="BTHK", k="BTHK", v="BTHV", gate="BTHK", beta="BTH", A_log="H", dt_bias="HK", o="BTHV")
FLOAT64 = "reference in float64"


def make_inputs(
    seed, B, T, H, K, V, *, gates="spread", keys="random", beta="random", num_segments=None, dtype=jnp.float32
) -> dict:
    """Raw inputs of kda by name; the state, A_log and dt_bias are float32 whatever the dtype."""
    rng = np.random.default_rng(seed)
    A_log, dt_bias = 0.3 * rng.standard_normal(H), 0.3 * rng.standard_normal((H, K))
    z = testing.raw_gate(gates, (B, T, H, K), rng)
    slots = () if num_segments is None else (num_segments,)
    tokens = {
        "q": rng.standard_normal((B, T, H, K)),
        "k": testing.raw_keys(keys, (B, T, H, K), rng),
        "v": rng.standard_normal((B, T, H, V)),
        "gate": z / np.exp(A_log)[:, None] - dt_bias,
        "beta": testing.raw_beta(beta, (B, T, H), rng),
    }
    rest = {"A_log": A_log, "dt_bias": dt_bias, "initial_state": 0.3 * rng.standard_normal((B, *slots, H, K, V))}
    return {n: jnp.asarray(x, dtype) for n, x in tokens.items()} | {
        n: jnp.asarray(x, jnp.float32) for n, x in rest.items()
    }


def cotangents(inputs: dict, seed=1, dtype=jnp.float32) -> tuple:
    """Random cotangents of the output, exact in `dtype`, and of the final state."""
    rng = np.random.default_rng(seed)
    do, dstate = (jnp.asarray(rng.standard_normal(inputs[n].shape), jnp.float32) for n in ("v", "initial_state"))
    return do.astype(dtype).astype(jnp.float32), dstate


def values(inputs: dict, *, implementation, segment_ids=None, **static) -> dict:
    """{"o", "state"} of an implementation; FLOAT64 is the recurrence in float64."""
    return _evaluate(inputs, None, implementation, segment_ids, static)


def values_and_gradients(inputs: dict, cotangents, *, implementation, segment_ids=None, **static) -> dict:
    """The values, and the gradient by every input under its name."""
    return _evaluate(inputs, cotangents, implementation, segment_ids, static)


def _evaluate(inputs, cotangents, implementation, segment_ids, static):
    own = sizes(inputs, static.get("num_segments"))
    bucketed = implementation == INTERPRETED and not static.pop("exact", False)
    if bucketed:
        static, inputs, cotangents, segment_ids = _bucket(own, dict(static), inputs, cotangents, segment_ids)
    with jax.enable_x64(implementation == FLOAT64):
        (inputs, cotangents), name = _widen((inputs, cotangents), implementation)
        result = _jitted(name, cotangents is not None, tuple(static.items()))(inputs, cotangents, segment_ids)
    if not bucketed:
        return result
    result = {n: resize(x, axes_of(n, own), own) for n, x in result.items()}
    return result | {"o": _rescale(result["o"], own)}


def sizes(inputs, num_segments) -> dict:
    """Size of every axis by its letter; N only with one state per document."""
    named = dict(zip("BTHK", inputs["q"].shape), V=inputs["v"].shape[-1])
    return named if num_segments is None else named | {"N": num_segments}


def axes_of(name, sizes):
    return AXES.get(name, "BNHKV" if "N" in sizes else "BHKV")


def resize(x, axes, sizes, fill=0):
    """x cut or filled up behind along each axis."""
    x = x[tuple(slice(sizes[a]) for a in axes)]
    return jnp.pad(x, [(0, sizes[a] - n) for a, n in zip(axes, x.shape)], constant_values=fill)


def _bucket(own, static, inputs, cotangents, segment_ids):
    """Fills up to the sizes of the bucket with padding that belongs to no document, empty documents and zeros."""
    full = {a: max(size, BUCKET[a]) for a, size in own.items()}
    if "N" in own:
        static["num_segments"] = full["N"]
    if segment_ids is None:
        segment_ids = jnp.zeros((own["B"], own["T"]), jnp.int32)
    inputs = {name: resize(x, axes_of(name, own), full) for name, x in inputs.items()}
    if cotangents is not None:
        cotangents = _rescale(cotangents[0], own), cotangents[1]
        cotangents = tuple(resize(x, axes_of(n, own), full) for n, x in zip(("o", "state"), cotangents))
    return static, inputs, cotangents, resize(jnp.asarray(segment_ids), "BT", full, fill=-1)


def _rescale(o, own):
    """Outputs, or their cotangents, as if queries had been scaled for the width that they really have."""
    wider = max(own["K"], BUCKET["K"]) / own["K"]
    return o if wider == 1 else (o * wider**0.5).astype(o.dtype)


def _widen(tree, implementation):
    if implementation != FLOAT64:
        return tree, implementation
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), tree), "reference"


@functools.cache
def _jitted(implementation, gradients, static):
    """One compiled function per set of options, so that cases of equal shape share it."""

    def run(inputs, segment_ids):
        arrays = [inputs.get(name) for name in ARRAYS]
        if implementation == INTERPRETED:
            options = dict(lower_bound=-5.0, num_segments=None, chunk_size=64) | dict(static)
            return kda_mosaic_tpu(*arrays, segment_ids, interpret=True, **options)
        rest = dict(zip(ARRAYS[5:], arrays[5:]), segment_ids=segment_ids)
        return kda(*arrays[:5], **rest, implementation=implementation, **dict(static))

    def values(inputs, _, segment_ids):
        return dict(zip(("o", "state"), run(inputs, segment_ids)))

    def values_and_gradients(inputs, cotangents, segment_ids):
        (o, state), pull = jax.vjp(lambda inputs: run(inputs, segment_ids), inputs)
        return {"o": o, "state": state} | pull((cotangents[0].astype(o.dtype), cotangents[1].astype(state.dtype)))[0]

    options = QUICK if implementation == INTERPRETED else {}
    return jax.jit(values_and_gradients if gradients else values, compiler_options=options)
