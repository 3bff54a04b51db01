"""The real train step, compiled for devices that are not here, and what the compiler's own numbers say of it."""

import math
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from k3jax import accounting, layout_report, loop, memory, placement, sharding
from k3jax.config import ConfigError
from k3jax.config_layout import Layout
from k3jax.plan import chips, cost, hlo, roofline
from k3jax.plan.chips import Topology
from k3jax.plan.needs import Memory, Times
from k3jax.plan.plans import Compiled, Plan, check_devices
from k3jax.run_config import TrainConfig


def lower(config: TrainConfig, layout: Layout, devices: list[Any]) -> jax.stages.Lowered:
    """The train step on a mesh of these devices, from shapes alone."""
    mesh = placement.make_mesh(layout.sizes, devices)
    placement.check_model(config.model, mesh)
    placement.check_batch(config, mesh)
    state, batch = placement.abstract(config, mesh, layout)
    return loop.lower_step(config, state, batch, placement.state_shardings(config, mesh, layout), layout)


def memory_of(config: TrainConfig, layout: Layout, topology: Topology, stats: Any) -> Memory:
    """Splits the compiler's memory: the state by its shardings, what layers keep by shapes, and the rest."""
    placed = layout_report.state(config, layout)
    parameters = sum(one.bytes for one in placed if one.path.startswith("weights/params"))
    state = sum(one.bytes for one in placed)
    ways = math.prod(layout.sizes[name] for name in sharding.TOKEN_AXES)
    kept, _ = memory.kept(config.model, min(config.seq_len, 1024))
    saved = round(kept * config.batch * config.seq_len / config.micro_batches / ways)
    total = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    total += stats.temp_size_in_bytes
    rest = total - state - parameters - saved
    return Memory(parameters, state - parameters, parameters, saved, rest, round(topology.chip.hbm))


def times_of(
    config: TrainConfig,
    topology: Topology,
    computing: tuple[float, float],
    sent: list[hlo.Collective],
    places: np.ndarray,
) -> Times:
    """Adds a step up, see :class:`Times`. computing: seconds of fused operations and of kernels."""
    chip = topology.chip
    communication = exposed = 0.0
    for one in sent:
        seconds = chips.seconds(topology, places, one.kind, one.groups, one.sent)
        communication += seconds * one.times
        exposed += max(seconds - one.between / chip.clock, 0) * one.times if one.asynchronous else seconds * one.times
    flops = accounting.flops_per_token(config.model, config.seq_len)
    tokens = config.batch * config.seq_len
    ideal = (flops.forward + flops.backward) * tokens / topology.devices / chip.flops
    return Times(*computing, communication, exposed, ideal)


def _compile(lowered: jax.stages.Lowered, topology: Topology) -> jax.stages.Compiled:
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        lines = str(error).splitlines()
        if "RESOURCE_EXHAUSTED" not in str(error):
            advice = "; --layout ...,transport=AllGather does without" if "agged all-to-all" in lines[0] else ""
            raise ConfigError(
                f"the compiler cannot do this step on {topology.name}: {lines[0][:300]}{advice}"
            ) from error
        reason = " ".join([line for line in lines if "hbm" in line.lower()] or lines[:1])[:300]
        raise ConfigError(
            f"the compiler finds no way to fit the step on {topology.name}: {reason}; --no-compile says what is "
            "largest, and what would make it fit"
        ) from error


class _Program(NamedTuple):
    """What a program says. computing: seconds of fused operations and of kernels. unknown: kernels."""

    sent: list[hlo.Collective]
    computing: tuple[float, float]
    source: str
    unknown: list[str]


def _read(program: hlo.Program, layout: Layout, topology: Topology) -> _Program:
    chip = topology.chip
    if topology.is_tpu:
        computing = cost.fused_seconds(program, chip), cost.kernel_seconds(program, chip)
        sent = hlo.collectives(program, layout.sizes)
        return _Program(sent, computing, cost.SOURCE, cost.unknown_kernels(program, chip))
    gpu = roofline.Roofline(program, chip)
    sent = hlo.collectives(program, layout.sizes, gpu.cycles)
    return _Program(sent, (gpu.total(), 0.0), roofline.SOURCE, gpu.unknown())


def plan(config: TrainConfig, layout: Layout, topology: Topology) -> Plan:
    """Lowers and compiles the train step for the topology, and reads the program.

    Raises:
      ConfigError: the layout does not fit the model, the batch or the devices, or the step the memory; or there is no
        compiler for them.
    """
    check_devices(layout, topology)
    devices = chips.devices_of(topology)
    start = time.perf_counter()
    lowered = lower(config, layout, devices)
    middle = time.perf_counter()
    compiled = _compile(lowered, topology)
    end = time.perf_counter()
    found = _read(hlo.Program.parse(compiled.as_text()), layout, topology)
    places = chips.coordinates(topology, devices)
    needs = memory_of(config, layout, topology, compiled.memory_analysis())
    return Plan(
        topology,
        layout,
        needs,
        times_of(config, topology, found.computing, found.sent, places),
        found.sent,
        Compiled(found.source, found.unknown, middle - start, end - middle),
    )
