"""Decoding on a pool of states: steps, verification and commits, XLA and the interpreted TPU kernels in one body."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_cases import FLOAT64, QUICK, values

from pallas_kernels import testing
from pallas_kernels.kda import Pool, Records, decode, kda_commit, kda_decode, kda_verify
from pallas_kernels.kda import mosaic_tpu_decode as kernels
from pallas_kernels.kda.reference import delta_step

P, N, H, K, J, M = 6, 5, 2, 128, 4, 3
INDEX = np.array([-1, 4, -1, 1, 3], np.int32)
LIVE = INDEX >= 0
IMPLEMENTATIONS = {
    "xla": (decode._decode_xla, decode._verify_xla, decode._commit_xla),
    "mosaic_tpu interpreted": [
        functools.partial(f, interpret=True) for f in (kernels.decode, kernels.verify, kernels.commit)
    ],
}
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def make(seed, tokens, dtype=jnp.float32):
    """(tokens q, k, v, gate, beta [N, tokens, ...], parameters A_log, dt_bias and three convolutions, pool)."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    x = [normal(N, tokens, H, K).astype(dtype) for _ in range(4)] + [normal(N, tokens, H).astype(dtype)]
    parameters = 0.3 * normal(H), normal(H, K) - 2, *(normal(J, H, K) for _ in range(3))
    pool = Pool(normal(P, H, K, K), tuple(normal(P, J - 1, H, K).astype(dtype) for _ in range(3)))
    return x, parameters, pool


@functools.cache
def jitted(implementation, which):
    run = IMPLEMENTATIONS[implementation][which]
    static = {} if which == 2 else {"lower_bound": -5.0}
    return jax.jit(lambda *x: run(*x, **static), compiler_options=QUICK)


def by_steps(implementation, x, parameters, pool, steps):
    """Outputs of the first steps, and the pool after them."""
    outputs = []
    for t in range(steps):
        o, pool = jitted(implementation, 0)([a[:, t : t + 1] for a in x], parameters, pool, INDEX)
        outputs.append(o)
    return outputs, pool


def by_sequence(x, parameters, pool):
    """The same from the recurrence over whole sequences in float64, after convolutions written out once more."""
    A_log, dt_bias, *weights = parameters
    convolved = []
    for a, history, w in zip(x, pool.conv, weights):
        padded = np.concatenate([np.asarray(history[np.maximum(INDEX, 0)]), np.asarray(a)], 1).astype(np.float64)
        total = sum(np.asarray(w[j], np.float64) * padded[:, j : j + a.shape[1]] for j in range(J))
        convolved.append(total / (1 + np.exp(-total)))
    names = ("q", "k", "v", "gate", "beta", "A_log", "dt_bias", "initial_state")
    state = pool.state[np.maximum(INDEX, 0)]
    return values(dict(zip(names, (*convolved, *x[3:], A_log, dt_bias, state))), implementation=FLOAT64)


@every_implementation
def test_t21_steps_equal_the_sequence_and_touch_nothing_else(implementation):
    """Rows of negative index write no slot, least of all the last one, and give zeros."""
    x, parameters, pool = make(0, M)
    outputs, new = by_steps(implementation, x, parameters, pool, M)
    expected, o = by_sequence(x, parameters, pool), np.concatenate(outputs, 1)
    actual = {"o": o[LIVE], "state": new.state[INDEX[LIVE]]}
    testing.assert_close(actual, {name: expected[name][LIVE] for name in actual}, 2e-6)
    assert not np.any(o[~LIVE])
    untouched = np.setdiff1d(np.arange(P), INDEX[LIVE])
    for before, after in zip(jax.tree.leaves(pool), jax.tree.leaves(new)):
        np.testing.assert_array_equal(before[untouched], after[untouched])
    for a, history in zip(x, new.conv):
        np.testing.assert_array_equal(history[INDEX[LIVE]], a[LIVE, M - J + 1 :])


@every_implementation
def test_padding_alone_changes_nothing(implementation):
    x, parameters, pool = make(1, 1)
    o, new = jitted(implementation, 0)(x, parameters, pool, np.full(N, -1, np.int32))
    assert not np.any(o)
    jax.tree.map(np.testing.assert_array_equal, pool, new)


@every_implementation
def test_t25_verified_prefixes_of_every_length(implementation):
    """Whatever part of a draft is kept, the pool is as after that many single steps."""
    x, parameters, pool = make(2, M)
    o, *records = jitted(implementation, 1)(x, parameters, pool, INDEX)
    outputs, _ = by_steps(implementation, x, parameters, pool, M)
    testing.assert_close({"o": o}, {"o": np.concatenate(outputs, 1)}, 1e-6)
    records = Records(*records, tuple(x[:3]))
    for kept in range(M + 1):
        new = jitted(implementation, 2)(pool, INDEX, records, np.full(N, kept, np.int32))
        _, expected = by_steps(implementation, x, parameters, pool, kept)
        testing.assert_close({"state": new.state}, {"state": expected.state}, 1e-6 if kept else 0)
        jax.tree.map(np.testing.assert_array_equal, new.conv, expected.conv)
    mixed = np.array([1, 0, 1, 2, 3], np.int32)
    new = jitted(implementation, 2)(pool, INDEX, records, mixed)
    for row in np.flatnonzero(LIVE):
        _, expected = by_steps(implementation, x, parameters, pool, mixed[row])
        assert testing.relative_error(new.state[INDEX[row]], expected.state[INDEX[row]]) < 1e-6
        _, longer = by_steps(implementation, x, parameters, pool, (mixed[row] + 1) % (M + 1))
        assert testing.relative_error(new.state[INDEX[row]], longer.state[INDEX[row]]) > 1e-2


