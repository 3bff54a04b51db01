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
        ({"segment_ids": IDS, "num_segments": 0, "initial_state": jnp.ones((2, 0, 3, 8, 4))}, ValueError, "got 0"),
        ({"implementation": "fast"}, ValueError, "implementation must be one of"),
    ),
)
def test_t3_t24_refuses(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


def test_takes_what_is_right():
    o, state = call(segment_ids=IDS + np.array([0, 1, 1, -1, 2, 2]))
    assert o.shape == (2, 6, 3, 4) and state.shape == (2, 3, 8, 4)


def test_t24_padded_inputs_of_decay_parameters_are_not_broadcast():
    """A_log padded to the head width, as released weights have it, is refused by its shape."""
    with pytest.raises(ValueError, match=r"A_log has shape \(8,\)"):
        call(A_log=jnp.ones(8))


@pytest.mark.parametrize(
    "T, K, options, platform, name, reason",
    (
        (1, 64, {}, "tpu", "reference", "at most 4 tokens"),
        (512, 64, {}, "cpu", "chunked", "no TPU"),
        (512, 64, {}, "gpu", "chunked", "no TPU"),
        (512, 128, {}, "tpu", "mosaic_tpu", "is a TPU"),
        (512, 100, {}, "tpu", "chunked", "K=100, V=100"),
        (512, 320, {}, "tpu", "chunked", "up to 128"),
        (512, 64, {"chunk_size": 16}, "tpu", "chunked", "chunk_size=16"),
        (512, 100, {"implementation": "mosaic_tpu"}, "tpu", "mosaic_tpu", "named"),
        (512, 64, {"implementation": "reference"}, "cpu", "reference", "named"),
    ),
)
def test_chooses_by_length_width_and_target(T, K, options, platform, name, reason):
    x = jax.ShapeDtypeStruct((1, T, 2, K), jnp.float32)
    choice = describe(x, x, platform=platform, **options)
    assert choice.implementation == name and reason in choice.reason


WIDE = make_inputs(3, B=1, T=70, H=2, K=64, V=64)


def run_wide(implementation=None):
    inputs = dict(WIDE)
    tokens = [inputs.pop(name) for name in ("q", "k", "v", "gate", "beta")]
    return kda(*tokens, **inputs, implementation=implementation)


def test_follows_the_lowering_where_no_mesh_tells_the_target():
    """The program holds both implementations, and the one for this machine gives the same bits as when it is named."""
    program = str(jax.make_jaxpr(run_wide)())
    assert "platform_index" in program and "pallas_call" in program
    for a, b in zip(jax.jit(run_wide)(), jax.jit(lambda: run_wide("chunked"))()):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind, platform", (("cpu", "cpu"), ("TPU v5", "tpu")))
def test_follows_the_mesh_in_scope(kind, platform):
    device = jax.sharding.AbstractDevice(kind, None, platform)
    mesh = jax.sharding.AbstractMesh((1,), ("data",), (jax.sharding.AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        program = str(jax.make_jaxpr(run_wide)())
    assert ("pallas_call" in program) == (platform == "tpu") and "platform_index" not in program


@pytest.mark.parametrize("devices, kind", ((4, jax.sharding.AxisType.Auto), (1, jax.sharding.AxisType.Explicit)))
def test_leaves_arrays_that_the_compiler_splits_to_the_compiler(devices, kind):
    device = jax.sharding.AbstractDevice("TPU v5", None, "tpu")
    mesh = jax.sharding.AbstractMesh((devices,), ("data",), (kind,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        choice = describe(WIDE["q"], WIDE["v"], platform="tpu")
    assert choice.implementation == "chunked" and "inside jax.shard_map" in choice.reason


def test_refuses_a_named_kernel_on_another_target():
    """Where the mesh tells at once, else when the program is lowered."""
    with pytest.raises(NotImplementedError, match="runs on TPU, and this program is being lowered for cpu"):
        jax.jit(lambda: run_wide("mosaic_tpu"))()
    with pytest.raises(NotImplementedError, match="runs on TPU, and the target is none"):
        describe(WIDE["q"], WIDE["v"], platform="cpu", implementation="mosaic_tpu")
    with jax.set_mesh(jax.make_mesh((1,), ("data",))), pytest.raises(NotImplementedError, match="the target is none"):
        run_wide("mosaic_tpu")


@pytest.mark.parametrize(
    "changes, message",
    (
        ({"shape": (1, 2, 2, 320)}, "widths up to 128, got K=320, V=320"),
        ({"chunk_size": 16}, "chunk_size=16"),
        ({"dtype": jnp.float64}, "got float64"),
    ),
)
def test_the_tpu_kernel_names_what_it_cannot_take(changes, message):
    options = {"shape": (1, 2, 2, 64), "dtype": jnp.float32, "chunk_size": 64} | changes
    x = jnp.ones(options["shape"]).astype(jnp.float32)
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match=message):
        x = x.astype(options["dtype"])
        rest = dict(A_log=x[0, 0, :, 0], dt_bias=x[0, 0], implementation="mosaic_tpu", chunk_size=options["chunk_size"])
        kda(x, x, x, x, x[..., 0], **rest)


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
