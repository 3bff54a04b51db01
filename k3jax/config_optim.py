"""Optimizer configuration: frozen dataclasses; the type of a field chooses the variant."""

import dataclasses
import math
from typing import Literal, get_args

NewtonSchulz = Literal["jordan5", "polar5", "polar8", "hybrid10"]
NewtonSchulzDtype = Literal["float32", "bfloat16"]
Heads = Literal["split", "merged"]


def _number(config, name: str, *, low: float, high: float = math.inf, open_low: bool = False, open_high: bool = False):
    """Raises unless field `name` is a finite number in [low, high], either end left out on request."""
    value = getattr(config, name)
    label = f"{type(config).__name__}.{name}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{label} must be a number, got {value!r}")
    inside = (value > low if open_low else value >= low) and (value < high if open_high else value <= high)
    if not (math.isfinite(value) and inside):
        interval = f"{'(' if open_low else '['}{low}, {high}{')' if open_high or high == math.inf else ']'}"
        raise ValueError(f"{label} must be in {interval}, got {value!r}")


def _choice(config, name: str, literal):
    """Raises unless field `name` is one of the values of a Literal."""
    value = getattr(config, name)
    if value not in get_args(literal):
        raise ValueError(f"{type(config).__name__}.{name} must be one of {get_args(literal)}, got {value!r}")


