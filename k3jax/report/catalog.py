"""What the report knows about the numbers that training logs: where each is shown, under which title, on which scale.

A number that is not named here is shown all the same, in the last section, under its own name.
"""

import dataclasses
from typing import Literal

SECTIONS = {
    "loss": "Loss",
    "optimization": "Optimization",
    "speed": "Speed and memory",
    "experts": "Experts",
    "attention": "Attention and recurrent state",
    "depth": "Depth",
    "evaluation": "Evaluation",
    "further": "Further numbers",
}
Scale = Literal["auto", "log", "zero"]
Unit = Literal["", "%", "x", "bytes", "s"]


@dataclasses.dataclass(frozen=True)
class Spec:
    """How a field, or a group of fields `name.*`, is shown.

    Attributes:
      scale: of the value axis; "auto" is logarithmic for positive numbers that span a factor of 30.
      extreme: which end is the bad one, if any; where many values share a pixel of a heat map, it is shown.
      layers: which layers a list counts, for its row labels.
      inner: what the innermost of several nested lists counts.
      stacked: the fields of the group are parts of a whole.
    """

    section: str
    title: str
    note: str = ""
    unit: Unit = ""
    scale: Scale = "auto"
    extreme: Literal["", "high", "low"] = ""
    layers: Literal["", "MoE", "MLA", "KDA", "all"] = ""
    inner: Literal["", "head", "source"] = ""
    stacked: bool = False


SPECS = {
    "grad_norm": Spec("optimization", "Gradient norm", "Of the whole gradient, before clipping."),
    "lr": Spec("optimization", "Learning rate", scale="zero"),
    "grad_norm_by_role": Spec("optimization", "Gradient norm by role", "Before clipping.", scale="log"),
    "param_norm_by_role": Spec("optimization", "Parameter norm by role", "After the step.", scale="log"),
    "update_rms": Spec(
        "optimization", "Update size by role", "Root mean square of what a step added.", scale="log"
    ),
    "accuracy": Spec("optimization", "Next-token accuracy", "On training batches.", "%", "zero"),
    "tokens_per_second": Spec("speed", "Tokens per second", scale="zero"),
    "mfu": Spec("speed", "Model FLOP utilization", "", "%", "zero"),
    "step_seconds": Spec(
        "speed", "Time of a step", "What the loop waited for, and what it did itself.", "s", "zero", stacked=True
    ),
    "clock_share": Spec(
        "speed", "Where the wall-clock time went", "Shares of all time since the first start, restarts included.", "%",
        "zero", stacked=True,
    ),
    "goodput": Spec("speed", "Goodput", "Share of the wall-clock time in steps that count.", "%", "zero"),
    "memory": Spec("speed", "Memory", "", "bytes", "zero"),
    "balance.max_over_mean": Spec(
        "experts", "Load of the busiest expert", "Tokens of the busiest expert over the mean of its layer; 1x is even.",
        "x", "log", "high", layers="MoE",
    ),
    "balance.dead_share": Spec(
        "experts", "Experts without a token", "Share of a layer's experts that got no token in a step.", "%", "zero",
        "high", layers="MoE",
    ),
    "balance.bias_drift": Spec(
        "experts", "Drift of the router bias", "Root mean square over experts of what a step added to the bias.",
        layers="MoE",
    ),
    "balance.margin": Spec(
        "experts", "Router margin",
        "Mean gap of the biased scores between the last expert chosen and the first left out: near zero the choice is "
        "a coin toss.", extreme="low", layers="MoE",
    ),
    "max_attention_logit": Spec(
        "attention", "Largest attention logit", "Over all heads and tokens of a layer.", extreme="high", layers="MLA",
        inner="head",
    ),
    "kda.state_norm": Spec(
        "attention", "Norm of the KDA state", "Root mean square over rows and heads, after a row's last token.",
        layers="KDA",
    ),
    "kda.log_decay_mean": Spec(
        "attention", "KDA log-decay, mean", "Over tokens, heads and channels; a token keeps exp of it of the state.",
        layers="KDA",
    ),
    "kda.log_decay_min": Spec(
        "attention", "KDA log-decay, lowest", "The fastest forgetting of a layer.", layers="KDA"
    ),
    "kda.log_decay_max": Spec(
        "attention", "KDA log-decay, highest", "The slowest forgetting of a layer.", layers="KDA"
    ),
    "depth_weights.mixer": Spec(
        "depth", "Attention residuals before the mixer",
        "Mean weight of every source: the embedding first, the running sum last.", "%", "zero", layers="all",
        inner="source",
    ),
    "depth_weights.ffn": Spec(
        "depth", "Attention residuals before the feed-forward part",
        "Mean weight of every source: the embedding first, the running sum last.", "%", "zero", layers="all",
        inner="source",
    ),
}  # fmt: skip

COUNTERS = frozenset(["seconds", "tokens", "unix"])  # axes, not curves
HIDDEN = COUNTERS | {"loss", "bits_per_byte", "bits_per_token"}  # what the chart of the loss shows


def split(name: str, *, scalar: bool) -> tuple[str, str]:
    """(group, member) of a field's name: scalars `group.member` share a chart, a list has its own."""
    group, dot, member = name.rpartition(".")
    return (group, member) if dot and scalar else (name, "")


def words(name: str) -> str:
    """`router_margin` as `Router margin`."""
    text = name.replace("_", " ").replace(".", ", ")
    return text[:1].upper() + text[1:]
