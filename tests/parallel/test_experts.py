"""Experts over the devices of a mesh: every transport against the dense loop on one device, and what travels."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from k3jax import config as c
from k3jax import grouped
from k3jax.model.moe import Routing, dense_expert_mix
from k3jax.parallel import dispatch, experts, lending
from k3jax.parallel.plan_balanced import balanced_assignment
from k3jax.parallel.transport import AllGather, Balanced, RaggedAllToAll

L, F = 6, 5
TRANSPORTS = [AllGather(0.5), RaggedAllToAll(0.7), Balanced()]
SHAPES = {
    "2 ranks": dict(mesh=(2,), tokens=6, E=8, A=3),
    "2 x 4 ranks": dict(mesh=(2, 4), tokens=3, E=16, A=2),
    "4 ranks, one token each, all experts active": dict(mesh=(4,), tokens=1, E=4, A=4),
}
ROW_CARRIERS = dispatch._gathered_exchange, dispatch._ragged_exchange
CALL = "@ragged_all_to_all"
ROUTERS = ["uniform", "one hot expert", "hot and empty ranks", "nearly tied"]


def _router(kind, rng, dim, E):
    router = rng.standard_normal((dim, E)).astype(np.float32)
    expert = np.arange(E)
    match kind:
        case "one hot expert":
            router[0] += np.where(expert == E - 2, 6, 0)
        case "hot and empty ranks":
            router[0] += np.where(expert < E // 2, 6, -6)
        case "nearly tied":
            router = 1e-6 * router
    return router


def _inputs(kind, *, mesh, tokens, E, A):
    """z [R N, L], ids and weights [R N, A], three matrices and a cotangent."""
    rng = np.random.default_rng(0)
    N = tokens * math.prod(mesh)
    x = rng.standard_normal((N, 7)).astype(np.float32)
    x[:, 0] = 1
    scores = x @ _router(kind, rng, 7, E)
    ids = np.argsort(-scores, axis=1)[:, :A].astype(np.int32)
    weights = np.take_along_axis(1 / (1 + np.exp(-scores)), ids, 1)
    z, dy = rng.standard_normal((2, N, L)).astype(np.float32)
    return z, ids, weights, *rng.standard_normal((3, E, L, F)).astype(np.float32), dy


def _sharded_mix(mesh, transport):
    """``(z, ids, weights, gate, up, down)`` to ``y``, all global arrays."""
    axis = mesh.axis_names if len(mesh.axis_names) > 1 else mesh.axis_names[0]

    @partial(jax.shard_map, mesh=mesh, in_specs=P(axis), out_specs=P(axis), check_vma=False)
    def mix(z, ids, weights, *matrices):
        routing = Routing(ids, weights, None, None)
        return experts.expert_mix(z, routing, *matrices, c.SiTU(), axis=axis, transport=transport)[0]

    return mix


def _mesh(sizes):
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return Mesh(devices, ("a", "b")[: len(sizes)])


def _dense(z, ids, weights, *matrices):
    return dense_expert_mix(z, Routing(ids, weights, None, None), *matrices, c.SiTU())


def _value_and_grads(mix):
    def run(z, ids, weights, gate, up, down, dy):
        y, pull = jax.vjp(lambda z, weights, *m: mix(z, ids, weights, *m), z, weights, gate, up, down)
        return y, pull(dy)

    return jax.jit(run)


def _error(got, want):
    """Largest relative error over the output and the gradients, in the Frobenius norm."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(np.linalg.norm(a - b) / (np.linalg.norm(b) + 1)) for a, b in pairs)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_transport_equals_the_dense_loop_in_value_and_gradients(shape):
    """Whatever the routing, with one compilation each; small passes, so that hot ranks take several."""
    spec = SHAPES[shape]
    kinds = ROUTERS if spec["tokens"] > 1 else ROUTERS[:2]
    dense = _value_and_grads(_dense)
    for transport in TRANSPORTS:
        run = _value_and_grads(_sharded_mix(_mesh(spec["mesh"]), transport))
        for kind in kinds:
            inputs = _inputs(kind, **spec)
            error = _error(run(*inputs), dense(*inputs))
            assert error < 2e-6, f"{transport}, {kind}: relative error {error:.1e}"
        assert run._cache_size() == 1


