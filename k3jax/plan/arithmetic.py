"""A plan by arithmetic: memory, communication and time from shapes and rates. Seconds, no compiler, any topology."""

import functools
import math
import time

from k3jax import accounting, layout_report, placement
from k3jax import config as c
from k3jax.config_layout import Layout
from k3jax.config_optim import Muon
from k3jax.optim.muon import NEWTON_SCHULZ
from k3jax.parallel.muon import Stack
from k3jax.parallel.transport import AllGather, RaggedAllToAll
from k3jax.plan import chips, held, traffic, working_set
from k3jax.plan.chips import Topology
from k3jax.plan.cost import KDA_CYCLES, MATMULS_REACH
from k3jax.plan.held import Held
from k3jax.plan.hlo import Collective
from k3jax.plan.needs import Memory, Times
from k3jax.plan.plans import Arithmetic, Plan, Term, check_devices
from k3jax.plan.traffic import again
from k3jax.plan.working_set import Moment
from k3jax.run_config import TrainConfig

BANDWIDTH = 0.9
"""What `cost.MATMULS_REACH` is of the peak, of HBM, for operations on arrays."""
TRIPS = 3
"""How often an array of a layer's working set passes through HBM: written once, read twice."""
PASSES = {"float32": 6, "bfloat16": 1}
"""Products of bfloat16 that a TPU makes one float32 product of, at full precision."""


def plan(config: TrainConfig, layout: Layout, topology: Topology) -> Plan:
    """As `compiled.plan`, without a compiler.

    Raises:
      ConfigError: the layout does not fit the model, the batch or the devices.
    """
    check_devices(layout, topology)
    mesh = layout_report.mesh_of(layout)
    placement.check_model(config.model, mesh)
    placement.check_batch(config, mesh)
    return unchecked(config, layout, topology)


def unchecked(config: TrainConfig, layout: Layout, topology: Topology) -> Plan:
    """:func:`plan` of a layout that has passed the checks."""
    start = time.perf_counter()
    parameters, work = held.parameters(config.model, layout), traffic.work_of(config, layout)
    stacks = traffic.muon_stacks(config, layout, parameters)
    moments = working_set.moments(config, layout, parameters, stacks, work)
    needs, peak = memory_of(config, topology, moments, parameters)
    sent = traffic.collectives(config, layout, parameters, stacks)
    times, terms = times_of(config, layout, topology, parameters, stacks, sent)
    made = Arithmetic(peak.name, peak.terms, terms, time.perf_counter() - start)
    return Plan(topology, layout, needs, times, sent, made)


def memory_of(
    config: TrainConfig, topology: Topology, moments: list[Moment], parameters: list[Held]
) -> tuple[Memory, Moment]:
    """Bytes of a device in the parts of a compiled plan, and the moment of the peak with all of its terms."""
    weights = sum(one.bytes for one in parameters)
    kept = sum(one.optimizer_bytes(config.optimizer) for one in parameters)
    saved = working_set.kept(config, topology.devices)
    peak = max(moments, key=lambda one: one.bytes + one.keeps * saved)
    tiles = topology.is_tpu * sum(
        one.layers * (working_set.compact(*one.rest) - math.prod(one.rest) * 4) for one in parameters
    )
    padding = Term("tiles", tiles * (2 + round(kept / weights)), "what tiles of 8 x 128 add to state and gradients")
    terms = [*peak.terms, padding]
    if not peak.keeps:
        terms.append(Term("no longer there", -saved, "what layers had kept"))
    if config.micro_batches > 1:
        terms.append(Term("sums of gradients", weights, "over micro-batches, beside those of one"))
    terms = [term for term in terms if term.amount]
    other = round(sum(term.amount for term in terms))
    return Memory(weights, kept, weights, saved, other, round(topology.chip.hbm)), peak._replace(terms=terms)


def times_of(
    config: TrainConfig,
    layout: Layout,
    topology: Topology,
    parameters: list[Held],
    stacks: list[Stack],
    sent: list[Collective],
) -> tuple[Times, list[Term]]:
    """A step, added up. All communication counts as exposed: what a schedule hides, only a schedule says."""
    chip, places = topology.chip, chips.coordinates(topology)
    terms = [*_products(config, layout, topology, stacks), *_kernels(config, layout, topology)]
    terms.append(_arrays(config, layout, topology, parameters))
    fused = sum(term.amount for term in terms if not term.name.startswith("kernel"))
    kernels = sum(term.amount for term in terms if term.name.startswith("kernel"))
    per_byte: dict[tuple, float] = {}
    spent: dict[str, float] = {}
    for one in sent:
        key = one.kind.endswith("all-to-all"), one.axes
        if key not in per_byte:
            per_byte[key] = chips.seconds(topology, places, one.kind, one.groups, 1.0)
        axes = " x ".join(one.axes)
        spent[axes] = spent.get(axes, 0.0) + per_byte[key] * one.sent * one.times
    terms += [Term(f"over {axes}", seconds, "bytes over link bandwidth") for axes, seconds in spent.items()]
    communication = sum(spent.values())
    flops = _flops(config.model, config.seq_len)
    ideal = (flops.forward + flops.backward) * _tokens(config, topology) / chip.flops
    return Times(fused, kernels, communication, communication, ideal), terms


