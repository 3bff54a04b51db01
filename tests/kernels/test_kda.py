"""One body of tests for every implementation of KDA, against goldens and against the token recurrence in float64.

Cases follow public reports of wrong delta-rule kernels, named where they are used.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_cases import (
    ARRAYS,
    FLOAT64,
    INTERPRETED,
    axes_of,
    cotangents,
    make_inputs,
    resize,
    sizes,
    values,
    values_and_gradients,
)

from pallas_kernels import testing
from pallas_kernels.kda import kda

IMPLEMENTATIONS = ("chunked", INTERPRETED)
BFLOAT16 = {"default": 1e-2, "o": 5e-3, "state": 5e-3, "gate": 2e-2, "A_log": 2e-2, "dt_bias": 2e-2}
# Identical keys that hardly decay, with beta spread over (0, 1): rows that nearly cancel are rounded apart in the
# backward (pallas_kernels/README.md has what it would cost to keep them together).
ILL_CONDITIONED = {"beta": 4e-2, "v": 1.5e-2}
FLOAT32 = 5e-5
SHAPE = dict(B=1, T=70, H=2, K=16, V=8)
WIDE = SHAPE | dict(K=64, V=64)  # for bfloat16, whose errors depend on the width
GOLDENS = (
    *("basic", "head128", "k_ne_v", "no_state", "odd_length", "one_token", "packed", "parallel_keys", "short"),
    *("softplus_gate", "strong_decay", "weak_decay"),
)

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def load_golden(path):
    """(inputs, cotangents, expected, options) of kda from a file of tests/goldens/ops."""
    file = np.load(path)
    inputs = {n.removeprefix("in_"): file[n] for n in file.files if n.startswith("in_")}
    inputs["beta"] = inputs.pop("beta_logit")
    inputs["dt_bias"] = inputs["dt_bias"].reshape(inputs["q"].shape[2:])
    expected = {"o": file["out_o"], "state": file["out_state"]}
    expected |= {
        n.removeprefix("grad_").replace("beta_logit", "beta"): file[n] for n in file.files if n.startswith("grad_")
    }
    expected["dt_bias"] = expected["dt_bias"].reshape(inputs["dt_bias"].shape)
    cot = file["cot_o"], file["cot_state"]
    options = {"lower_bound": float(file["lower_bound"]) if "lower_bound" in file.files else None}
    segment_ids = None
    if "cu_seqlens" in file.files:
        lengths = np.diff(file["cu_seqlens"])
        segment_ids = testing.packed_segment_ids(lengths)[None]
        options["num_segments"] = len(lengths)
        cot = cot[0], cot[1][None]
        for arrays, name in ((inputs, "initial_state"), (expected, "initial_state"), (expected, "state")):
            arrays[name] = arrays[name][None]
    return inputs, cot, expected, options, segment_ids


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("implementation", (FLOAT64, *IMPLEMENTATIONS))
def test_golden(goldens, name, implementation):
    inputs, cot, expected, options, segment_ids = load_golden(goldens / "ops" / f"kda_{name}.npz")
    if implementation != FLOAT64:
        inputs, cot = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (inputs, cot))
    if implementation == INTERPRETED:
        inputs, cot, expected = two_heads(inputs, cot, expected, options)
    result = values_and_gradients(inputs, cot, implementation=implementation, segment_ids=segment_ids, **options)
    float32 = {"parallel_keys": 1e-4, "strong_decay": 5e-5}.get(name, 2e-5)
    result = {name: result[name] for name in expected}
    testing.assert_close(result, expected, 1e-6 if implementation == FLOAT64 else float32)


def two_heads(inputs, cot, expected, options):
    """The first two heads, which are independent of others, and a state where there is none."""
    own = sizes(inputs, options.get("num_segments"))
    two = own | {"H": min(own["H"], 2)}
    cut = lambda x, name: resize(jnp.asarray(x), axes_of(name, own), two)  # noqa: E731
    inputs, expected = ({name: cut(x, name) for name, x in arrays.items()} for arrays in (inputs, expected))
    inputs.setdefault("initial_state", jnp.zeros(tuple(two[a] for a in axes_of("state", own)), jnp.float32))
    return inputs, tuple(cut(x, name) for x, name in zip(cot, ("o", "state"))), expected


@every_implementation
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
@pytest.mark.parametrize("gates", testing.GATES)
@pytest.mark.parametrize("keys", testing.KEYS)
def test_t5_t6_t7_t8_t30_grid(implementation, gates, keys, dtype):
    """Every kind of decays with every kind of keys, and each of both with every kind of beta (a Latin square).

    Parallel keys, weak decay and beta near one break inverses by powers (sglang-jax#1554); gates of exactly one
    (fla#389) and at the bound break factors of the decay (attention-gym#394, transformers#48455).
    """
    square = testing.GATES.index(gates) + testing.KEYS.index(keys)
    beta = testing.BETAS[square % len(testing.BETAS)]
    low = dtype == jnp.bfloat16
    inputs = make_inputs(0, **WIDE if low else SHAPE, gates=gates, keys=keys, beta=beta, dtype=dtype)
    bars = BFLOAT16 if low else FLOAT32
    if low and implementation == INTERPRETED and (keys, gates) == ("identical", "weak"):
        bars = BFLOAT16 | ILL_CONDITIONED
    check_equal(inputs, implementation, bars=bars)


@every_implementation
@pytest.mark.parametrize("length", testing.ODD_LENGTHS)
def test_t10_t30_every_length(implementation, length):
    """Also shorter than a chunk and with a partial last chunk, whose state must not decay further (cuLA#38)."""
    inputs = make_inputs(length, **SHAPE | {"T": length})
    options = exact(implementation) if length in (1, 64, 1000) else {}
    result = values(inputs, implementation=implementation, **options)
    testing.assert_close(result, values(inputs, implementation=FLOAT64), FLOAT32)


@pytest.mark.parametrize("chunk_size", (16, 64, 128))
def test_t20_chunk_size_changes_nothing(chunk_size):
    """fla#876."""
    check_equal(make_inputs(2, **SHAPE | {"T": 150}), "chunked", chunk_size=chunk_size)


@pytest.mark.parametrize("chunk_size", (32, 64))
def test_whole_chunks_without_documents(chunk_size):
    """The TPU kernels without any mask."""
    check_equal(make_inputs(2, **SHAPE | {"T": 128}), INTERPRETED, exact=True, chunk_size=chunk_size)


@every_implementation
def test_wide_heads(implementation):
    inputs = make_inputs(3, B=2, T=65, H=3, K=64, V=128)
    result = values(inputs, implementation=implementation, **exact(implementation))
    testing.assert_close(result, values(inputs, implementation=FLOAT64), FLOAT32)


@every_implementation
@pytest.mark.parametrize("decay", ("mixed -1000 and 0", "mixed -1000 and -0.01", "constant -20"))
def test_t2_t4_unbounded_decay(implementation, decay):
    """Kimi Linear's gate may pass any bound: finite and exact, with 0 beside -1000 (flashinfer#5032)."""
    inputs = make_inputs(4, **SHAPE) | {"A_log": jnp.zeros(2), "dt_bias": jnp.zeros((2, 16))}
    strong = np.random.default_rng(4).uniform(size=inputs["gate"].shape) < 0.1
    softplus_inverse = {-1000: 1000.0, 0: -200.0, -0.01: np.log(np.expm1(0.01)), -20: 20.0}
    low, high = {"mixed -1000 and 0": (-1000, 0), "mixed -1000 and -0.01": (-1000, -0.01), "constant -20": (-20, -20)}[
        decay
    ]
    gate = np.where(strong, softplus_inverse[low], softplus_inverse[high])
    check_equal(inputs | {"gate": jnp.asarray(gate, jnp.float32)}, implementation, lower_bound=None)


@every_implementation
@pytest.mark.parametrize("lower_bound", (-5.0, None))
def test_t23_saturated_gates_pass_no_gradient(implementation, lower_bound):
    """exp(A_log) overflows and meets a sigmoid or softplus of zero (fla#1007, lattice#314)."""
    inputs = make_inputs(5, **SHAPE)
    inputs |= {"A_log": jnp.full(2, 100.0), "gate": -200.0 + 0 * inputs["gate"]}
    result = values_and_gradients(inputs, cotangents(inputs), implementation=implementation, lower_bound=lower_bound)
    assert all(np.all(np.isfinite(x)) for x in result.values())
    assert not np.any(result["gate"])


@every_implementation
def test_t1_bounds_below_the_safe_one(implementation):
    """A bound of -20 lets a factor of the decay overflow within 16 tokens."""
    inputs = make_inputs(6, **SHAPE, gates="bound")
    result = values(inputs, implementation=implementation, lower_bound=-20.0)
    testing.assert_close(result, values(inputs, implementation=FLOAT64, lower_bound=-20.0), FLOAT32)


@pytest.mark.parametrize("implementation", ("chunked",))
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.float64))
def test_arithmetic_follows_the_inputs(implementation, dtype):
    """Also when 64 bits are enabled: constants must not widen float32."""
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x, dtype) for x in make_inputs(0, **SHAPE).values()]
        result = jax.eval_shape(lambda *x: call(implementation, *x), *arrays)
        gradients = jax.eval_shape(
            jax.grad(lambda *x: call(implementation, *x)[0].sum(), argnums=tuple(range(8))), *arrays
        )
    assert {x.dtype for x in (*result, *gradients)} == {jnp.dtype(dtype)}