@pytest.mark.parametrize("broken", ["one pass only", "borrowed gradients are kept", "weights of the wrong rank"])
def test_a_broken_transport_is_noticed(broken, monkeypatch):
    """Negative controls."""
    spec, transport = SHAPES["2 ranks"], Balanced()
    match broken:
        case "one pass only":
            transport = RaggedAllToAll(0.7)
            monkeypatch.setattr(experts, "passes", lambda plan, rows: 1)
        case "borrowed gradients are kept":
            monkeypatch.setattr(lending, "settle", lambda dw, assignment, axis: dw[: len(dw) // 2])
        case "weights of the wrong rank":
            monkeypatch.setattr(lending, "lend", lambda w, assignment, axis: jnp.concatenate([w, w]))
    inputs = _inputs("hot and empty ranks", **spec)
    value_only = broken != "borrowed gradients are kept"
    run = (lambda mix: jax.jit(lambda *args: mix(*args[:-1]))) if value_only else _value_and_grads
    assert _error(run(_sharded_mix(_mesh(spec["mesh"]), transport))(*inputs), run(_dense)(*inputs)) > 0.05


def _traced(transport, *, N, A, E, L, ranks=4):
    """The forward pass in bfloat16, to be lowered for a target."""
    shape = jax.ShapeDtypeStruct
    matrix = shape((E, L, 128), jnp.bfloat16)
    ids, weights = shape((ranks * N, A), jnp.int32), shape((ranks * N, A), jnp.float32)
    args = shape((ranks * N, L), jnp.bfloat16), ids, weights, matrix, matrix, matrix
    return jax.jit(_sharded_mix(_mesh((ranks,)), transport)).trace(*args)


def test_what_the_ragged_transport_sends_is_each_copy_out_and_back():
    """2 A L values of 2 bytes per token, times 1 - 1/R when routing is even; counts and weights are within 2 %."""
    N, A, E, L, R = 512, 8, 16, 256, 4
    text = _traced(RaggedAllToAll(1.5), N=N, A=A, E=E, L=L).lower(lowering_platforms=("tpu",)).as_text()
    calls = [re.findall(r"tensor<(\w+)>", line.rpartition(" : (")[2]) for line in text.splitlines() if CALL in line]
    once = {(kinds[0], kinds[-1]) for kinds in calls}
    assert len(calls) == 5 and len(once) == 3  # What a further pass would bring stands in the loop, behind a condition.
    # The buffer at the other end has rows to spare: what travels is the operand on the way out, the result back.
    sent = sum(min(map(_bytes, kinds)) for kinds in once)
    gathers = re.findall(r'"stablehlo.all_gather".* : \(.*-> tensor<(\w+)>', text)
    assert len(gathers) == 1
    total = (sent + _bytes(gathers[0])) * (1 - 1 / R)
    assert total / N == pytest.approx(2 * A * L * 2 * (1 - 1 / R), rel=0.02)


def _bytes(kind):
    *dims, dtype = kind.split("x")
    return math.prod(map(int, dims)) * int(re.search(r"\d+", dtype)[0]) // 8


@pytest.mark.parametrize("transport", [RaggedAllToAll(), Balanced()])
def test_the_lowering_target_chooses_what_carries_the_plan(transport):
    """And what multiplies the rows, by the name of its scope."""
    traced = _traced(transport, N=4, A=2, E=8, L=8)
    texts = {p: traced.lower(lowering_platforms=(p,)).as_text(debug_info=True) for p in ("cpu", "tpu", "cuda")}
    assert {p for p, text in texts.items() if CALL in text} == {"tpu", "cuda"}
    kernel = {"tpu": "megablox", "cuda": grouped.GPU_KERNEL}
    assert all(f"grouped_matmul_{name}" in texts[platform] for platform, name in kernel.items())


def test_the_exchange_is_its_own_inverse_and_leaves_the_rest(monkeypatch):
    """Rows go out, come back to where they were, and untouched places keep what they held. Scalars go the same way,
    here in lines of two."""
    monkeypatch.setattr(dispatch, "LANES", 2)
    mesh = _mesh((4,))
    sizes = np.array([[1, 2, 0, 1], [0, 0, 3, 1], [2, 2, 0, 0], [1, 0, 1, 2]], np.int32)
    leg = dispatch.Leg(*map(jnp.asarray, (sizes, np.cumsum(sizes, 1) - sizes, np.cumsum(sizes, 0) - sizes)))

    @partial(jax.shard_map, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=False)
    def there_and_back(x):
        away = dispatch.exchange(x, jnp.full((7, 3), -1.0), leg, "a")
        alone = dispatch.exchange_scalars(x[:, 0], jnp.full(7, -1.0), leg, "a")
        return away, dispatch.exchange(away, jnp.full_like(x, -2.0), leg.back(), "a"), alone

    x = np.random.default_rng(0).standard_normal((4, 5, 3)).astype(np.float32)
    away, back, alone = jax.jit(there_and_back)(x.reshape(20, 3))
    np.testing.assert_array_equal(alone, away[:, 0])
    away, back = (np.asarray(a).reshape(4, -1, 3) for a in (away, back))
    for rank in range(4):
        want = [x[r, leg.begin[r, rank] :][: sizes[r, rank]] for r in range(4)]
        count = sizes[:, rank].sum()
        np.testing.assert_array_equal(away[rank, :count], np.concatenate(want))
        assert (away[rank, count:] == -1).all()
        np.testing.assert_array_equal(back[rank, : sizes[rank].sum()], x[rank, : sizes[rank].sum()])
        assert (back[rank, sizes[rank].sum() :] == -2).all()


def _emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """``lax.ragged_all_to_all`` by its documentation, on any backend; NaN where ranks disagree on a size."""
    me = jax.lax.axis_index(axis_name)
    tables = (operand, input_offsets, send_sizes, output_offsets)
    operands, starts, sizes, ends = (jax.lax.all_gather(a, axis_name) for a in tables)
    slices = len(recv_sizes) // len(operands)
    row = jnp.arange(len(output))
    for rank in range(len(operands)):
        for n in range(slices):
            start, size, end = (a[rank][me * slices + n] for a in (starts, sizes, ends))
            comes = ((row >= end) & (row < end + size)).reshape(-1, *[1] * (output.ndim - 1))
            rows = jnp.where(size == recv_sizes[rank * slices + n], operands[rank][row - end + start], jnp.nan)
            output = jnp.where(comes, rows, output)
    return output


def test_what_accelerators_run_equals_what_cpu_runs(monkeypatch):
    """The two carriers of rows, and of lent weights and their gradients, with the collective emulated."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", _emulated)
    rng = np.random.default_rng(0)
    ids = np.where(rng.random((12, 2)) < 0.7, 1, rng.integers(0, 8, (12, 2))).astype(np.int32)
    z, w = rng.standard_normal((12, L)).astype(np.float32), rng.standard_normal((8, L, F)).astype(np.float32)
    dw = rng.standard_normal((16, L, F)).astype(np.float32)

    @partial(jax.shard_map, mesh=_mesh((4,)), in_specs=P("a"), out_specs=P("a"), check_vma=False)
    def both(ids, z, w, dw):
        table = dispatch.counts(ids, 8, "a")
        assignment = balanced_assignment(table.sum(axis=0), 4)
        plan = dispatch.dispatch(ids, table, assignment, "a")
        step = dispatch.one_pass(plan, 0, ids.size)
        rows = z[plan.order // 2]
        used = jnp.concatenate([jnp.ones(2, bool), assignment.lent[jax.lax.axis_index("a")] > 0])[:, None, None]
        pairs = [f(rows, jnp.zeros_like(rows), step.leg, axis="a") for f in ROW_CARRIERS]
        pairs += [jnp.where(used, f(w, assignment, axis="a"), 0) for f in (lending._gathered, lending._ragged)]
        pairs += [f(dw, assignment, axis="a") for f in (lending._scattered, lending._ragged_back)]
        return pairs, used

    pairs, used = jax.jit(both)(ids, z, w, dw)
    assert used.sum() > 8
    for cpu, accelerator in zip(pairs[::2], pairs[1::2]):
        np.testing.assert_allclose(accelerator, cpu, rtol=1e-6)


def test_bfloat16_rows_weights_and_sums_in_float32():
    spec = SHAPES["2 ranks"]
    z, ids, weights, *matrices, _ = _inputs("uniform", **spec)
    exact = _dense(z, ids, weights, *matrices)
    for transport in TRANSPORTS[:2]:
        y = jax.jit(_sharded_mix(_mesh(spec["mesh"]), transport))(z.astype(jnp.bfloat16), ids, weights, *matrices)
        assert y.dtype == jnp.bfloat16
        assert np.linalg.norm(y.astype(np.float32) - exact) < 0.02 * np.linalg.norm(exact)


@pytest.mark.parametrize("transport", [AllGather, RaggedAllToAll])
@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_a_pass_without_rows_is_refused(transport, factor):
    with pytest.raises(c.ConfigError, match=rf"{transport.__name__}.factor = {factor}"):
        transport(factor)


def test_an_unknown_transport_is_refused():
    with pytest.raises(TypeError, match="transport = 'ragged'"):
        experts.expert_mix(
            jnp.ones((1, 2)),
            Routing(jnp.zeros((1, 1), int), jnp.ones((1, 1)), None, None),
            *[jnp.ones((1, 2, 2))] * 3,
            c.SiTU(),
            axis="a",
            transport="ragged",
        )
