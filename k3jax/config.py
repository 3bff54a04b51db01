"""Configuration of the model: frozen dataclasses, where a variant is a type and not a flag.

Independent numbers are fields, dependent ones are properties, impossible ones raise in ``__post_init__``. Every class
here is immutable and hashable, so a configuration can be a static argument of a jitted function.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal, NamedTuple

from k3jax.config_checks import ConfigError as ConfigError
from k3jax.config_checks import added, require, require_choice, require_positive
from k3jax.config_memory import Activation as Activation
from k3jax.config_memory import Remat as Remat
from k3jax.config_memory import RematPolicy as RematPolicy
from k3jax.config_memory import Save as Save
from k3jax.config_memory import Storage as Storage

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class BoundedDecay:
    """K3's decay: log-decay ``lower_bound * sigmoid(exp(A) z)``, in (lower_bound, 0) (K3 report, eq. 5)."""

    lower_bound: float = -5.0

    def __post_init__(self):
        require(self.lower_bound < 0, f"BoundedDecay.lower_bound = {self.lower_bound}, but a log-decay is negative")


@dataclass(frozen=True)
class SoftplusDecay:
    """Kimi Linear's decay: log-decay ``-exp(A) softplus(z)``, unbounded below (arXiv 2510.26692)."""


@dataclass(frozen=True)
class HeadDecay:
    """One decay for all key channels of a head, as in Gated DeltaNet (arXiv 2412.06464); ``None`` is its softplus."""

    lower_bound: float | None = -5.0

    def __post_init__(self):
        bound = self.lower_bound
        require(bound is None or bound < 0, f"HeadDecay.lower_bound = {bound}, but a log-decay is negative")


@dataclass(frozen=True)
class NoDecay:
    """Only writing forgets (DeltaNet, arXiv 2406.06484)."""


@dataclass(frozen=True)
class DeltaRule:
    """A write first takes out what its key brings up: ``(I - beta k k^T) S + beta k v^T`` (arXiv 2406.06484)."""


@dataclass(frozen=True)
class AdditiveRule:
    """A write is added to what is there, ``S + beta k v^T``: linear attention, decayed by head as in Mamba-2
    (arXiv 2405.21060)."""


@dataclass(frozen=True)
class FullRankGate:
    """Sigmoid output gate from one full matrix of the layer input (K3)."""


@dataclass(frozen=True)
class LowRankGate:
    """Sigmoid output gate through a bottleneck (Kimi Linear's KDA)."""

    rank: int

    def __post_init__(self):
        require_positive(self, "rank")


@dataclass(frozen=True)
class SwishGate:
    """As FullRankGate with ``x sigmoid(x)`` in place of the sigmoid (an ablation of arXiv 2510.26692)."""


@dataclass(frozen=True)
class NoGate:
    """No output gate."""


@dataclass(frozen=True)
class KDA:
    """Kimi Delta Attention, and with other decays and rules its ancestors. ``forget_rank`` is the bottleneck of the
    forget gate of channels, shared by all heads."""

    heads: int
    head_dim: int
    forget_rank: int
    conv: int = 4
    decay: BoundedDecay | SoftplusDecay | HeadDecay | NoDecay = BoundedDecay()
    rule: DeltaRule | AdditiveRule = DeltaRule()
    output_gate: FullRankGate | LowRankGate | SwishGate | NoGate = FullRankGate()

    def __post_init__(self):
        require_positive(self, "heads", "head_dim", "forget_rank", "conv")
        by_head = isinstance(self.decay, HeadDecay | NoDecay) or isinstance(self.rule, DeltaRule)
        require(by_head, f"KDA.rule = AdditiveRule() takes a HeadDecay or NoDecay, not KDA.decay = {self.decay}")


@dataclass(frozen=True)
class NoPE:
    """No position encoding: order comes from the KDA layers and the causal mask (K3)."""


@dataclass(frozen=True)
class RoPE:
    """Rotary encoding on the shared key slice and its query counterpart (an ablation; arXiv 2104.09864)."""

    theta: float = 10000.0

    def __post_init__(self):
        require(self.theta > 1, f"RoPE.theta = {self.theta}, but it must be above 1")