@every_implementation
def test_bfloat16_in_bfloat16_out(implementation):
    inputs = make_inputs(7, **WIDE, dtype=jnp.bfloat16)
    result = check_equal(inputs, implementation, bars=BFLOAT16)
    assert result["o"].dtype == jnp.bfloat16 and result["state"].dtype == jnp.float32
    assert all(result[name].dtype == inputs[name].dtype for name in ARRAYS)


@every_implementation
@pytest.mark.parametrize(
    "lower_bound, dtype", ((-5.0, jnp.float32), (None, jnp.float32), (-5.0, jnp.bfloat16)), ids=str
)
def test_t9_outputs_do_not_depend_on_the_future(implementation, lower_bound, dtype):
    """Bit for bit, gates included (fla#1240), for a cut inside a block of a chunk; the same for gradients."""
    shape = WIDE if dtype == jnp.bfloat16 else SHAPE
    cut, inputs = 40, make_inputs(8, **shape, dtype=dtype)
    other = make_inputs(9, **shape, dtype=dtype)
    changed = {n: x.at[:, cut:].set(other[n][:, cut:]) for n, x in inputs.items() if n in ARRAYS[:5]}
    cot = cotangents(inputs)
    past = cot[0].at[:, cut:].set(0), 0 * cot[1]
    options = dict(implementation=implementation, lower_bound=lower_bound)
    before = values_and_gradients(inputs, past, **options)
    after = values_and_gradients(inputs | changed, past, **options)
    np.testing.assert_array_equal(before["o"][:, :cut], after["o"][:, :cut])
    assert np.any(before["o"][:, cut:] != after["o"][:, cut:])
    for name in ARRAYS[:5]:
        np.testing.assert_array_equal(before[name][:, :cut], after[name][:, :cut])
        assert not np.any(after[name][:, cut:])


