"""Muon of sharded parameters equals that of one device, and moves what its arithmetic says."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.config_optim import Muon
from k3jax.optim import orthogonalize, scale_by_muon
from k3jax.parallel import muon
from k3jax.roles import ParamMeta, Role
from pallas_kernels import testing

CONFIG = Muon()
AXES = {"data": 2, "fsdp": 2, "tensor": 2}
LEAD = (2, 3)

# name: (role, axes, shape without the two layer axes, its sharding). Stacks of 6 do not divide by 4 or 8 devices.
PARAMETERS = {
    "q": (Role.HEADS, ("embed", "heads", "key"), (24, 4, 8), (("data", "fsdp"), "tensor", None)),
    "k": (Role.HEADS, ("embed", "heads", "key"), (24, 4, 8), (("data", "fsdp"), "tensor", None)),
    "rows": (Role.HEADS, ("rank", "heads", "key"), (8, 2, 24), ("fsdp", None, "data")),
    "out": (Role.MATRIX, ("embed", "heads", "value"), (24, 4, 8), ("data", ("fsdp", "tensor"), None)),
    "tall": (Role.MATRIX, ("embed", "rank"), (24, 8), ("tensor", ("data", "fsdp"))),
    "held": (Role.MATRIX, ("embed", "rank"), (16, 6), (None, None)),
    "up": (Role.EXPERTS, ("experts", "expert_in", "ff"), (4, 12, 20), (("data", "tensor"), "fsdp", None)),
    "down": (Role.EXPERTS, ("experts", "expert_in", "ff"), (4, 12, 20), (("data", "tensor"), "fsdp", None)),
    "local": (Role.EXPERTS, ("experts", "expert_in", "ff"), (8, 6, 10), (("data", "fsdp", "tensor"), None, None)),
}
META = {name: ParamMeta(role, axes) for name, (role, axes, _, _) in PARAMETERS.items()}
SPECS = {name: P(None, None, *spec) for name, (_, _, _, spec) in PARAMETERS.items()}


def tree(*names) -> dict:
    rng = np.random.default_rng(0)
    return {n: jnp.asarray(rng.standard_normal(LEAD + PARAMETERS[n][2]), jnp.float32) for n in names or PARAMETERS}


def on_mesh(*names, config=CONFIG, **options):
    specs = {n: SPECS[n] for n in names or SPECS}
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * 3)
    run = functools.partial(muon.orthogonalize_shards, meta=META, specs=specs, config=config, **options)
    run = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=specs))
    return run.lower({n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in tree(*names).items()})


def sent(compiled) -> tuple[list[int], set[str]]:
    """Bytes of the operands of every all-to-all of a compiled program, and the kinds of all collectives."""
    kinds = r"all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute"
    found, sizes = set(), []
    for line in compiled.as_text().splitlines():
        if match := re.search(rf"= (.*?) ({kinds})(?:-start)?\(", line):
            found.add(match[2])
            shapes = re.findall(r"(f32|bf16)\[([\d,]*)\]", match[1])
            sizes.append(
                sum(
                    {"f32": 4, "bf16": 2}[kind] * math.prod(int(n) for n in dims.split(",") if n)
                    for kind, dims in shapes
                )
            )
    return sizes, found


def whole(*names, config=CONFIG):
    return jax.jit(lambda x: orthogonalize(x, META, config=config))(tree(*names))


@functools.cache
def expected():
    return whole()


def test_shards_equal_the_whole_and_move_what_arithmetic_says():
    compiled = on_mesh().compile()
    testing.assert_close(compiled(tree()), expected(), 1e-5)
    stacks = muon.stacks_of(tree(), META, SPECS, AXES, config=CONFIG)
    moving = [stack for stack in stacks if stack.devices > 1]
    assert {stack.paths for stack in stacks if stack.devices == 1} == {("held",), ("local",)}
    assert ("k", "q") in {stack.paths for stack in moving} and ("down", "up") in {stack.paths for stack in moving}
    sizes, kinds = sent(compiled)
    assert kinds == {"all-to-all"} and len(sizes) == 2 * len(moving)
    own = sum(stack.bytes("float32") // (stack.devices - 1) for stack in moving)
    total = muon.bytes_per_step(tree(), META, SPECS, AXES, config=CONFIG)
    assert sum(sizes) == total + own
    assert total == sum(stack.bytes("float32") for stack in moving)


def test_bytes_of_a_stack_by_hand():
    """q and k: 12 matrices per layer pair times 2 local heads; of each 24 x 8 matrix a quarter is here."""
    (stack,) = (s for s in muon.stacks_of(tree(), META, SPECS, AXES, config=CONFIG) if s.paths == ("k", "q"))
    assert (stack.count, stack.devices, stack.each, stack.padded) == (24, 4, 6, 24)
    assert stack.bytes("bfloat16") == 2 * 24 * 6 * 8 * 2 * 3 // 4


def test_pieces_and_merged_heads():
    config, names = Muon(heads="merged"), ("q", "up")
    sharded = on_mesh(*names, config=config, piece_bytes=2000).compile()(tree(*names))
    testing.assert_close(sharded, whole(*names, config=config), 1e-5)
    stacks = muon.stacks_of(tree(*names), META, SPECS, AXES, config=config, piece_bytes=2000)
    assert [(stack.count, stack.devices, stack.each, stack.pieces) for stack in stacks] == [(6, 8, 1, 1), (6, 2, 2, 2)]


def test_matrices_travel_in_the_dtype_of_the_products():
    """Rounding what travels costs little beside rounding every factor."""
    config = Muon(dtype="bfloat16")
    exact, single = whole("q"), whole("q", config=config)
    lowered = on_mesh("q", config=config)
    assert re.findall(r"stablehlo.all_to_all.*-> tensor<[\dx]+x(\w+)>", lowered.as_text()) == ["bf16", "bf16"]
    sharded = lowered.compile()(tree("q"))
    rounding = testing.relative_error(single["q"], exact["q"])
    assert testing.relative_error(sharded["q"], exact["q"]) < 2 * rounding < 0.2


def test_a_part_taken_for_the_whole_is_seen():
    """Negative control: Newton-Schulz of a shard is not a shard of Newton-Schulz."""
    part = {"tall": tree()["tall"][..., :4]}
    wrong = orthogonalize(part, META, config=CONFIG)["tall"]
    assert testing.relative_error(wrong, expected()["tall"][..., :4]) > 1e-2


def test_a_step_on_explicit_axes():
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Explicit,) * 3)
    gradients = tree("q", "up", "tall")
    expected_update, expected_state = _step(orthogonalize, gradients)
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in gradients.items()}
        update, state = jax.jit(functools.partial(_step, muon.orthogonalize_arrays))(placed)
    testing.assert_close(update, expected_update, 1e-5)
    testing.assert_close(state.momentum, expected_state.momentum, 1e-6)
    assert update["q"].sharding.spec == SPECS["q"]


def _step(orthogonalize, gradients):
    optimizer = scale_by_muon(CONFIG, META, orthogonalize=orthogonalize)
    return optimizer.update(gradients, optimizer.init(gradients))


def test_what_does_not_divide_or_has_no_sharding_is_named():
    with pytest.raises(
        ValueError, match=r"'tall': a dimension of 8 does not divide over \('data', 'fsdp'\), 6 devices"
    ):
        muon.stacks_of({"tall": tree()["tall"]}, META, SPECS, AXES | {"data": 3}, config=CONFIG)
    with pytest.raises(ValueError, match="'held' has no PartitionSpec"):
        muon.stacks_of({"held": tree()["held"]}, META, {"q": SPECS["q"]}, AXES, config=CONFIG)
