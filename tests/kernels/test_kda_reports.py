"""Conditions of public fault reports that are about a part of KDA, about much of it, or about what a caller does: the
inverse of alike keys, a million tokens, heads that share keys or lie on other devices; and what the usual faults give.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_cases import ARRAYS, FLOAT64, cotangents, make_inputs, values, values_and_gradients

from pallas_kernels import testing
from pallas_kernels.kda import chunked, inputs, intra_chunk, kda, mosaic_tpu_math
from pallas_kernels.kda.reference import delta_step
from pallas_kernels.kda.slots import ChunkDocuments

FLOAT32 = 5e-5
C = 64


def system(keys, beta):
    """Strictly lower triangular beta_i <k_i, k_j> of one chunk without decay, float64."""
    k = testing.raw_keys(keys, (1, C, 1, C), np.random.default_rng(0))[0, :, 0]
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    return np.tril(beta * k @ k.T, -1)


def by_doubling(L):
    """(I - L)(I + L^2)(I + L^4) ... up to the whole chunk."""
    X, square = np.eye(C, dtype=L.dtype) - L, L @ L
    while np.any(square):
        X, square = X + X @ square, square @ square
    return X


def of_the_kernel(dtype, L):
    plan = mosaic_tpu_math.Plan(2, C, C, C, dtype, -5.0, False, False)
    steps = mosaic_tpu_math.unit_lower_inverse(plan, jnp.concatenate([L, L], 1))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value[:, :C]


@pytest.mark.parametrize(
    "inverse, bar",
    (
        (intra_chunk.unit_lower_inverse, 1e-5),
        (functools.partial(of_the_kernel, jnp.float32), 1e-5),
        (functools.partial(of_the_kernel, jnp.bfloat16), 1e-4),
    ),
    ids=("chunked", "kernel, float32", "kernel, bfloat16"),
)
def test_t7_the_inverse_of_alike_keys(inverse, bar):
    """sglang-jax#1554: keys of cosine 0.9 are an ordinary situation; powers of the whole chunk are useless there."""
    run = jax.jit(inverse)
    for keys, beta in (("random", 1.0), ("cosine 0.9", 0.5), ("cosine 0.9", 1.0), ("identical", 1.0)):
        L = system(keys, beta)
        expected = np.linalg.inv(np.eye(C) + L)
        assert testing.relative_error(run(jnp.asarray(L, jnp.float32)), expected) < bar, (keys, beta)
        if keys != "random":
            assert not testing.relative_error(by_doubling(L.astype(np.float32)), expected) < 1e-2


def test_t30_a_beta_of_two():
    """Out of reach of a sigmoid, and exact all the same in a chunk that is given it: reflections along keys."""
    x = make_inputs(0, B=1, T=C, H=2, K=16, V=8)
    prepared = inputs.prepare(*(x[n] for n in ARRAYS[:7]), lower_bound=-5.0)
    prepared = prepared._replace(beta=jnp.full_like(prepared.beta, 2.0))
    state = x["initial_state"]
    static = dict(lower_bound=-5.0, by_document=False)

    @jax.jit
    def both(tokens):
        by_token = jax.tree.map(lambda a: a.swapaxes(0, 1), tokens)
        _, outputs = jax.lax.scan(lambda S, token: delta_step(S, *token)[::-1], state, by_token)
        heads_first = jax.tree.map(lambda a: a.swapaxes(1, 2), tokens)
        o, _, _ = chunked._chunk_fwd(heads_first, state[:, None], ChunkDocuments(), static)
        return o.swapaxes(1, 2), outputs.swapaxes(0, 1)

    assert testing.relative_error(*both(prepared)) < FLOAT32


def test_t30_no_logit_gives_a_beta_above_one():
    beta = inputs.sigmoid(jnp.asarray([-1e30, -200.0, 0.0, 200.0, 1e30]))
    np.testing.assert_array_equal(beta, [0, 0, 0.5, 1, 1])


@pytest.mark.parametrize("lower_bound", (-5.0, None))
def test_t3_no_gate_gives_a_positive_log_decay(lower_bound):
    gate = jnp.asarray([-1e30, -200.0, -1.0, 0.0, 1.0, 200.0, 1e30])[:, None, None]
    g = inputs.log_decay(gate, jnp.asarray([3.0]), jnp.zeros((1, 1)), lower_bound)
    assert np.all(np.isfinite(g)) and np.all(g <= 0)


