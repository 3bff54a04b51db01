"""The public functions of KDA: what they refuse, which implementation they choose, decoding step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_cases import make_inputs

from pallas_kernels import testing
from pallas_kernels.kda import describe, kda, kda_step

IDS = np.zeros((2, 6), np.int32)


def call(**changes):
    inputs = make_inputs(0, B=2, T=6, H=3, K=8, V=4) | changes
    tokens = [inputs.pop(name) for name in ("q", "k", "v", "gate", "beta")]
    return kda(*tokens, **inputs)


@pytest.mark.parametrize(
    "changes, error, message",
    (
        ({"k": jnp.ones((2, 6, 3, 9))}, ValueError, r"k has shape \(2, 6, 3, 9\).*must be \(2, 6, 3, 8\)"),
        ({"v": jnp.ones((2, 5, 3, 4))}, ValueError, r"v has shape \(2, 5, 3, 4\)"),
        ({"beta": jnp.ones((2, 6))}, ValueError, r"beta has shape \(2, 6\)"),
        ({"A_log": jnp.ones((1, 1, 3, 1))}, ValueError, r"A_log has shape \(1, 1, 3, 1\).*must be \(3,\)"),
        ({"dt_bias": jnp.ones(24)}, ValueError, r"dt_bias has shape \(24,\).*must be \(3, 8\)"),
        ({"q": jnp.ones((2, 0, 3, 8))}, ValueError, "at least 1"),
        ({"q": jnp.ones((6, 3, 8))}, ValueError, r"q must be \[B, T, H, K\]"),
        ({"q": jnp.ones((2, 6, 3, 8), jnp.float16)}, TypeError, "q is float16"),
        ({"gate": jnp.ones((2, 6, 3, 8), jnp.int32)}, TypeError, "gate is int32"),
        ({"initial_state": jnp.ones((2, 3, 4, 8))}, ValueError, r"initial_state has shape \(2, 3, 4, 8\)"),
        ({"initial_state": jnp.ones((2, 3, 8, 4), jnp.bfloat16)}, TypeError, "initial_state must be float32"),
        ({"lower_bound": 0.0}, ValueError, "lower_bound must be a negative number"),
        ({"lower_bound": 5.0}, ValueError, "lower_bound must be a negative number"),
        ({"lower_bound": float("nan")}, ValueError, "lower_bound must be a negative number"),
        ({"chunk_size": 48}, ValueError, "chunk_size must be 16, 32, 64, 128 or None"),
        ({"segment_ids": IDS[:, :5]}, ValueError, r"segment_ids has shape \(2, 5\)"),
        ({"segment_ids": IDS.astype(np.float32)}, TypeError, "segment_ids must be integers"),
        ({"segment_ids": IDS - 2}, ValueError, "got -2"),
        ({"segment_ids": IDS + np.array([0, 1, 1, -1, 0, 2])}, ValueError, "decrease in row 0: 0 at token 4 after 1"),
        ({"segment_ids": IDS + 2, "num_segments": 2, "initial_state": None}, ValueError, "segment_ids reach 2"),
        ({"num_segments": 2, "initial_state": None}, ValueError, "num_segments=2 needs segment_ids"),
        ({"implementation": "fast"}, ValueError, "implementation must be one of"),
    ),
)
def test_refuses(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


def test_takes_what_is_right():
    o, state = call(segment_ids=IDS + np.array([0, 1, 1, -1, 2, 2]))
    assert o.shape == (2, 6, 3, 4) and state.shape == (2, 3, 8, 4)


def test_padded_inputs_of_decay_parameters_are_not_broadcast():
    """A_log padded to the head width, as released weights have it, is refused by its shape."""
    with pytest.raises(ValueError, match=r"A_log has shape \(8,\)"):
        call(A_log=jnp.ones(8))


def test_chooses_by_length_and_target():
    assert describe((1, 1, 2, 16))[0] == "reference"
    assert describe((1, 512, 2, 16), platform="cpu")[0] == "chunked"
    assert describe((1, 512, 2, 16), implementation="reference")[0] == "reference"


def test_steps_equal_the_sequence():
    inputs = make_inputs(1, B=2, T=6, H=3, K=8, V=4)
    tokens = [inputs.pop(name) for name in ("q", "k", "v", "gate", "beta")]
    state = inputs.pop("initial_state")
    o, final = kda(*tokens, **inputs, initial_state=state, implementation="chunked")
    step = jax.jit(lambda token, state: kda_step(*token, state, **inputs))
    outputs = []
    for t in range(6):
        o_t, state = step([x[:, t] for x in tokens], state)
        outputs.append(o_t)
    testing.assert_close({"o": jnp.stack(outputs, 1), "state": state}, {"o": o, "state": final}, 1e-5)


def test_differentiates_under_checkpoint_and_scan():
    """As a model uses it: rematerialized, scanned over layers."""
    inputs = make_inputs(2, B=1, T=20, H=2, K=8, V=8)
    rest = {name: inputs[name] for name in ("A_log", "dt_bias")}
    k, v, gate, beta = (inputs[name] for name in ("k", "v", "gate", "beta"))

    def layer(q, scale, implementation):
        return kda(q, k, scale * v, gate, beta, **rest, implementation=implementation)[0]

    def loss(scales, implementation, wrap):
        body = wrap(lambda q, scale: (layer(q, scale, implementation), None))
        return jnp.sum(jax.lax.scan(body, inputs["q"], scales)[0] ** 2)

    scales = jnp.asarray([0.5, 1.0, 2.0])
    scanned = jax.jit(jax.grad(loss), static_argnums=(1, 2))(scales, "chunked", jax.checkpoint)
    plain = jax.jit(jax.grad(loss), static_argnums=(1, 2))(scales, "reference", lambda f: f)
    testing.assert_close({"scales": scanned}, {"scales": plain}, 1e-3)
