"""What the tests of KDA share: inputs by kind, and values and all gradients of an implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import testing
from pallas_kernels.kda import kda

ARRAYS = ("q", "k", "v", "gate", "beta", "A_log", "dt_bias", "initial_state")
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


def cotangents(inputs: dict, seed=1) -> tuple:
    """Random cotangents of the output and the final state."""
    rng = np.random.default_rng(seed)
    shapes = inputs["v"].shape, inputs["initial_state"].shape
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def values(inputs: dict, *, implementation, segment_ids=None, **static) -> dict:
    """{"o", "state"} of an implementation; FLOAT64 is the recurrence in float64."""
    with jax.enable_x64(implementation == FLOAT64):
        inputs, name = _widen(inputs, implementation)
        return _jitted(name, False, tuple(static.items()))(inputs, None, segment_ids)


def values_and_gradients(inputs: dict, cotangents, *, implementation, segment_ids=None, **static) -> dict:
    """The values, and the gradient by every input under its name."""
    with jax.enable_x64(implementation == FLOAT64):
        (inputs, cotangents), name = _widen((inputs, cotangents), implementation)
        return _jitted(name, True, tuple(static.items()))(inputs, cotangents, segment_ids)


def _widen(tree, implementation):
    if implementation != FLOAT64:
        return tree, implementation
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), tree), "reference"


@functools.cache
def _jitted(implementation, gradients, static):
    """One compiled function per set of options, so that cases of equal shape share it."""

    def run(inputs, segment_ids):
        arrays = dict(inputs)
        tokens = [arrays.pop(name) for name in ARRAYS[:5]]
        return kda(*tokens, **arrays, segment_ids=segment_ids, implementation=implementation, **dict(static))

    def values(inputs, _, segment_ids):
        return dict(zip(("o", "state"), run(inputs, segment_ids)))

    def values_and_gradients(inputs, cotangents, segment_ids):
        (o, state), pull = jax.vjp(lambda inputs: run(inputs, segment_ids), inputs)
        return {"o": o, "state": state} | pull((cotangents[0].astype(o.dtype), cotangents[1].astype(state.dtype)))[0]

    return jax.jit(values_and_gradients if gradients else values)