def _instance(config, name: str, types: tuple[type, ...]):
    """Raises unless field `name` is an instance of one of `types`."""
    value = getattr(config, name)
    if not isinstance(value, types):
        allowed = " | ".join("None" if kind is type(None) else kind.__name__ for kind in types)
        raise TypeError(f"{type(config).__name__}.{name} must be {allowed}, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Muon:
    """Momentum orthogonalized by Newton-Schulz (arXiv 2502.16982; per-head blocks of arXiv 2607.24653, 3.3).

    Attributes:
      lr_scale: multiplies the scheduled learning rate.
      momentum: decay of the averaged gradient; the Nesterov look-ahead is always taken.
      weight_decay: decoupled decay, multiplied by the learning rate.
      rms: root mean square of an update at learning rate one. 0.2 is that of AdamW, so its rates carry over.
      factor: what every orthogonalized block is multiplied by instead, whatever its shape: no matching of the root mean
        square (an ablation of arXiv 2502.16982).
      newton_schulz: named table of polynomial coefficients, see `k3jax.optim.muon`.
      dtype: of the Newton-Schulz matrix products. bfloat16 accumulates in float32; the momentum is float32 always.
      heads: 'split' gives each head of a HEADS parameter its own block, 'merged' takes all heads as one matrix.
      eps: added to the Frobenius norm of a block.
    """

    lr_scale: float = 1.0
    momentum: float = 0.95
    weight_decay: float = 0.1
    rms: float = 0.2
    factor: float | None = None
    newton_schulz: NewtonSchulz = "polar5"
    dtype: NewtonSchulzDtype = "float32"
    heads: Heads = "split"
    eps: float = 1e-7

    def __post_init__(self):
        _number(self, "lr_scale", low=0.0)
        _number(self, "momentum", low=0.0, high=1.0, open_high=True)
        _number(self, "weight_decay", low=0.0)
        _number(self, "rms", low=0.0, open_low=True)
        if self.factor is not None:
            _number(self, "factor", low=0.0, open_low=True)
        _number(self, "eps", low=0.0, open_low=True)
        _choice(self, "newton_schulz", NewtonSchulz)
        _choice(self, "dtype", NewtonSchulzDtype)
        _choice(self, "heads", Heads)

    def scale(self, long: int) -> float:
        """What an orthogonalized block with this longer side is multiplied by."""
        return self.rms * math.sqrt(long) if self.factor is None else self.factor


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay; `lr_scale` multiplies the scheduled learning rate."""

    lr_scale: float = 1.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self):
        _number(self, "lr_scale", low=0.0)
        _number(self, "b1", low=0.0, high=1.0, open_high=True)
        _number(self, "b2", low=0.0, high=1.0, open_high=True)
        _number(self, "eps", low=0.0, open_low=True)
        _number(self, "weight_decay", low=0.0)


@dataclasses.dataclass(frozen=True)
class Cosine:
    """Linear warm-up, then half a cosine from `peak` to `floor` (Kimi K3, arXiv 2607.24653, 3.3).

    Attributes:
      peak: largest learning rate.
      floor: learning rate of the last step. Absolute, so that a search over `peak` keeps it fixed.
      warmup: share of all steps spent rising linearly from zero.
    """

    peak: float = 3e-3
    floor: float = 0.0
    warmup: float = 0.01

    def __post_init__(self):
        _number(self, "peak", low=0.0, open_low=True)
        _number(self, "floor", low=0.0, high=self.peak)
        _number(self, "warmup", low=0.0, high=1.0, open_high=True)


@dataclasses.dataclass(frozen=True)
class WSD:
    """Warm-up, stable, decay (MiniCPM, arXiv 2404.06395): as Cosine, but constant until a final linear decay.

    Attributes:
      decay: share of all steps spent falling from `peak` to `floor`.
    """

    peak: float = 3e-3
    floor: float = 0.0
    warmup: float = 0.01
    decay: float = 0.2

    def __post_init__(self):
        _number(self, "peak", low=0.0, open_low=True)
        _number(self, "floor", low=0.0, high=self.peak)
        _number(self, "warmup", low=0.0, high=1.0, open_high=True)
        _number(self, "decay", low=0.0, high=1.0, open_low=True)
        if self.warmup + self.decay > 1:
            raise ValueError(f"WSD.warmup + WSD.decay must be at most 1, got {self.warmup} + {self.decay}")


@dataclasses.dataclass(frozen=True)
class Rewarm:
    """Two schedules in a row, each with its own warm-up: a run that is gone on with at a higher rate, on better or
    longer data (Moonlight, arXiv 2502.16982, 3.2, re-warms and then falls linearly).

    Attributes:
      at: share of all steps that the first one takes; the shares within each are of its own steps.
    """

    first: Cosine | WSD = Cosine()
    second: Cosine | WSD = WSD(warmup=0.01, decay=0.99)
    at: float = 0.8

    def __post_init__(self):
        _instance(self, "first", (Cosine, WSD))
        _instance(self, "second", (Cosine, WSD))
        _number(self, "at", low=0.0, high=1.0, open_low=True, open_high=True)


@dataclasses.dataclass(frozen=True)
class Tunable:
    """A schedule whose peak is an array in the optimizer's state, and not a constant of the compiled step: the runs of
    a search share one program."""

    schedule: Cosine | WSD = Cosine()

    def __post_init__(self):
        _instance(self, "schedule", (Cosine, WSD))


Schedule = Cosine | WSD | Rewarm | Tunable


@dataclasses.dataclass(frozen=True)
class QKClip:
    """Weight clipping of MLA queries and keys (Kimi K2, arXiv 2507.20534): no logit stays above `threshold`."""

    threshold: float = 100.0

    def __post_init__(self):
        _number(self, "threshold", low=0.0, open_low=True)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Who updates what; `k3jax.roles.Role` says which parameters form each group.

    Attributes:
      matrices: whole matrices, heads and experts.
      router: router weights.
      rest: everything that is not a matrix, and the embedding and the head.
      schedule: learning rate over the run, shared by all groups up to their `lr_scale`.
      clip_norm: bound of the global gradient norm, or None.
      qk_clip: clipping of MLA weights after the step, or None.
    """

    matrices: Muon | AdamW = Muon()
    router: Muon | AdamW = AdamW()
    rest: AdamW = AdamW()
    schedule: Schedule = Cosine()
    clip_norm: float | None = 1.0
    qk_clip: QKClip | None = QKClip()

    def __post_init__(self):
        _instance(self, "matrices", (Muon, AdamW))
        _instance(self, "router", (Muon, AdamW))
        _instance(self, "rest", (AdamW,))
        _instance(self, "schedule", (Cosine, WSD, Rewarm, Tunable))
        _instance(self, "qk_clip", (QKClip, type(None)))
        if self.clip_norm is not None:
            _number(self, "clip_norm", low=0.0, open_low=True)