@dataclass(frozen=True)
class MLA:
    """Gated multi-head latent attention. ``q_rank=None`` is a plain query projection (Kimi Linear).

    ``shared_dim`` is the key slice that all heads share (the released ``qk_rope_head_dim``); it stays part of the
    dot product when there is no position encoding. ``share`` is how many MLA layers in a row read the compressed keys
    and values of the first of them (an ablation; Cross-Layer Attention, arXiv 2405.12981).
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    shared_dim: int
    v_dim: int
    position: NoPE | RoPE = NoPE()
    output_gate: FullRankGate | NoGate = FullRankGate()
    share: int = added(1)

    def __post_init__(self):
        require_positive(self, "heads", "kv_rank", "nope_dim", "shared_dim", "v_dim", "share")
        require(self.q_rank is None or self.q_rank >= 1, f"MLA.q_rank = {self.q_rank}: use None for a plain projection")
        even = isinstance(self.position, NoPE) or self.shared_dim % 2 == 0
        require(even, f"MLA.shared_dim = {self.shared_dim}, but RoPE rotates pairs: it must be even")

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.shared_dim

    @property
    def cache_dim(self) -> int:
        """Values cached per token: the normalized latent and the shared key."""
        return self.kv_rank + self.shared_dim


@dataclass(frozen=True)
class SiTU:
    """``[b1 tanh(g/b1) sigmoid(g)] [b2 tanh(u/b2)]``: bounded by b1*b2 (K3 report, eq. 12)."""

    beta: float = 4.0
    linear_beta: float = 25.0

    def __post_init__(self):
        require(self.beta > 0 and self.linear_beta > 0, f"SiTU betas must be positive, got {self}")


@dataclass(frozen=True)
class SwiGLU:
    """``silu(g) u`` (arXiv 2002.05202)."""


@dataclass(frozen=True)
class ClampedSwiGLU:
    """``silu(min(g, limit)) clip(u, -limit, limit)`` (gpt-oss, arXiv 2508.10925)."""

    limit: float = 7.0

    def __post_init__(self):
        require(self.limit > 0, f"ClampedSwiGLU.limit = {self.limit}, but it must be positive")


@dataclass(frozen=True)
class QuantileBalancing:
    """Histogram estimator of Quantile Balancing over the global batch (K3 report, section 2.3.3, appendix D).

    Attributes:
      bins: of the histogram of every expert.
      window: steps whose tokens make one update of the bias, for batches with few tokens per expert; K3 has 1.
    """

    bins: int = 1000
    window: int = 1

    def __post_init__(self):
        require(self.bins >= 2, f"QuantileBalancing.bins = {self.bins}, but it must be at least 2")
        require_positive(self, "window")


@dataclass(frozen=True)
class ExactQuantileBalancing:
    """Quantile Balancing from all margins of the batch: exact, and as large as tokens x experts."""


@dataclass(frozen=True)
class SignRule:
    """Loss-free balancing: the bias moves by ``rate`` against the sign of the overload (arXiv 2408.15664)."""

    rate: float = 1e-3

    def __post_init__(self):
        require(self.rate > 0, f"SignRule.rate = {self.rate}, but it must be positive")


@dataclass(frozen=True)
class AuxLoss:
    """Auxiliary load-balancing loss ``weight * E * sum_e load_e * score_e`` (arXiv 2101.03961), and no bias."""

    weight: float = 1e-2

    def __post_init__(self):
        require(self.weight > 0, f"AuxLoss.weight = {self.weight}, but it must be positive")


@dataclass(frozen=True)
class NoBalancing:
    """Nothing balances the experts (an ablation)."""


Balancer = QuantileBalancing | ExactQuantileBalancing | SignRule | AuxLoss | NoBalancing


@dataclass(frozen=True)
class Latent:
    """Experts work in a latent of this width; ``norm`` is K3's RMSNorm before the up-projection."""

    dim: int
    norm: bool = True

    def __post_init__(self):
        require_positive(self, "dim")


@dataclass(frozen=True)
class MoE:
    """Mixture of experts: Stable LatentMoE with ``latent``, an ordinary MoE without (K3 report, eq. 11)."""

    experts: int
    active: int
    width: int
    shared: int
    latent: Latent | None = None
    scale: float = 1.0
    balancer: Balancer = QuantileBalancing()

    def __post_init__(self):
        require_positive(self, "experts", "active", "width")
        require(self.shared >= 0, f"MoE.shared = {self.shared}, but it must not be negative")
        require(
            self.active < self.experts,
            f"MoE.active = {self.active} of {self.experts} experts, but it must be below the number of experts "
            "(balancing needs the score of the first expert left out)",
        )


@dataclass(frozen=True)
class PlainResidual:
    """``x + f(x)``."""


@dataclass(frozen=True)
class KeyNorm:
    """Depth sources are normalized before they are scored (arXiv 2603.15031)."""


