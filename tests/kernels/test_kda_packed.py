"""Packed documents and padding, one body of tests for every implementation of KDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_cases import ARRAYS, FLOAT64, cotangents, make_inputs, values, values_and_gradients
from test_kda import every_implementation

from k3jax.model.kda import short_conv
from pallas_kernels import testing

# A_log's gradient sums terms of both signs over tokens and channels.
FLOAT32 = {"default": 5e-5, "A_log": 5e-4}
# Single tokens, documents within a chunk, across chunks and ending with a chunk; three in the first.
LENGTHS = (1, 1, 30, 1, 30, 1, 80, 1)
SHAPE = dict(B=1, T=sum(LENGTHS), H=2, K=16, V=8)


def separate(inputs, cot, lengths, implementation):
    """Values and gradients of every document alone, joined again."""
    results = []
    for n, (start, length) in enumerate(zip(np.cumsum((0, *lengths[:-1])), lengths)):
        part = slice(start, start + length)
        one = {name: x[:, part] if name in ARRAYS[:5] else x for name, x in inputs.items()}
        one["initial_state"] = inputs["initial_state"][:, n]
        results.append(values_and_gradients(one, (cot[0][:, part], cot[1][:, n]), implementation=implementation))
    joined = {name: np.concatenate([r[name] for r in results], axis=1) for name in ("o", *ARRAYS[:5])}
    joined |= {name: np.stack([r[name] for r in results], axis=1) for name in ("state", "initial_state")}
    return joined | {name: sum(np.asarray(r[name]) for r in results) for name in ("A_log", "dt_bias")}


@every_implementation
def test_packed_documents_equal_separate_ones(implementation):
    inputs = make_inputs(0, **SHAPE, num_segments=len(LENGTHS))
    cot, segment_ids = cotangents(inputs), testing.packed_segment_ids(LENGTHS)[None]
    packed = values_and_gradients(
        inputs, cot, implementation=implementation, segment_ids=segment_ids, num_segments=len(LENGTHS)
    )
    testing.assert_close(packed, separate(inputs, cot, LENGTHS, FLOAT64), FLOAT32)


@every_implementation
def test_documents_start_from_nothing(implementation):
    """Without states by document, only the first one sees the initial state and only the last one leaves its own."""
    inputs = make_inputs(1, **SHAPE, gates="weak")
    cot, segment_ids = cotangents(inputs), testing.packed_segment_ids(LENGTHS)[None]
    result = values_and_gradients(inputs, cot, implementation=implementation, segment_ids=segment_ids)
    states = jnp.zeros((1, len(LENGTHS), 2, 16, 8)).at[:, 0].set(inputs["initial_state"])
    cot_states = jnp.zeros((1, len(LENGTHS), 2, 16, 8)).at[:, -1].set(cot[1])
    expected = separate(inputs | {"initial_state": states}, (cot[0], cot_states), LENGTHS, FLOAT64)
    expected |= {"state": expected["state"][:, -1], "initial_state": expected["initial_state"][:, 0]}
    testing.assert_close(result, expected, FLOAT32)
    without_reset = values_and_gradients(inputs, cot, implementation=implementation)
    assert testing.relative_error(without_reset["o"], expected["o"]) > 0.1


@every_implementation
def test_t16_many_single_tokens(implementation):
    inputs = make_inputs(2, B=1, T=24, H=2, K=16, V=8, num_segments=24)
    options = dict(segment_ids=np.arange(24, dtype=np.int32)[None], num_segments=24)
    result = values(inputs, implementation=implementation, **options)
    testing.assert_close(result, values(inputs, implementation=FLOAT64, **options), FLOAT32)


@every_implementation
@pytest.mark.parametrize("lengths", ((0, 40, 0, 30, 0), (70, 0, 0, 0, 0), (0, 0, 0, 0, 70)))
def test_t14_empty_documents_keep_their_state(implementation, lengths):
    """FlashKDA#32, attention-gym#419; the gradient of an unused state is the cotangent of the final one."""
    inputs = make_inputs(3, B=1, T=70, H=2, K=16, V=8, num_segments=5)
    cot, segment_ids = cotangents(inputs), testing.packed_segment_ids(lengths)[None]
    options = dict(segment_ids=segment_ids, num_segments=5)
    result = values_and_gradients(inputs, cot, implementation=implementation, **options)
    testing.assert_close(result, values_and_gradients(inputs, cot, implementation=FLOAT64, **options), FLOAT32)
    empty = np.array(lengths) == 0
    np.testing.assert_array_equal(result["state"][:, empty], inputs["initial_state"][:, empty])
    np.testing.assert_array_equal(result["initial_state"][:, empty], cot[1][:, empty])


