"""What is particular to the TPU kernels of KDA: their memory, their grid, real widths. The rest is in test_kda.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from kda_cases import ARRAYS, FLOAT64, INTERPRETED, cotangents, make_inputs, values, values_and_gradients
from test_kda import BFLOAT16, FLOAT32, check_equal
from test_kda_decode import INDEX
from test_kda_decode import make as make_decode

from pallas_kernels import testing
from pallas_kernels.kda import Records, kda, mosaic_tpu, mosaic_tpu_backward, mosaic_tpu_decode, mosaic_tpu_forward
from pallas_kernels.kda.mosaic_tpu import grid_steps, head_groups, kda_mosaic_tpu

IDS = np.r_[[0] * 20, [1] * 3, [-1] * 4, [2], [3] * 20, [-1] * 2, [5] * 10, [-1] * 6][None].astype(np.int32)
# Memory starts as NaN, transfers happen when they are waited for, and a race raises.
SIMULATED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", dma_execution_mode="on_wait")


def test_t11_real_widths_with_a_partial_chunk_in_bfloat16():
    inputs = make_inputs(1, B=1, T=66, H=2, K=128, V=128, dtype=jnp.bfloat16)
    check_equal(inputs, INTERPRETED, bars=BFLOAT16, exact=True)


def test_t12_widths_that_are_no_multiple_of_64():
    inputs = make_inputs(8, B=1, T=65, H=2, K=120, V=100)
    result = values(inputs, implementation=INTERPRETED, exact=True)
    testing.assert_close(result, values(inputs, implementation=FLOAT64), FLOAT32)


def plain_load(ref, j):
    return tuple(ref[0, :, 2 * j + n, :].astype(jnp.float32) for n in range(2))


def plain_store(ref, j, pair, *, add):
    if add is not None:
        pair = tuple(x + jnp.where(add, old, 0.0) for x, old in zip(pair, plain_load(ref, j)))
    for n, x in enumerate(pair):
        ref[0, :, 2 * j + n, :] = x.astype(ref.dtype)


def test_memory_of_the_kernels_is_clean(monkeypatch):
    """Two groups of heads and packed documents, in a simulation of the memory: no race, no read of what is not there,
    and every output written. The simulation knows no reshaped references, so pairs of heads are indexed plainly."""
    for module in (mosaic_tpu_forward, mosaic_tpu_backward):
        monkeypatch.setattr(module, "load_pair", plain_load)
        monkeypatch.setattr(module, "store_pair", plain_store)
    monkeypatch.setattr(mosaic_tpu, "head_groups", lambda H: (2, H))
    inputs = make_inputs(2, B=1, T=66, H=4, K=64, V=64, num_segments=7)
    cot = cotangents(inputs)

    def run(inputs, cot):
        static = dict(lower_bound=-5.0, num_segments=7, chunk_size=32, interpret=SIMULATED)
        call = lambda inputs: kda_mosaic_tpu(*(inputs[n] for n in ARRAYS), jnp.asarray(IDS), **static)  # noqa: E731
        (o, state), pull = jax.vjp(call, inputs)
        return {"o": o, "state": state} | pull(cot)[0]

    options = dict(implementation=FLOAT64, segment_ids=jnp.asarray(IDS), num_segments=7)
    expected = values_and_gradients(inputs, cot, **options)
    testing.assert_close(jax.jit(run)(inputs, cot), expected, {"default": 5e-5, "A_log": 5e-4})


@pytest.mark.parametrize("operation", ("decode", "verify", "commit"))
def test_memory_of_decoding_is_clean(operation, monkeypatch):
    """Rows of padding between live ones, two groups of heads."""
    monkeypatch.setattr(mosaic_tpu_decode, "_heads", lambda H: 1)
    x, parameters, pool = make_decode(0, 1 if operation == "decode" else 2)

    def run(how):
        if operation != "commit":
            step = getattr(mosaic_tpu_decode, operation)
            return step(x, parameters, pool, INDEX, lower_bound=-5.0, interpret=how)
        records = Records(x[0], -jnp.abs(x[1]), x[2], tuple(x[:3]))
        accepted = np.array([2, 0, 1, 1, 2], np.int32)
        return mosaic_tpu_decode.commit(pool, jnp.asarray(INDEX), records, jnp.asarray(accepted), interpret=how)

    simulated, plain = (jax.jit(lambda how=how: run(how))() for how in (SIMULATED, True))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6, equal_nan=False), simulated, plain)


def test_t13_value_heads_that_share_keys_are_refused():
    """Grouped heads are the caller's to repeat: v of 2 H heads beside q of H is an error that names both."""
    q, v = jnp.ones((1, 8, 2, 64)), jnp.ones((1, 8, 4, 64))
    with pytest.raises(ValueError, match=r"v has shape \(1, 8, 4, 64\); with q of shape \(1, 8, 2, 64\)"):
        kda(q, q, v, q, q[..., 0], A_log=jnp.ones(2), dt_bias=jnp.ones((2, 64)))


