"""The training line of a step: what the step reported, and what the host knows about it."""

import math
import resource
import sys
from typing import Any

import jax
import numpy as np
import psutil

from k3jax import accounting
from k3jax.config import ModelConfig
from k3jax.step import StepMetrics
from k3jax.telemetry.clock import Clock, Pace, goodput


def train_line(
    seen: StepMetrics,
    clock: Clock,
    *,
    lr: float,
    tokens_per_step: int,
    flops_per_token: float,
    peak_flops: float | None,
    bytes_per_token: float | None = None,
) -> dict[str, Any]:
    """The fields of a `train` line but step and kind (schema: `k3jax.metrics`). Waits for the step if it is not done.

    Args:
      seen: what the step reported, on the device or fetched.
      clock: the run's account, with the steps since the line before settled.
      lr: learning rate of the step.
      tokens_per_step: tokens of a step over all devices, padding included.
      flops_per_token: :func:`model_flops_per_token`.
      peak_flops: operations per second of all devices together, or None.
      bytes_per_token: of the training text, EOS being a token without a byte; None where it is no text.
    """
    seen = jax.device_get(seen)
    totals, pace = clock.totals(), clock.pace()
    speed = pace.steps * tokens_per_step / pace.time.total if pace.steps else None
    bits = float(seen.loss) / math.log(2)
    line = {
        "loss": seen.loss,
        "bits_per_token": bits,
        "bits_per_byte": bits / bytes_per_token if bytes_per_token else None,
        "accuracy": seen.accuracy,
        "lr": lr,
        "grad_norm": seen.grad_norm,
        "grad_norm_by_role": seen.grad_norm_by_role,
        "param_norm_by_role": seen.param_norm_by_role,
        "update_rms": seen.update_rms,
        "tokens_per_second": speed,
        "mfu": flops_per_token * speed / peak_flops if speed and peak_flops else None,
        "step_seconds": _mean(pace),
        "goodput": goodput(totals),
        "memory": memory(),
        "seconds": sum(totals.values()),
        **by_layer(seen.layers),
    }
    return {name: value for name, value in line.items() if value is not None}


def model_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Operations that training needs for one token: forward, and twice that backward.

    Model FLOP utilization is this number times tokens per second over the peak of all devices. Recomputation under a
    rematerialization policy is not counted, so that it lowers the utilization; padding counts as tokens; attention is
    that of documents as long as a row (`k3jax.accounting.flops_per_token`), more than short packed documents need.
    """
    flops = accounting.flops_per_token(model, seq_len)
    return flops.forward + flops.backward


def by_layer(layers: dict[str, np.ndarray]) -> dict[str, Any]:
    """The numbers of :func:`k3jax.observe.layer_metrics` under the names of the metrics line."""
    line = {}
    if "load" in layers:
        line["balance"] = {
            "max_over_mean": layers["load_max_over_mean"],
            "dead_share": layers["dead_share"],
            "margin": layers["margin"],
            "bias_drift": layers["bias_drift"],
        }
    if "max_logit" in layers:
        line["max_attention_logit"] = layers["max_logit"].max(axis=1)
    if "state_norm" in layers:
        names = ("log_decay_mean", "log_decay_min", "log_decay_max", "state_norm")
        line["kda"] = {name: layers[name] for name in names}
    if "depth_weights" in layers:
        mixer, ffn = np.moveaxis(layers["depth_weights"], 1, 0)
        line["depth_weights"] = {"mixer": mixer, "ffn": ffn}
    return line


def memory() -> dict[str, Any]:
    """Bytes in use, at most so far, and available: of the fullest local device, or of this process where devices do
    not say."""
    found = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    if found:
        fullest = max(found, key=lambda stats: stats.get("peak_bytes_in_use", 0))
        names = {"bytes": "bytes_in_use", "peak_bytes": "peak_bytes_in_use", "limit_bytes": "bytes_limit"}
        return {"of": "device"} | {name: fullest[key] for name, key in names.items() if key in fullest}
    unit = 1 if sys.platform == "darwin" else 1024
    used = psutil.Process().memory_info().rss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"of": "process", "bytes": used, "peak_bytes": max(peak, used)}


def _mean(pace: Pace) -> dict[str, float] | None:
    if not pace.steps:
        return None
    return {name: seconds / pace.steps for name, seconds in pace.time._asdict().items()}