def test_t1_a_factor_beyond_its_range_is_seen(monkeypatch):
    """attention-gym#394: one product per block for a bound that does not allow it."""
    monkeypatch.setattr(intra_chunk, "SAFE_LOWER_BOUND", -100.0)
    x = make_inputs(6, B=1, T=32, H=2, K=16, V=8, gates="bound")
    rest = dict(A_log=x["A_log"], dt_bias=x["dt_bias"], lower_bound=-20.0, implementation="chunked")
    o, _ = jax.jit(lambda x: kda(*(x[n] for n in ARRAYS[:5]), **rest))(x)
    assert not np.all(np.isfinite(o))


def test_t5_a_mask_behind_the_exponential_would_give_nan():
    """transformers#48455: what the grid of gates at their bound would see."""
    G = jnp.cumsum(jnp.full(C, -4.99))
    late = jax.grad(lambda G: jnp.sum(jnp.where(np.tri(C, dtype=bool), jnp.exp(G[:, None] - G), 0)))(G)
    assert np.any(np.isnan(late))


def test_t13_heads_that_share_keys_are_repeated_by_the_caller():
    """fla#624: two heads of values on one of queries and keys, whose gradients are sums in float32."""
    x = make_inputs(3, B=1, T=70, H=2, K=16, V=8)
    one = x | {n: x[n][:, :, :1] for n in ("q", "k")}
    repeated = one | {n: jnp.repeat(one[n], 2, axis=2) for n in ("q", "k")}
    cot = cotangents(x)
    result, expected = (values_and_gradients(repeated, cot, implementation=i) for i in ("chunked", FLOAT64))
    for name in ("q", "k"):
        _, pull = jax.vjp(lambda a: jnp.repeat(a, 2, axis=2), one[name])
        shared = pull(jnp.asarray(result[name], jnp.float32))[0]
        total = np.asarray(expected[name]).sum(axis=2, keepdims=True)
        assert testing.relative_error(shared, total) < FLOAT32
        assert testing.relative_error(result[name][:, :, :1], total) > 1e-2


def test_t24_heads_apart_equal_heads_together():
    """As tensor parallelism cuts them, parameters included."""
    x = make_inputs(4, B=1, T=70, H=2, K=16, V=8)
    cot = cotangents(x)
    axis = dict.fromkeys((*ARRAYS[:5], "o"), 2) | {"A_log": 0, "dt_bias": 0, "initial_state": 1, "state": 1}
    whole = values_and_gradients(x, cot, implementation="chunked")
    head = lambda n: {name: jax.lax.slice_in_dim(a, n, n + 1, axis=axis[name]) for name, a in x.items()}  # noqa: E731
    parts = [
        values_and_gradients(head(n), (cot[0][:, :, n : n + 1], cot[1][:, n : n + 1]), implementation="chunked")
        for n in range(2)
    ]
    joined = {name: np.concatenate([part[name] for part in parts], axis[name]) for name in whole}
    testing.assert_close(joined, whole, 1e-6)


def test_t30_a_million_tokens():
    """In one call as in two, bit for bit, and the end is that of the recurrence over what decay leaves of the rest."""
    T, last = 2**20, 2000
    rng = np.random.default_rng(5)
    x = {n: jnp.asarray(rng.standard_normal((1, T, 1, 8)), jnp.float32) for n in ("q", "k", "v")}
    x |= {"gate": jnp.full((1, T, 1, 8), -4.0), "beta": jnp.zeros((1, T, 1))}
    x |= {"A_log": jnp.zeros(1), "dt_bias": jnp.zeros((1, 8)), "initial_state": jnp.zeros((1, 1, 8, 8))}
    part = lambda span: {n: a[:, span] if n in ARRAYS[:5] else a for n, a in x.items()}  # noqa: E731
    options = dict(implementation="chunked", chunk_size=32)
    whole = values(x, **options)
    half = values(part(slice(0, T // 2)), **options)
    rest = values(part(slice(T // 2, T)) | {"initial_state": half["state"]}, **options)
    np.testing.assert_array_equal(rest["state"], whole["state"])
    np.testing.assert_array_equal(rest["o"], whole["o"][:, T // 2 :])
    expected = values(part(slice(T - last, T)), implementation=FLOAT64)
    assert testing.relative_error(whole["state"], expected["state"]) < FLOAT32
    assert testing.relative_error(whole["o"][:, -100:], expected["o"][:, -100:]) < FLOAT32
