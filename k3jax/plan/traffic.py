"""What a step sends by arithmetic: the collectives that the code of the layers writes out, from shapes alone.

Routing is taken to be even, so that a dispatch has one pass and the balanced plan lends nothing.
"""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import config as c
from k3jax import sharding
from k3jax.config_layout import Layout
from k3jax.config_optim import Muon
from k3jax.parallel.context import Zigzag
from k3jax.parallel.muon import Stack, stacks_of
from k3jax.parallel.transport import AllGather
from k3jax.plan.held import Held
from k3jax.plan.hlo import Collective
from k3jax.run_config import TrainConfig


class Work(NamedTuple):
    """What one micro-batch is on one device. rows: of the batch. tokens: between sub-layers. time_tokens: inside of a
    mixer, where the device has its heads of all tokens of its context shard. item: bytes of the compute dtype."""

    rows: int
    tokens: int
    time_tokens: int
    item: int


def work_of(config: TrainConfig, layout: Layout) -> Work:
    """Of a layout that has passed `placement.check_batch`."""
    rows = config.batch // config.micro_batches // math.prod(layout.sizes[name] for name in sharding.BATCH_AXES)
    time = config.seq_len // layout.context
    return Work(rows, rows * time // layout.tensor, rows * time, jnp.dtype(config.model.dtype).itemsize)


def again(policy: c.RematPolicy, *kept: str) -> int:
    """1 if the backward pass computes again what a policy could have kept under one of these names, else 0."""
    if isinstance(policy, c.Save):
        return int(not set(kept) & set(policy.names))
    return int(policy == "full" or (policy == "dots" and not kept))


def collectives(config: TrainConfig, layout: Layout, parameters: list[Held], stacks: list[Stack]) -> list[Collective]:
    """Everything that one device sends in a step; ``op_name`` says for what. parameters, stacks: of the layout."""
    work = work_of(config, layout)
    parts = [
        *_parameters(config, layout, parameters, work.item),
        *_tensor(config, layout, work),
        *_experts(config, layout, work),
        *_context(config, layout, work),
        *_ends(config, layout, parameters, work),
    ]
    once = [*_counts(config, layout), *_optimizer(config, layout, parameters, stacks)]
    repeated = [one._replace(times=one.times * config.micro_batches) for one in parts]
    return [one for one in (*repeated, *once) if one.size > 1 and one.times and one.payload]


def _one(layout: Layout, kind: str, axes: tuple[str, ...], payload: float, times: int, what: str) -> Collective:
    sizes = tuple(layout.sizes.items())
    axes = tuple(name for name, size in sizes if size > 1 and name in axes)
    ids = groups(sizes, axes)
    return Collective(kind, axes, ids.shape[1], ids, round(payload), times, False, 0, what)


@functools.lru_cache(maxsize=256)
def groups(sizes: tuple[tuple[str, int], ...], axes: tuple[str, ...]) -> np.ndarray:
    """[groups, size] positions on the mesh that differ along these axes only."""
    names = [name for name, _ in sizes]
    ids = np.arange(math.prod(size for _, size in sizes)).reshape([size for _, size in sizes])
    last = [names.index(name) for name in axes]
    ids = ids.transpose([n for n in range(len(names)) if n not in last] + last)
    return ids.reshape(-1, math.prod(ids.shape[len(names) - len(last) :]))


def _parameters(config: TrainConfig, layout: Layout, parameters: list[Held], item: int) -> Iterator[Collective]:
    """Gathers before a layer, and what becomes of its gradients."""
    runs = 2 - (config.model.remat == "none")
    for one in parameters:
        if one.part in ("embedding", "head"):
            continue
        width = item if one.is_cast else 4
        for gather in one.gathers:
            payload = math.prod(gather.shape) * width
            yield _one(layout, "all-gather", gather.axes, payload, one.layers * runs, f"weights: {one.part}")
            yield _one(layout, "reduce-scatter", gather.axes, payload, one.layers, f"gradients: {one.part}")
        yield _one(layout, "all-reduce", one.alike, math.prod(one.rest) * 4, one.layers, f"gradients: {one.part}")


def _tensor(config: TrainConfig, layout: Layout, work: Work) -> Iterator[Collective]:
    """Time gathered before and scattered after every sub-layer but the routed experts; the backward pass mirrors it."""
    model = config.model
    mixers = model.layers
    ffns = sum(kind.ffn == "dense" or model.moe.shared > 0 for kind in model.kinds)
    payload = work.time_tokens * model.dim * work.item
    gathers = (mixers + ffns) * (2 + again(model.remat))
    scatters = (mixers + ffns) * 2 + mixers * again(model.remat, "mixer_out")
    yield _one(layout, "all-gather", ("tensor",), payload, gathers, "time before a sub-layer")
    yield _one(layout, "reduce-scatter", ("tensor",), payload, scatters, "output of a sub-layer")
    borrowed = work.time_tokens * model.mla.cache_dim * work.item
    borrowers = sum(kind.borrows for kind in model.kinds)
    yield _one(layout, "all-gather", ("tensor",), borrowed, borrowers * (1 + again(model.remat)), "borrowed keys")
    yield _one(layout, "reduce-scatter", ("tensor",), borrowed, borrowers, "gradients of borrowed keys")


def _experts(config: TrainConfig, layout: Layout, work: Work) -> Iterator[Collective]:
    """Tokens to their experts and back."""
    model, layers = config.model, sum(kind.ffn == "moe" for kind in config.model.kinds)
    width = (model.moe.latent.dim if model.moe.latent else model.dim) * work.item
    # What follows the experts asks for their output again only where there is something to differentiate.
    back_again = again(model.remat) if model.moe.latent else 0
    if isinstance(layout.transport, AllGather):
        payload = work.tokens * layout.expert * width
        gathers = 2 + again(model.remat)
        yield _one(layout, "all-gather", ("expert",), payload, layers * gathers, "latents to all experts")
        yield _one(layout, "reduce-scatter", ("expert",), payload, layers * (2 + back_again), "sums of experts")
        return
    payload = work.tokens * model.moe.active * width
    trips = 5 + 2 * back_again
    yield _one(
        layout, "ragged-all-to-all", ("expert",), payload, layers * trips, "copies of tokens to experts and back"
    )


def _context(config: TrainConfig, layout: Layout, work: Work) -> Iterator[Collective]:
    """States of KDA, the tokens before a shard, and MLA's compressed keys."""
    model, axes = config.model, ("context",)
    kda, mla = (sum(kind.mixer == name for kind in model.kinds) for name in ("kda", "mla"))
    heads, K = model.kda.heads // layout.tensor, model.kda.head_dim
    summary = work.rows * heads * K * 2 * K * 4 * layout.context
    yield _one(layout, "all-gather", axes, summary, kda * (2 + again(model.remat, "states")), "M and S of KDA")
    halo = work.rows * (model.kda.conv - 1) * 3 * heads * K * work.item
    yield _one(layout, "collective-permute", axes, halo, kda * (2 + again(model.remat)), "tokens before a shard")
    keys = work.time_tokens * layout.context * model.mla.cache_dim * work.item
    yield _one(layout, "all-gather", axes, keys, mla * (1 + again(model.remat)), "keys of MLA")
    yield _one(layout, "reduce-scatter", axes, keys, mla, "gradients of MLA's keys")
    if isinstance(layout.mla, Zigzag):
        moved = (
            work.time_tokens * model.mla.heads // layout.tensor * (model.mla.qk_dim * work.item + model.mla.v_dim * 4)
        )
        yield _one(layout, "collective-permute", axes, moved, mla * (2 + again(model.remat)), "queries in zigzag")


def _ends(config: TrainConfig, layout: Layout, parameters: list[Held], work: Work) -> Iterator[Collective]:
    """Embedding, head and loss."""
    model = config.model
    stream = work.time_tokens * model.dim * work.item
    for one in parameters:
        if one.part not in ("embedding", "head"):
            continue
        spread = one.gathers[-1].axes if one.gathers else ()
        if one.part == "embedding":
            yield _one(layout, "all-to-all", spread, stream, 2, "columns of the embedding")
        else:
            yield _one(layout, "all-gather", spread, math.prod(one.used) * work.item, 1, "weights: head")
            yield _one(layout, "reduce-scatter", spread, math.prod(one.used) * 4, 1, "gradients: head")
        yield _one(layout, "all-reduce", one.alike, math.prod(one.rest) * 4, 1, f"gradients: {one.part}")
        yield _one(layout, "all-gather", ("tensor",), stream, 1, f"time at the {one.part}")
        yield _one(layout, "reduce-scatter", ("tensor",), stream, 1, f"time at the {one.part}")


def _counts(config: TrainConfig, layout: Layout) -> Iterator[Collective]:
    """What the balancer has counted, one all-reduce for all layers."""
    moe, layers = config.model.moe, sum(kind.ffn == "moe" for kind in config.model.kinds)
    bins = moe.balancer.bins if isinstance(moe.balancer, c.QuantileBalancing) else 0
    yield _one(layout, "all-reduce", sharding.TOKEN_AXES, layers * moe.experts * (bins + 1) * 4, 1, "balancer's counts")


def _optimizer(
    config: TrainConfig, layout: Layout, parameters: list[Held], stacks: list[Stack]
) -> Iterator[Collective]:
    """Whole matrices for Muon, and updates to the devices that hold the parameter (ZeRO-1)."""
    for stack in stacks:
        payload = stack.padded * math.prod(stack.part) * jnp.dtype(config.optimizer.matrices.dtype).itemsize
        yield _one(layout, "all-to-all", stack.axes, payload, 2, f"Muon: {stack.role.value}")
    for one in parameters:
        yield _one(layout, "all-gather", one.spread_over, one.bytes, 1, "updates that ZeRO-1 spreads")


def muon_stacks(config: TrainConfig, layout: Layout, parameters: list[Held]) -> list[Stack]:
    """The stacks of matrices that Muon orthogonalizes; none under AdamW."""
    muon = config.optimizer.matrices
    if not isinstance(muon, Muon):
        return []
    matrices = [one for one in parameters if one.meta.role.group == "matrices"]
    shapes = {one.path: jax.ShapeDtypeStruct(one.shape, jnp.float32) for one in matrices}
    metas, specs = {one.path: one.meta for one in matrices}, {one.path: one.kept.spec for one in matrices}
    return stacks_of(shapes, metas, specs, layout.sizes, config=muon)
