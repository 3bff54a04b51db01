"""The fused TPU kernels of KDA in interpret mode, against the token recurrence in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda.mosaic_tpu import grid_steps, head_groups, kda_mosaic_tpu
from pallas_kernels.kda.reference import kda_reference

NAMES = ("q", "k", "v", "gate", "beta", "A_log", "dt_bias", "initial_state")
# Interpreted kernels are long programs that run once: compile them with little optimization. Excess precision would let
# XLA widen a bfloat16 array that the interpreted kernel then reads as pairs of bits.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_allow_excess_precision": False,
}
BARS = {jnp.float32: dict.fromkeys(("o", "state", *NAMES), 5e-5)}
BARS[jnp.bfloat16] = dict.fromkeys(NAMES, 1e-2) | dict(o=5e-3, state=5e-3, gate=2e-2, A_log=2e-2, dt_bias=2e-2)


def make(seed, shape=(1, 66, 2, 64, 64), *, dtype=jnp.float32, keys="random", gate=None, beta=None, documents=None):
    """Raw inputs in the order of NAMES; q, k, v, gate and beta are exact in `dtype`."""
    B, T, H, K, V = shape
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((B, T, H, K))
    shared = rng.standard_normal((B, 1, H, K))
    k = {"random": k, "cosine 0.9": k + 3 * shared, "identical": shared + 0 * k}[keys]
    x = 3 * rng.standard_normal(k.shape) if gate is None else np.full(k.shape, gate)
    logits = rng.standard_normal((B, T, H)) if beta is None else np.full((B, T, H), beta)
    tokens = (rng.standard_normal(k.shape), k, rng.standard_normal((B, T, H, V)), x, logits)
    slots = () if documents is None else (documents,)
    rest = (
        0.3 * rng.standard_normal(H),
        0.3 * rng.standard_normal((H, K)),
        rng.standard_normal((B, *slots, H, K, V)),
    )
    return [jnp.asarray(a, dtype) for a in tokens] + [jnp.asarray(a, jnp.float32) for a in rest]


def kernel(arguments, ids=None, *, lower_bound=-5.0, documents=None, chunk_size=64):
    static = dict(lower_bound=lower_bound, num_segments=documents, chunk_size=chunk_size, interpret=True)
    return kda_mosaic_tpu(*arguments, ids, **static)


def recurrence(arguments, ids=None, *, lower_bound=-5.0, documents=None, chunk_size=64):
    arguments = [a.astype(jnp.float32) for a in arguments]
    return kda_reference(*arguments, ids, lower_bound=lower_bound, num_segments=documents, chunk_size=chunk_size)


def quick(run, ids=None, **static):
    return jax.jit(lambda *a: run(a, ids, **static), compiler_options=QUICK)


def relative(got, want):
    got, want = (np.asarray(x, np.float64) for x in (got.astype(jnp.float32), want))
    assert np.isfinite(got).all()
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-20)


def check(arguments, ids=None, **static):
    bars = BARS[jnp.bfloat16 if arguments[0].dtype == jnp.bfloat16 else jnp.float32]
    got, want = quick(kernel, ids, **static)(*arguments), recurrence(arguments, ids, **static)
    for name, a, b in zip(("o", "state"), got, want):
        assert relative(a, b) < bars[name], (name, relative(a, b))
    return got


def check_gradients(arguments, ids=None, *, skip=(), **static):
    dtype = jnp.bfloat16 if arguments[0].dtype == jnp.bfloat16 else jnp.float32
    o, state = recurrence(arguments, ids, **static)
    rng = np.random.default_rng(7)
    do = jnp.asarray(rng.standard_normal(o.shape), dtype).astype(jnp.float32)
    dstate = jnp.asarray(rng.standard_normal(state.shape), jnp.float32)

    def loss(run):
        def scalar(*a, do, dstate):
            o, state = run(list(a), ids, **static)
            return jnp.sum(o.astype(jnp.float32) * do) + jnp.sum(state * dstate)

        return jax.jit(jax.grad(scalar, tuple(range(len(NAMES)))), compiler_options=QUICK)

    got, want = (loss(run)(*arguments, do=do, dstate=dstate) for run in (kernel, recurrence))
    for name, a, b in zip(NAMES, got, want):
        if name not in skip:
            assert relative(a, b) < BARS[dtype][name], (name, relative(a, b))
    return dict(zip(NAMES, got))


IDS = np.r_[[0] * 20, [1] * 3, [-1] * 4, [2], [3] * 20, [-1] * 2, [5] * 10, [-1] * 6][None].astype(np.int32)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_values_and_gradients_float32(lower_bound):
    check_gradients(make(0), lower_bound=lower_bound)


def test_t11_values_and_gradients_bfloat16_with_a_partial_chunk():
    arguments = make(1, (1, 66, 2, 128, 128), dtype=jnp.bfloat16)
    check(arguments)
    check_gradients(arguments)


@pytest.mark.parametrize("keys", ["cosine 0.9", "identical"])
def test_t7_alike_keys_without_decay(keys):
    check(make(2, dtype=jnp.bfloat16, keys=keys, gate=-60.0, beta=20.0 if keys == "identical" else None))


@pytest.mark.parametrize("gate", [-200.0, 0.0, 9.0])
def test_t1_t6_constant_gates(gate):
    check(make(3, gate=gate))


def test_t2_t4_unbounded_decays_down_to_minus_1000():
    arguments = make(4)
    arguments[3] = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.3, arguments[3].shape), 1000.0, -30.0)
    check(arguments, lower_bound=None)
    # Gates at 0 or -1000 have no gradient to compare: the true one is below 1e-12, which rounding of sums exceeds.
    check_gradients(arguments, lower_bound=None, skip=("gate", "A_log", "dt_bias"))


@pytest.mark.parametrize("documents", [None, 7])
def test_t15_t16_packed_documents_and_padding(documents):
    arguments = make(5, documents=documents)
    o, _ = check(arguments, jnp.asarray(IDS), documents=documents)
    assert not np.asarray(o)[IDS < 0].any()
    gradients = check_gradients(arguments, jnp.asarray(IDS), documents=documents)
    for name in ("q", "k", "v", "gate", "beta"):
        assert not np.asarray(gradients[name])[IDS < 0].any(), name


def test_t14_empty_documents_hand_their_state_on():
    arguments = make(6, documents=7)
    _, state = quick(kernel, jnp.asarray(IDS), documents=7)(*arguments)
    np.testing.assert_array_equal(state[:, [4, 6]], arguments[7][:, [4, 6]])


def test_t9_later_tokens_change_no_bit_of_earlier_outputs():
    arguments = make(7, dtype=jnp.bfloat16)
    changed = [a.at[:, 37:].multiply(-2) for a in arguments[:5]] + arguments[5:]
    run = quick(kernel)
    a, b = run(*arguments)[0], run(*changed)[0]
    np.testing.assert_array_equal(a[:, :37], b[:, :37])
    assert (np.asarray(a[:, 37:]) != np.asarray(b[:, 37:])).any()


@pytest.mark.parametrize("shape", [(2, 1, 3, 64, 64), (1, 63, 1, 60, 128), (1, 65, 2, 192, 100)])
def test_t10_t12_t30_lengths_widths_and_head_counts(shape):
    check(make(8, shape))


def test_t20_chunks_of_32_agree():
    check(make(9), chunk_size=32)


def test_every_document_gets_its_steps_once():
    steps = grid_steps(jnp.asarray(IDS), IDS.shape, 16, 7)
    used = np.asarray(steps.documents[0, :, 1])
    assert used.sum() == (IDS >= 0).sum()
    assert set(np.asarray(steps.slot[0])) == set(range(7))
    assert (np.diff(steps.chunk[0]) >= 0).all() and (np.diff(steps.slot[0]) >= 0).all()


@pytest.mark.parametrize("heads, want", [(1, (2, 2)), (12, (12, 12)), (20, (8, 24)), (32, (16, 32)), (96, (16, 96))])
def test_heads_are_grouped_and_padded(heads, want):
    assert head_groups(heads) == want