def test_t26_more_elements_than_32_bits_count():
    """Blocks are addressed by chunk, so that 2^31 elements and more need no 64-bit index."""
    wide, narrow = jax.ShapeDtypeStruct((1, 2**24, 2, 128), jnp.bfloat16), jax.ShapeDtypeStruct((2, 128), jnp.float32)
    beta, A_log = jax.ShapeDtypeStruct(wide.shape[:3], jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.float32)
    static = dict(lower_bound=-5.0, num_segments=None, chunk_size=64, interpret=True)
    run = lambda *x: kda_mosaic_tpu(*x, None, None, **static)  # noqa: E731
    assert jax.eval_shape(run, *[wide] * 4, beta, A_log, narrow)[0].shape == wide.shape


def test_t27_states_at_chunk_starts_count_by_document():
    """Two documents of 20 tokens in chunks of 16 start in three chunks, and take two steps each."""
    ids = jnp.asarray(testing.packed_segment_ids((20, 20))[None])
    steps = grid_steps(ids, ids.shape, 16, 2)
    used = np.asarray(steps.documents[0, :, 1]).any(axis=1)
    taken = list(zip(np.asarray(steps.slot[0])[used].tolist(), np.asarray(steps.chunk[0])[used].tolist()))
    assert taken == [(0, 0), (0, 1), (1, 1), (1, 2)]


@pytest.mark.parametrize("implementation", ("chunked", INTERPRETED))
def test_t29_replay_from_a_chunk_boundary_is_equal_bit_for_bit(implementation):
    inputs = make_inputs(9, B=1, T=100, H=2, K=16, V=8)
    part = lambda span: {n: x[:, span] if n in ARRAYS[:5] else x for n, x in inputs.items()}  # noqa: E731
    options = dict(implementation=implementation) | ({} if implementation == INTERPRETED else {"chunk_size": 64})
    whole = values(inputs, **options)
    first = values(part(slice(0, 64)), **options)
    second = values(part(slice(64, 100)) | {"initial_state": first["state"]}, **options)
    np.testing.assert_array_equal(np.concatenate([first["o"], second["o"]], 1), whole["o"])
    np.testing.assert_array_equal(second["state"], whole["state"])


def test_t16_every_document_gets_its_steps_once():
    steps = grid_steps(jnp.asarray(IDS), IDS.shape, 16, 7)
    used = np.asarray(steps.documents[0, :, 1])
    assert used.sum() == (IDS >= 0).sum()
    assert set(np.asarray(steps.slot[0])) == set(range(7))
    assert (np.diff(steps.chunk[0]) >= 0).all() and (np.diff(steps.slot[0]) >= 0).all()


@pytest.mark.parametrize("heads, want", [(1, (2, 2)), (12, (16, 16)), (20, (8, 24)), (32, (16, 32)), (96, (16, 96))])
def test_heads_are_grouped_and_padded(heads, want):
    assert head_groups(heads) == want