@every_implementation
@pytest.mark.parametrize("num_segments", (None, 3))
def test_t15_t28_padding_is_inert(implementation, num_segments):
    """Padding before, inside and after documents, holding nan: outputs and gradients are exactly zero there, and the
    rest is what it would be without the padding."""
    rng = np.random.default_rng(4)
    T, ids = 110, np.full(110, -1, np.int32)
    real = np.sort(rng.choice(np.arange(5, 100), 70, replace=False))
    ids[real] = testing.packed_segment_ids((20, 15, 35))
    inputs = make_inputs(4, B=1, T=T, H=2, K=16, V=8, num_segments=num_segments)
    cot, padding = cotangents(inputs), ids == -1
    dirty = inputs | {name: inputs[name].at[:, padding].set(np.nan) for name in ARRAYS[:5]}
    options = dict(implementation=implementation, num_segments=num_segments)
    padded = values_and_gradients(dirty, cot, segment_ids=ids[None], **options)
    for name in ("o", *ARRAYS[:5]):
        assert not np.any(padded[name][:, padding]), name
    compact = {name: x[:, real] if name in ARRAYS[:5] else x for name, x in inputs.items()}
    expected = values_and_gradients(
        compact, (cot[0][:, real], cot[1]), segment_ids=ids[None, real], **options | {"implementation": FLOAT64}
    )
    kept = {name: x[:, real] if name in ("o", *ARRAYS[:5]) else x for name, x in padded.items()}
    testing.assert_close(kept, expected, FLOAT32)


@every_implementation
def test_rows_are_independent(implementation):
    """Rows with other documents, one of them only padding."""
    lengths = ((40, 20, 10), (5, 0, 60), (0, 0, 0))
    ids = np.stack([np.pad(testing.packed_segment_ids(n), (0, 70 - sum(n)), constant_values=-1) for n in lengths])
    inputs = make_inputs(5, B=3, T=70, H=2, K=16, V=8, num_segments=3)
    options = dict(segment_ids=ids, num_segments=3)
    cot = cotangents(inputs)
    result = values_and_gradients(inputs, cot, implementation=implementation, **options)
    testing.assert_close(result, values_and_gradients(inputs, cot, implementation=FLOAT64, **options), FLOAT32)
    np.testing.assert_array_equal(result["state"][2], inputs["initial_state"][2])
    assert not np.any(result["o"][2])


def test_t19_convolution_weights_of_packed_rows():
    """fla#955: the gradient of two packed rows is that of their documents alone."""
    rng = np.random.default_rng(6)
    x, dy = (jnp.asarray(rng.standard_normal((2, 40, 2, 8)), jnp.float32) for _ in range(2))
    weight = jnp.asarray(rng.standard_normal((4, 2, 8)), jnp.float32)
    lengths = ((25, 15), (3, 37))
    ids = jnp.stack([jnp.asarray(testing.packed_segment_ids(n)) for n in lengths])
    gradient = jax.grad(lambda w, x, ids, dy: jnp.sum(short_conv(x, w, ids) * dy))
    alone = [
        gradient(weight, x[row : row + 1, part], None, dy[row : row + 1, part])
        for row, (first, _) in enumerate(lengths)
        for part in (slice(0, first), slice(first, 40))
    ]
    testing.assert_close({"weight": gradient(weight, x, ids, dy)}, {"weight": sum(alone)}, 1e-5)
    assert testing.relative_error(gradient(weight, x, None, dy), sum(alone)) > 1e-2