@dataclass(frozen=True)
class NoKeyNorm:
    """Depth sources are scored as they are (an ablation)."""


@dataclass(frozen=True)
class ZeroQuery:
    """Pseudo-queries start at zero: every source weighs the same (arXiv 2603.15031)."""


@dataclass(frozen=True)
class RandomQuery:
    """Pseudo-queries start as normal numbers with this standard deviation (an ablation)."""

    std: float = 0.02

    def __post_init__(self):
        require(self.std > 0, f"RandomQuery.std = {self.std}, but it must be positive")


@dataclass(frozen=True)
class BlockAttnRes:
    """Block Attention Residuals: ``block`` counts decoder layers (K3 report, section 2.2; arXiv 2603.15031)."""

    block: int
    keys: KeyNorm | NoKeyNorm = KeyNorm()
    query: ZeroQuery | RandomQuery = ZeroQuery()

    def __post_init__(self):
        require_positive(self, "block")


@dataclass(frozen=True)
class FullAttnRes:
    """Full Attention Residuals: every sub-layer mixes the outputs of all sub-layers before it (arXiv 2603.15031)."""

    keys: KeyNorm | NoKeyNorm = KeyNorm()
    query: ZeroQuery | RandomQuery = ZeroQuery()


Residual = PlainResidual | BlockAttnRes | FullAttnRes


class LayerKind(NamedTuple):
    """What distinguishes one decoder layer's code from another's. ``borrows``: an MLA layer that reads the compressed
    keys and values of an earlier one."""

    mixer: Literal["kda", "mla"]
    ffn: Literal["dense", "moe"]
    borrows: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """The text backbone. ``full_attention`` lists the MLA layers, counted from 1 as in the released configuration.

    ``loops`` is how often the whole stack of layers is gone through, with the same weights (an ablation).
    ``dtype`` is the compute dtype; parameters are float32 masters, and the places that stay float32 whatever
    ``dtype`` is are named where they are computed.
    """

    vocab: int
    dim: int
    layers: int
    full_attention: tuple[int, ...]
    kda: KDA
    mla: MLA
    dense_width: int
    dense_layers: int
    moe: MoE
    residual: Residual
    loops: int = 1
    activation: SiTU | SwiGLU | ClampedSwiGLU = SiTU()
    eps: float = 1e-5
    init_std: float = 0.02
    dtype: Dtype = "bfloat16"
    remat: RematPolicy = "full"

    def __post_init__(self):
        require_positive(self, "vocab", "dim", "layers", "dense_width", "loops")
        require(
            self.loops == 1 or isinstance(self.residual, PlainResidual),
            f"ModelConfig.loops = {self.loops} with {self.residual}, but only a PlainResidual can be looped over",
        )
        wrong = [n for n in self.full_attention if not 1 <= n <= self.layers]
        require(not wrong, f"ModelConfig.full_attention has {wrong}, but layers are counted from 1 to {self.layers}")
        ordered = list(self.full_attention) == sorted(set(self.full_attention))
        require(ordered, f"ModelConfig.full_attention must increase without repeats, got {self.full_attention}")
        require(
            self.mla.share == 1 or len(self.full_attention) > 1,
            f"MLA.share = {self.mla.share}, but ModelConfig.full_attention = {self.full_attention} has no two layers "
            "that could share; use 1",
        )
        require(
            0 <= self.dense_layers <= self.layers,
            f"ModelConfig.dense_layers = {self.dense_layers}, but the model has {self.layers} layers",
        )
        require_choice(self, "dtype", Dtype)
        if not isinstance(self.remat, Save):
            require_choice(self, "remat", Remat)
        for name in ("eps", "init_std"):
            value = getattr(self, name)
            require(value > 0, f"ModelConfig.{name} = {value}, but it must be positive")

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, first layer first."""
        borrows = {n: place % self.mla.share > 0 for place, n in enumerate(self.full_attention)}

        def kind(n: int) -> LayerKind:
            ffn = "dense" if n <= self.dense_layers else "moe"
            return LayerKind("mla" if n in borrows else "kda", ffn, borrows.get(n, False))

        return tuple(kind(n) for n in range(1, self.layers + 1))


def every_fourth(layers: int, *, last: bool = True) -> tuple[int, ...]:
    """MLA positions of the 3:1 pattern; ``last`` makes the final layer MLA too, as in K3 (4, 8, ..., 92, 93)."""
    return tuple(sorted({*range(4, layers + 1, 4), *([layers] if last else [])}))


replace = dataclasses.replace