@pytest.mark.parametrize("implementation", ("chunked",))
def test_no_loop_over_tokens(implementation):
    inputs = make_inputs(10, **SHAPE | {"T": 1000})
    run = lambda inputs, cot: values_and_gradients(inputs, cot, implementation=implementation)  # noqa: E731
    lengths = re.findall(r"length=(\d+)", str(jax.make_jaxpr(run)(inputs, cotangents(inputs))))
    assert set(lengths) == {"32"}


def call(implementation, *arrays):
    tokens, rest = arrays[:5], dict(zip(ARRAYS[5:], arrays[5:]))
    return kda(*tokens, **rest, implementation=implementation)


def exact(implementation):
    """Options that keep the sizes of the inputs."""
    return {"exact": True} if implementation == INTERPRETED else {}


def check_equal(inputs, implementation, bars=FLOAT32, exact=False, **options):
    """Values and all gradients within a relative error of the recurrence in float64; the result.

    The gradient of A_log sums terms of both signs over tokens and channels: its error is relative to their norm.
    """
    cot = cotangents(inputs, dtype=inputs["v"].dtype)
    own = {"exact": True} if exact else {}
    result = values_and_gradients(inputs, cot, implementation=implementation, **options, **own)
    expected = values_and_gradients(inputs, cot, implementation=FLOAT64, **options)
    shifted = np.asarray(inputs["gate"], np.float64) + np.asarray(inputs["dt_bias"], np.float64)
    sizes = {"A_log": np.linalg.norm(np.asarray(expected["gate"]) * shifted)}
    testing.assert_close(result, expected, bars, sizes)
    return result