@every_implementation
def test_t22_bfloat16_inputs_round_outputs_only(implementation):
    """Gates, beta and states are float32; a beta that is rounded is seen."""
    x, parameters, pool = make(3, 1, jnp.bfloat16)
    o, new = jitted(implementation, 0)(x, parameters, pool, INDEX)
    assert o.dtype == jnp.bfloat16 and new.state.dtype == jnp.float32 and new.conv[0].dtype == jnp.bfloat16
    wide = [a.astype(jnp.float32) for a in x]
    expected, same = jitted("xla", 0)(
        wide, parameters, pool._replace(conv=tuple(h.astype(jnp.float32) for h in pool.conv)), INDEX
    )
    assert testing.relative_error(o, expected) < 5e-3
    assert testing.relative_error(new.state[INDEX[LIVE]], same.state[INDEX[LIVE]]) < 5e-3


def test_t22_states_stay_exact_over_thousands_of_steps():
    """For the recurrence that every implementation of decoding shares."""
    rng = np.random.default_rng(4)
    steps, width = 4000, 16
    x = [rng.standard_normal((steps, width)) for _ in range(3)] + [np.full((steps, width), -3e-3)]
    x.append(1 / (1 + np.exp(-rng.standard_normal(steps))))
    x[1] /= np.linalg.norm(x[1], axis=1, keepdims=True)

    def final(dtype, beta_dtype):
        q, k, v, g, beta = (jnp.asarray(a, dtype) for a in x)
        beta = beta.astype(beta_dtype).astype(dtype)
        step = lambda S, x: (delta_step(S, *x)[1], None)  # noqa: E731
        return jax.lax.scan(step, jnp.zeros((width, width), dtype), (q, k, v, g, beta))[0]

    with jax.enable_x64(True):
        expected = final(jnp.float64, jnp.float64)
    assert testing.relative_error(final(jnp.float32, jnp.float32), expected) < 1e-5
    assert testing.relative_error(final(jnp.float32, jnp.bfloat16), expected) > 1e-4


def public(**changes):
    x, parameters, pool = make(5, 1)
    arrays = dict(zip(("q", "k", "v", "gate", "beta"), (a[:, 0] for a in x)), pool=pool, index=INDEX) | changes
    implementation = arrays.pop("implementation", None)
    rest = dict(A_log=parameters[0], dt_bias=parameters[1], conv_weights=parameters[2:])
    return kda_decode(*arrays.values(), **rest, implementation=implementation)


def test_public_functions_on_this_machine():
    x, parameters, pool = make(6, M)
    rest = dict(A_log=parameters[0], dt_bias=parameters[1], conv_weights=parameters[2:])
    o, records = kda_verify(*x, pool, INDEX, **rest)
    new = kda_commit(pool, INDEX, records, np.ones(N, np.int32))
    first, expected = kda_decode(*(a[:, 0] for a in x), pool, INDEX, **rest)
    assert testing.relative_error(o[:, 0], first) < 1e-6
    assert testing.relative_error(new.state, expected.state) < 1e-6
    with pytest.raises(ValueError, match="accepted must be at least 0 and at most 3, got values from 4 to 4"):
        kda_commit(pool, INDEX, records, np.full(N, 4, np.int32))


@pytest.mark.parametrize(
    "changes, error, message",
    (
        ({"index": np.full(N, 6, np.int32)}, ValueError, "index must be at most 5, got values from 6 to 6"),
        ({"index": np.array([0, 1, 1, 2, 3])}, ValueError, "index names slot 1 twice"),
        ({"index": np.zeros(N)}, TypeError, "index must be integers, got float64"),
        ({"k": jnp.ones((N, H, 64))}, ValueError, r"k has shape \(5, 1, 2, 64\)"),
        ({"q": jnp.ones((N, H, K), jnp.float16)}, TypeError, "q is float16"),
        ({"implementation": "fast"}, ValueError, "implementation must be one of"),
        (
            {"implementation": "mosaic_tpu"},
            NotImplementedError,
            "runs on TPU, and this program is being lowered for cpu",
        ),
    ),
)
def test_refuses(changes, error, message):
    with pytest.raises(error, match=message):
        public(**changes)


def test_a_state_of_another_dtype_is_refused():
    pool = make(5, 1)[2]
    with pytest.raises(TypeError, match="initial_state must be float32"):
        public(pool=pool._replace(state=pool.state.astype(jnp.bfloat16)))


def test_rows_of_padding_take_the_block_of_a_live_row():
    slot, live = kernels.blocks_of(jnp.asarray([-1, -1, 4, -1, 2, -1]))
    np.testing.assert_array_equal(slot, [4, 4, 4, 4, 2, 2])
    np.testing.assert_array_equal(live, [0, 0, 1, 0, 1, 0])
    np.testing.assert_array_equal(kernels.blocks_of(jnp.asarray([-1, -3]))[0], [0, 0])
