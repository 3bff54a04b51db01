"""What a configuration costs, from shapes alone: parameters, floating-point operations, bytes. Nothing is allocated."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax import config as c
from k3jax.config_optim import Muon, Optimizer
from k3jax.model import kda, layout, mla, weights
from k3jax.model.transformer import init_decode_state
from k3jax.roles import ParamMeta, Role, meta_by_path, path_name

KDA_CHUNK = 64
PARTS = (
    "embedding", "head", "KDA", "MLA", "routed experts", "shared experts", "latent projections", "router", "dense FFN",
    "norms", "attention residuals",
)  # fmt: skip


class Parameter(NamedTuple):
    """One array of the model. ``shape`` includes the leading layer axes; ``meta`` is None for the router bias, which is
    not trained by a gradient."""

    path: str
    shape: tuple[int, ...]
    part: str
    meta: ParamMeta | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stacked(self) -> int:
        """Leading layer axes."""
        return len(self.shape) - (1 if self.meta is None else len(self.meta.axes))


class Counts(NamedTuple):
    """Parameters of a model. ``active`` is what one token multiplies with or adds: of the routed experts the share that
    it visits, the head, and not the embedding table, of which it reads one row."""

    parts: dict[str, int]
    total: int
    active: int


class Flops(NamedTuple):
    """Forward operations per token, by part; a multiply-add counts as two."""

    parts: dict[str, float]

    @property
    def forward(self) -> float:
        return sum(self.parts.values())

    @property
    def backward(self) -> float:
        """Two products of the forward's size for each of its products; recomputation is not counted."""
        return 2 * self.forward


class CacheBytes(NamedTuple):
    """Memory of decoding, in the model's compute dtype. The state of the KDA layers is float32."""

    mla_per_token: int
    kda_state: int
    kda_conv: int


def parameters(model: c.ModelConfig) -> list[Parameter]:
    """Every array of the model, router biases last."""
    structure, segments = weights.structure(model), layout.plan(model.kinds)
    metas = meta_by_path(structure.meta)

    def described(tree, metas):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = path_name(path)
            meta = metas.get(name)
            yield Parameter(name, leaf.shape, _part(name.split("/"), meta, segments), meta)

    return [*described(structure.shapes.params, metas), *described(structure.shapes.router, {})]


def _part(names: list[str], meta: ParamMeta | None, segments: tuple[layout.Segment, ...]) -> str:
    """The part of the model, one of PARTS, that a parameter with this path belongs to."""
    whole_model = {"embed": "embedding", "head": "head", "norm": "norms", "mix": "attention residuals"}
    if names[0] != "segments":
        return whole_model[names[0]]
    kind = segments[int(names[1])].runs[int(names[2])].kind
    match names[3:]:
        case [("mixer_norm" | "ffn_norm")]:
            return "norms"
        case [("mixer_mix" | "ffn_mix"), _]:
            return "attention residuals"
        case ["mixer", *_]:
            return kind.mixer.upper()
        case ["ffn", "shared", _]:
            return "shared experts"
        case ["ffn", ("latent_down" | "latent_up" | "latent_norm")]:
            return "latent projections"
        case ["ffn", ("router" | "bias")]:
            return "router"
        case ["ffn", _] if meta is not None:
            return "routed experts" if meta.role is Role.EXPERTS else "dense FFN"
    raise ValueError(f"parameter {'/'.join(names)} belongs to no part of the model")


def count_parameters(model: c.ModelConfig) -> Counts:
    """Parameters by part, in all, and active for one token. The router bias is counted."""
    parts = dict.fromkeys(PARTS, 0)
    for parameter in parameters(model):
        parts[parameter.part] += parameter.size
    idle_experts = parts["routed experts"] * (model.moe.experts - model.moe.active) // model.moe.experts
    total = sum(parts.values())
    return Counts(parts, total, total - idle_experts - parts["embedding"])


def flops_per_token(model: c.ModelConfig, seq_len: int) -> Flops:
    """Operations of matrix products for one token of a document as long as a row.

    weights: 2 per active entry of a weight matrix, the head included, the embedding not.
    MLA: 2 H (qk_dim + v_dim) per pair of a query and a key that it sees, of which there are (T + 1) / 2 a token.
    KDA: H (6 K^2 + 3 C K + C^2) with chunks of C = 64 (Kimi Linear, arXiv 2510.26692, section 6.3).
    Layers count as often as they are gone through.
    Norms, convolutions, activations, depth mixtures and the balancer are not counted: they are no matrix products.
    """
    matmul = (Role.MATRIX, Role.HEADS, Role.ROUTER, Role.UNEMBEDDING, Role.EXPERTS)
    used = [p for p in parameters(model) if p.meta is not None and p.meta.role in matmul]
    share = {Role.EXPERTS: model.moe.active / model.moe.experts}

    def times(parameter: Parameter) -> float:
        return share.get(parameter.meta.role, 1) * (model.loops if parameter.path.startswith("segments") else 1)

    mixers = model.loops * [kind.mixer for kind in model.kinds]
    pairs = (seq_len + 1) / 2
    H, K, C = model.kda.heads, model.kda.head_dim, KDA_CHUNK
    return Flops(
        {
            "weights": sum(2 * p.size * times(p) for p in used),
            "MLA": mixers.count("mla") * 2 * model.mla.heads * (model.mla.qk_dim + model.mla.v_dim) * pairs,
            "KDA": mixers.count("kda") * H * (6 * K**2 + 3 * C * K + C**2),
        }
    )


def optimizer_bytes(model: c.ModelConfig, optimizer: Optimizer) -> dict[str, int]:
    """Bytes of optimizer state: a float32 momentum under Muon, two float32 moments under AdamW."""
    sizes = {"Muon momentum": 0, "Adam moments": 0}
    for parameter in parameters(model):
        if parameter.meta is None:
            continue
        if isinstance(getattr(optimizer, parameter.meta.role.group), Muon):
            sizes["Muon momentum"] += 4 * parameter.size
        else:
            sizes["Adam moments"] += 8 * parameter.size
    return sizes


def checkpoint_bytes(model: c.ModelConfig, optimizer: Optimizer) -> int:
    """Bytes of a training checkpoint: float32 master weights, router biases and optimizer state."""
    return 4 * count_parameters(model).total + sum(optimizer_bytes(model, optimizer).values())


def cache_bytes(model: c.ModelConfig) -> CacheBytes:
    """Bytes that one sequence keeps while it is decoded, from the cache that decoding uses."""
    state = jax.eval_shape(lambda: init_decode_state(model, batch=1, length=1))
    caches = [cache for segment in state.caches for cache in segment]
    latents = [cache for cache in caches if isinstance(cache, mla.MLACache)]
    states = [cache for cache in caches if isinstance(cache, kda.KDACache)]
    return CacheBytes(
        mla_per_token=_bytes(latents),
        kda_state=_bytes([cache.state for cache in states]),
        kda_conv=_bytes([cache.conv for cache in states]),
    )


def _bytes(tree) -> int:
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
