"""What a step needs of a TPU's memory beside its state, by arithmetic: the largest set of arrays alive at once.

Three moments compete: the loss, the backward pass of the layer that needs most, and the optimizer. How many arrays of
which shape are alive was read off compiled programs (libtpu 0.0.52, optimization level 1); every number here that is no
shape says what it counts. Routing is taken to be even.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax import accounting, memory
from k3jax import config as c
from k3jax.config_layout import Layout
from k3jax.model import attnres
from k3jax.model import layout as layer_layout
from k3jax.model.kda import describe_short_conv
from k3jax.model.mla import QUERY_BLOCK
from k3jax.parallel.muon import Stack
from k3jax.parallel.transport import AllGather, Balanced
from k3jax.plan.held import Held
from k3jax.plan.plans import Term
from k3jax.plan.traffic import Work
from k3jax.roles import Role
from k3jax.run_config import TrainConfig
from pallas_kernels.kda.mosaic_tpu import head_groups

LANES, SUBLANES = 128, 8
"""A TPU lays the last two dimensions of an array out in tiles of this size."""
STREAMS = 2
"""Arrays like the stream between sub-layers: seven in a layer's backward pass, inputs, mixtures, norms and gradients,
less five that `saved` counts for the end of the model and that are gone by then."""


class Moment(NamedTuple):
    """A moment of the step and what is alive then beside state, gradients and what layers keep."""

    name: str
    terms: list[Term]
    keeps: bool  # whether what layers keep is still there

    @property
    def bytes(self) -> float:
        return sum(term.amount for term in self.terms)


def tiled(*shape: int, item: int = 4) -> int:
    """Bytes of an array as it lies."""
    *outer, rows, columns = (1, 1, *shape)
    sublanes = SUBLANES if rows > 4 else 1 << (rows - 1).bit_length()
    return math.prod(outer) * -(-rows // sublanes) * sublanes * -(-columns // LANES) * LANES * item


def compact(*shape: int, item: int = 4) -> int:
    """The same with the dimensions in the order that wastes least, as the compiler chooses for parameters."""
    if len(shape) < 2:
        return tiled(*shape, item=item)
    return min(tiled(math.prod(shape) // (rows * columns), rows, columns, item=item)
               for rows, columns in itertools.permutations(shape, 2))  # fmt: skip


def moments(
    config: TrainConfig, layout: Layout, parameters: list[Held], stacks: list[Stack], work: Work
) -> list[Moment]:
    """All that compete for the peak."""
    return [
        _loss(config, layout, parameters, work),
        *(_backward(config, layout, parameters, work, kind) for kind in sorted(set(config.model.kinds))),
        _optimizer(config, parameters, stacks),
    ]


def _loss(config: TrainConfig, layout: Layout, parameters: list[Held], work: Work) -> Moment:
    (head,) = (one for one in parameters if one.part == "head")
    D, W = head.used
    spread = sum(layout.sizes[name] > 1 for name in layout.dense)
    copies = (2 if spread > 1 else 1) + 2 * (layout.data > 1)
    chunk = min(config.loss_chunk, work.time_tokens // work.rows)
    return Moment(
        "in the loss",
        [
            Term("head", tiled(D, W, item=work.item), "gathered in the compute dtype"),
            Term(
                "head's gradient", copies * tiled(D, W), f"float32, {copies} x: added up, and on its way over the axes"
            ),
            Term(
                "logits", 3 * work.rows * tiled(chunk, W), "of a chunk: float32 logits, their exponentials, gradients"
            ),
            Term("hidden states", 3 * work.time_tokens * D * work.item, "of the context shard, and their gradients"),
        ],
        keeps=True,
    )


def _backward(config: TrainConfig, layout: Layout, parameters: list[Held], work: Work, kind: c.LayerKind) -> Moment:
    """The backward pass of one layer of this kind, which begins with its forward pass unless all is kept."""
    model, here = config.model, _of_a_layer(config.model, parameters, kind)
    stream = work.tokens * model.dim * work.item
    dense = sum(
        compact(*one.used, item=work.item if one.is_cast else 4) for one in here if one.part != "routed experts"
    )
    mixer = (_kda if kind.mixer == "kda" else _mla)(config, layout, work)
    after = _mla_blocks(config, layout, work) if kind.mixer == "mla" else 0
    ffn = _feed_forward(config, layout, here, work, kind)
    terms = [
        *_through_the_pass(config, parameters, work, stream),
        Term("weights", dense, "of a layer, gathered"),
        Term("streams", STREAMS * stream, f"{STREAMS} arrays of tokens between sub-layers"),
        Term(
            "time",
            (layout.tensor > 1) * 2 * work.time_tokens * model.dim * work.item,
            "gathered over tensor, and its gradient",
        ),
        mixer,
        ffn
        if ffn.amount >= after
        else Term("attention", after, "a block of queries: logits and their gradients, float32"),
    ]
    return Moment(f"in the backward pass of a layer of {kind.mixer.upper()} and {kind.ffn} FFN", terms, keeps=True)


def layer_arrays(config: TrainConfig, layout: Layout, parameters: list[Held], work: Work, kind: c.LayerKind) -> float:
    """Bytes of the arrays that a layer of this kind makes, depth sources included."""
    model = config.model
    mixer = (_kda if kind.mixer == "kda" else _mla)(config, layout, work)
    ffn = _feed_forward(config, layout, _of_a_layer(model, parameters, kind), work, kind)
    read = 7 + 2 * attnres.source_slots(model.residual, model.layers)
    return mixer.amount + ffn.amount + read * work.tokens * model.dim * work.item


def _of_a_layer(model: c.ModelConfig, parameters: list[Held], kind: c.LayerKind) -> list[Held]:
    """The parameters of the first run of layers of this kind."""
    for s, segment in enumerate(layer_layout.plan(model.kinds)):
        for r, run in enumerate(segment.runs):
            if run.kind == kind:
                return [one for one in parameters if one.path.startswith(f"segments/{s}/{r}/")]
    raise ValueError(f"no layer is {kind}")


def _through_the_pass(config: TrainConfig, parameters: list[Held], work: Work, stream: int) -> list[Term]:
    """What is alive as long as the backward pass is."""
    model = config.model
    slots = attnres.source_slots(model.residual, model.layers)
    bins = model.moe.balancer.bins if isinstance(model.moe.balancer, c.QuantileBalancing) else 0
    layers = sum(kind.ffn == "moe" for kind in model.kinds)
    alone, runs = 0, [0]
    for s, segment in enumerate(layer_layout.plan(model.kinds)):
        for r, run in enumerate(segment.runs):
            size = sum(math.prod(one.rest) for one in parameters if one.path.startswith(f"segments/{s}/{r}/")) * 4
            if run.count == 1 and segment.repeats > 1:
                alone += size * segment.repeats
            elif segment.repeats > 1:
                runs.append(size * run.count)
    lent = 2 * work.tokens * model.mla.cache_dim * work.item * (model.mla.share > 1)
    return [
        Term("lent keys", lent, "compressed keys and values that layers share, and their gradients"),
        Term("depth sources", slots * stream, "their gradients"),
        Term("counts", layers * tiled(model.moe.experts, bins) if bins else 0, "of the balancer, of all layers"),
        Term("single layers", alone, "float32 weights of runs of one layer, which leave their stack for the loop"),
        Term("a run's layers", 2 * max(runs), "float32 weights and gradients of a run inside of a loop"),
    ]


def _kda(config: TrainConfig, layout: Layout, work: Work) -> Term:
    """In units of one array of heads: q, k, v before and after the convolution, both gates and the output; a state a
    chunk and its inverse, in the compute dtype."""
    spec, heads = config.model.kda, config.model.kda.heads // layout.tensor
    unit = work.rows * (work.time_tokens // work.rows) * tiled(head_groups(heads)[1], spec.head_dim, item=work.item)
    chunks = (spec.head_dim + accounting.KDA_CHUNK / 2) / accounting.KDA_CHUNK
    x = jax.ShapeDtypeStruct((work.rows, work.time_tokens // work.rows, heads, spec.head_dim), jnp.bfloat16)
    taps = jax.ShapeDtypeStruct((spec.conv, heads, spec.head_dim), jnp.float32)
    kernel = describe_short_conv(x, taps, platform="tpu").implementation != "xla"
    count = (10 if kernel else 19) + chunks
    how = "bfloat16" if kernel else "with the convolution in float32"
    return Term("KDA", round(count * unit), f"{count:.1f} arrays of its heads, {how}")


def _mla(config: TrainConfig, layout: Layout, work: Work) -> Term:
    """Queries, keys and values with their gradients; the output and its gradient are float32."""
    spec, heads = config.model.mla, config.model.mla.heads // layout.tensor
    keys = tiled(heads, spec.qk_dim, item=work.item)
    values = tiled(heads, spec.v_dim, item=work.item)
    long = work.time_tokens * layout.context * spec.cache_dim * work.item * (layout.context > 1)
    per_token = 4 * keys + 2 * values + 2 * tiled(heads, spec.v_dim) + values
    return Term("MLA", work.time_tokens * per_token + 2 * long, "queries, keys, values, output, and gradients")


def _mla_blocks(config: TrainConfig, layout: Layout, work: Work) -> int:
    """Two float32 arrays of logits: a block of queries against all keys, or a block of keys where rows are cut."""
    queries = min(QUERY_BLOCK, config.seq_len // layout.context)
    keys = config.seq_len if layout.context == 1 else min(2048, config.seq_len)
    return 2 * work.rows * config.model.mla.heads // layout.tensor * tiled(queries, keys)


def _feed_forward(config: TrainConfig, layout: Layout, here: list[Held], work: Work, kind: c.LayerKind) -> Term:
    wide = next(
        (
            one.used[1]
            for one in here
            if one.meta.role is Role.MATRIX and one.path.endswith(("ffn/gate", "shared/gate"))
        ),
        0,
    )
    hidden = work.time_tokens * wide * work.item
    if kind.ffn == "dense":
        return Term("dense FFN", 5 * hidden, "five arrays of its width")
    experts = sum(compact(*one.used, item=work.item) for one in here if one.part == "routed experts")
    router = 4 * tiled(work.tokens, config.model.moe.experts)
    rows, how, held = _dispatch(config, layout, work)
    return Term("experts", round(3 * hidden + held * experts + router + rows), f"{held} x the gathered experts; {how}")


def _dispatch(config: TrainConfig, layout: Layout, work: Work) -> tuple[float, str, int]:
    """Bytes of rows on their way, in words, and how often the gathered experts are there: themselves, their gradients
    of the passes so far, and of the pass."""
    moe, item = config.model.moe, work.item
    L = moe.latent.dim if moe.latent else config.model.dim
    copies = work.tokens * moe.active
    if layout.expert == 1:
        per_copy = 3 * tiled(copies, L, item=item) + tiled(copies, L) + 3 * tiled(copies, moe.width, item=item)
        return per_copy, "rows of all copies of tokens", 2
    match layout.transport:
        case AllGather(factor):
            rows, everyone = copies * factor, work.tokens * layout.expert
            held = tiled(everyone, L, item=item) + 3 * tiled(everyone, L) + tiled(everyone, moe.active)
            return (
                held + 2 * rows * L * 4,
                "tokens of all ranks, their sums and gradients in float32, rows of a pass",
                2,
            )
        case Balanced():
            return copies * L * item * 7, "copies of tokens, sent and received", 6
        case _:
            rows, halves = copies * layout.transport.factor, 2 * -(-L // (2 * LANES)) * LANES
            held = 4 * copies * L + 3 * rows * L + (copies + 2 * rows) * halves
            return held * item, "copies of tokens, rows of this pass and the next, and as they travel", 3


def _optimizer(config: TrainConfig, parameters: list[Held], stacks: list[Stack]) -> Moment:
    """What Muon makes new beside the old, and the whole matrices that it works on at a time; AdamW updates in place."""
    orthogonalized = [one for one in parameters if one.is_orthogonalized(config.optimizer)]
    new = sum(one.bytes + one.optimizer_bytes(config.optimizer) for one in orthogonalized)
    width = jnp.dtype(config.optimizer.matrices.dtype).itemsize if stacks else 0
    sizes = (4 * one.each * tiled(*one.shape) + 2 * one.padded * math.prod(one.part) * width for one in stacks)
    terms = [
        Term("new state", new, "weights and momenta of matrices, before the old ones go"),
        Term("Muon", max(sizes, default=0), "matrices of a piece, three products of them, and the stack that travels"),
    ]
    return Moment("in the optimizer", terms, keeps=False)


_kept = functools.lru_cache(maxsize=8)(memory.kept)


def kept(config: TrainConfig, devices: int) -> int:
    """What layers keep, by shapes, on a device; as `compiled.memory_of` counts it."""
    per_token, _ = _kept(config.model, min(config.seq_len, 1024))
    return round(per_token * config.batch * config.seq_len / config.micro_batches / devices)
