"""What rematerialization policies keep and cost: bytes from shapes, and the step's time and temporaries, measured here,
or the temporaries that a TPU compiler plans.

python -m k3jax.memory --config nano
python -m k3jax.memory --config attnres_194m --set batch=1 --topology v5p:2x2x1
"""

import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import AxisType, Mesh

from k3jax import config_io, presets, runtime, sharding, step
from k3jax.config import ConfigError, ModelConfig
from k3jax.data import Batch
from k3jax.model import weights
from k3jax.model.weights import Weights
from k3jax.plan import chips, cost, hlo
from k3jax.run_config import TrainConfig

POLICIES = (
    "none",
    "dots",
    "Save(names=('projected', 'states', 'attended', 'mixer_out', 'routing', 'dispatch'))",
    "Save",
    "Save(storage='host')",
    "Save(storage='fp8')",
    "Save(storage='fp8_host')",
    "Save(names=('layer_input',), storage='host')",
    "full",
)

HEADER = """| policy | kept per token, bytes | of it on the host | temporaries, MB | of the host, MB | step, s | ratio |
| --- | --- | --- | --- | --- | --- | --- |"""


class Cost(NamedTuple):
    """What a policy costs. device, host: bytes that the backbone keeps of one token from its forward to its backward
    pass, weights not counted. temporaries: bytes of the compiled program, on the device. host_temporaries: likewise.
    seconds, ratio: of a step, and to the last policy's."""

    device: float
    host: float
    temporaries: int
    host_temporaries: int
    seconds: float
    ratio: float


def residuals(model: ModelConfig, batch: int, seq_len: int) -> list[jax.core.ShapedArray]:
    """Shapes, dtypes and memory spaces of everything that the backbone keeps for its backward pass."""
    found = []

    def forward(params, router, tokens):
        def hidden(params):
            return weights.bind(model, Weights(params, router))(model, tokens, observe=True)

        _, pull, _ = jax.vjp(hidden, params, has_aux=True)
        found.extend(map(jax.typeof, jax.tree.leaves(pull)))

    tokens = jax.ShapeDtypeStruct((batch, seq_len), jnp.int32)
    jax.eval_shape(forward, *weights.structure(model).shapes, tokens)
    return found


def kept(model: ModelConfig, seq_len: int) -> tuple[float, float]:
    """Bytes that one more token keeps on the device and on the host, from shapes alone: weights do not count."""

    def total(batch: int) -> np.ndarray:
        arrays = residuals(model, batch, seq_len)
        spaces = jax.memory.Space.Device, jax.memory.Space.Host
        return np.array([sum(x.size * x.dtype.itemsize for x in arrays if x.memory_space == s) for s in spaces])

    device, host = (total(2) - total(1)) / seq_len
    return float(device), float(host)


def measure(configs: list[TrainConfig], rounds: int) -> Iterator[Cost]:
    """Median seconds of a train step on random tokens. Steps of the configurations take turns, so that other work on
    the machine slows all of them."""
    first = configs[0]
    rows = np.random.default_rng(0).integers(0, first.model.vocab, (first.batch, first.seq_len + 1), dtype=np.int32)
    zeros, ones = np.zeros_like(rows[:, 1:]), np.ones(rows[:, 1:].shape, np.float32)
    batch = Batch(rows[:, :-1], rows[:, 1:], zeros, ones)
    compiled = []
    for number, config in enumerate(configs, 1):
        print(f"compiling the step under policy {number} of {len(configs)}: {config.model.remat}", file=sys.stderr)
        compiled.append(step.lower_train_step(config).compile(runtime.compiler_options()))
    seconds = np.zeros((rounds, len(configs)))
    for times in seconds:
        for index, run in enumerate(compiled):
            state = jax.block_until_ready(step.init_state(first))
            start = time.perf_counter()
            jax.block_until_ready(run(state, batch))
            times[index] = time.perf_counter() - start
    medians = np.median(seconds, axis=0)
    for config, run, median in zip(configs, compiled, medians):
        yield _cost(config, run, float(median), float(median / medians[-1]))


def planned(configs: list[TrainConfig], topology: str) -> Iterator[Cost]:
    """Loss and gradient, compiled for one chip of a TPU topology that need not be here, and the seconds that the
    compiler's estimates and the counted cycles of kernels add up to. The optimizer, which costs the same under every
    policy, is left out.

    Raises:
      ConfigError: there is no TPU compiler here, or it does not know the topology.
    """
    described = chips.topology(topology)
    if not described.is_tpu:
        raise ConfigError(f"--topology={topology}: policies are compiled for TPUs only")
    mesh = Mesh(np.array(chips.devices_of(described)[:1]), ("chip",), axis_types=(AxisType.Auto,))
    chip = described.chip

    def compiled(config: TrainConfig) -> tuple[jax.stages.Compiled, float]:
        print(f"compiling for {topology}: {config.model.remat}", file=sys.stderr)
        args = (*step.abstract_state(config).weights, step.abstract_batch(config))
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.replicated(mesh)), args)
        loss = partial(step.loss_fn, config=config, count=jnp.float32(1))
        gradient = jax.grad(lambda params, router, batch: loss(params, router, batch=batch)[0])
        with jax.set_mesh(mesh):
            found = jax.jit(gradient).lower(*args).compile()
        program = hlo.Program.parse(found.as_text())
        return found, cost.fused_seconds(program, chip) + cost.kernel_seconds(program, chip)

    reference = compiled(configs[-1])
    for config in configs[:-1]:
        found, seconds = compiled(config)
        yield _cost(config, found, seconds, seconds / reference[1])
    yield _cost(configs[-1], *reference, 1.0)


def _cost(config: TrainConfig, compiled: jax.stages.Compiled, seconds: float, ratio: float) -> Cost:
    stats = compiled.memory_analysis()
    temporaries = stats.temp_size_in_bytes, stats.host_temp_size_in_bytes
    return Cost(*kept(config.model, config.seq_len), *temporaries, seconds, ratio)


def row(policy: str, one: Cost) -> str:
    """A row of :data:`HEADER`'s table."""
    cells = [f"`{policy}`", f"{one.device:,.0f}", f"{one.host:,.0f}"]
    cells += [f"{one.temporaries / 1e6:,.1f}", f"{one.host_temporaries / 1e6:,.1f}"]
    cells += [f"{one.seconds:.3f}", f"{one.ratio:.3f}"]
    return f"| {' | '.join(cells)} |"


def main(argv: list[str]) -> None:
    runtime.refuse_stray(argv)
    given = flags.FLAGS
    policies = given.policy or list(POLICIES)
    try:
        config = config_io.override(presets.load(given.config), given["set"].value)
        configs = [config_io.override(config, [f"model.remat={policy}"]) for policy in policies]
        costs = planned(configs, given.topology) if given.topology else measure(configs, given.rounds)
        print(HEADER)
        for policy, one in zip(policies, costs):
            print(row(policy, one), flush=True)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    runtime.start()
    flags.DEFINE_string("config", "nano", "a preset or a JSON file")
    flags.DEFINE_multi_string("set", [], "path.to.field=value; repeat for several")
    flags.DEFINE_multi_string("policy", [], "a value of model.remat; repeat for several, the last one is the reference")
    flags.DEFINE_integer("rounds", 20, "steps of each policy", lower_bound=1)
    flags.DEFINE_string("topology", "", "compile for one chip of this TPU topology, such as v5p:2x2x1; run nothing")
    app.run(main)