_flops = functools.lru_cache(maxsize=8)(accounting.flops_per_token)


def _tokens(config: TrainConfig, topology: Topology) -> float:
    return config.batch * config.seq_len / topology.devices


def _products(config: TrainConfig, layout: Layout, topology: Topology, stacks: list[Stack]) -> list[Term]:
    """Matrix products that the compiler makes, and Muon's."""
    model, tokens = config.model, _tokens(config, topology)
    rate = topology.chip.flops * MATMULS_REACH
    sizes = _sizes(model)
    mla = sum(kind.mixer == "mla" for kind in model.kinds)
    # A backward pass costs two forward ones. Attention computes its logits once more in it, and without a cut of the
    # rows it computes those that the mask hides.
    pairs = config.seq_len / (2 if layout.context > 1 else 1)
    attention = mla * 2 * model.mla.heads * (model.mla.qk_dim + model.mla.v_dim) * pairs
    runs = {"dense": 3 + again(model.remat), "head": 3, "attention": 4 + again(model.remat, "attended")}
    terms = [
        Term("dense matrices", 2 * sizes["dense"] * tokens * runs["dense"] / rate, f"operations x {runs['dense']}"),
        Term("head", 2 * sizes["head"] * tokens * runs["head"] / rate, "operations x 3"),
        Term("attention", attention * tokens * runs["attention"] / rate, f"operations x {runs['attention']}"),
    ]
    if isinstance(config.optimizer.matrices, Muon):
        muon = config.optimizer.matrices
        operations = sum(
            s.each * s.pieces * (4 * s.shape[0] ** 2 * s.shape[1] + 2 * s.shape[0] ** 3) for s in stacks
        ) * len(NEWTON_SCHULZ[muon.newton_schulz])
        passes = PASSES[muon.dtype] if topology.is_tpu else 1  # a GPU's, as compiled plans count them
        terms.append(
            Term("Muon", operations * passes / rate, f"Newton-Schulz in {muon.dtype}: {passes} x its operations")
        )
    return [term._replace(source=f"{term.source}, at {MATMULS_REACH:.0%} of the peak") for term in terms]


def _arrays(config: TrainConfig, layout: Layout, topology: Topology, parameters: list[Held]) -> Term:
    """What is no product passes through HBM: the arrays of every layer, and the state in the optimizer."""
    work, model = traffic.work_of(config, layout), config.model
    of_kind = {kind: working_set.layer_arrays(config, layout, parameters, work, kind) for kind in set(model.kinds)}
    layers = sum(of_kind[kind] for kind in model.kinds) * (2 + again(model.remat)) / 2 * config.micro_batches
    state = sum(one.bytes + one.optimizer_bytes(config.optimizer) for one in parameters)
    seconds = TRIPS * (layers + state) / (topology.chip.hbm_bandwidth * BANDWIDTH)
    return Term(
        "arrays", seconds, f"what layers and optimizer write and read, {TRIPS} times, at {BANDWIDTH:.0%} of HBM"
    )


def _kernels(config: TrainConfig, layout: Layout, topology: Topology) -> list[Term]:
    """Those of KDA by their counted cycles, the experts' products at the peak, as for compiled plans."""
    model, chip, tokens = config.model, topology.chip, _tokens(config, topology)
    kda, moe = (sum(name in kind for kind in model.kinds) for name in ("kda", "moe"))
    runs = 1 + again(model.remat, "states")
    if topology.is_tpu:
        forward, backward = KDA_CYCLES.get(chip.kind, KDA_CYCLES["TPU v5"])
        cycles = kda * model.kda.heads * (model.kda.head_dim / 128) ** 2 * (forward * runs + backward)
        of_kda = Term("kernels of KDA", cycles * tokens / chip.clock, f"counted cycles, {runs} x forward and backward")
    else:
        operations = _flops(model, config.seq_len).parts["KDA"] * (runs + 2)
        source = f"operations of the chunk form x {runs + 2}, at {MATMULS_REACH:.0%} of the peak"
        of_kda = Term("kernels of KDA", operations * tokens / (chip.flops * MATMULS_REACH), source)
    L = model.moe.latent.dim if model.moe.latent else model.dim
    factor = (
        layout.transport.factor if layout.expert > 1 and isinstance(layout.transport, AllGather | RaggedAllToAll) else 1
    )
    # Products of one matrix each: 3 forward; 8 backward, which computes the hidden activation again; 3 more to compute
    # the layer's output again where something after it asks for it.
    products = 11 + 3 * again(model.remat) * (model.moe.latent is not None)
    experts = moe * 2 * model.moe.active * factor * L * model.moe.width * products
    return [
        of_kda,
        Term(
            "kernels of experts",
            experts * tokens / chip.flops,
            f"{products} products of {factor} x the even share of rows, at the peak",
        ),
    ]


@functools.lru_cache(maxsize=8)
def _sizes(model: c.ModelConfig) -> dict[str, int]:
    """Entries of the matrices that every token multiplies with."""
    found = {"dense": 0, "head": 0}
    for one in accounting.parameters(model):
        if one.meta is None or one.part in ("embedding", "routed experts", "norms", "attention residuals"):
            continue
        found["head" if one.part == "head" else "dense"] += one.size
    return found
