"""The numbers of a run that a study may decide by or show, from what lies in the run's folder.

    bits_per_byte          of all held-out text, at the end
    loss                   nats per token of training, mean of the last tenth of the logged steps
    accuracy               of all tasks: mean over their cells (lengths, or lengths and depths)
    accuracy@64, nats@64   of the cells of one length (of several tasks: Task.accuracy@64)
    recall@8-15            accuracy by the distance of the answer, between powers of two
    max_over_mean          largest expert load over the mean one, mean over layers and the last tenth; the first
    max_over_mean_start    tenth; share of experts without a token
    dead_share, dead_share_start
    max_logit              largest attention logit of the whole run
    long_bits_per_byte     of held-out text in rows `stretch` times as long as those trained on, at the end
    hidden_max             largest magnitude of the hidden state after any layer, on a training batch, at the end
    activation_max         largest magnitude of what goes into a down projection (dense, shared or routed experts: gate
                           times up) in any layer, on the same batch, at the end
    skipped                steps that the guards did not apply

and of the configuration: parameters and active_parameters without embedding and head, flops_per_token of training,
dispatch_bytes (what a token sends to its experts and gets back in bfloat16), cache_bytes (of 4,096 tokens).
"""

import pathlib
import re
from typing import Any

import numpy as np

from experiments.files import lines, read
from k3jax import accounting
from k3jax.run_config import TrainConfig
from k3jax.telemetry.line import model_flops_per_token

SIZES = ("parameters", "active_parameters", "flops_per_token", "dispatch_bytes", "cache_bytes")
NAMES = (
    "bits_per_byte", "loss", "accuracy", "max_over_mean", "max_over_mean_start", "dead_share", "dead_share_start",
    "max_logit", "long_bits_per_byte", "hidden_max", "activation_max", "skipped", *SIZES, "tokens", "flops",
)  # fmt: skip
CELL = re.compile(r"(\w+\.)?((accuracy|nats)@\d+|recall@\d+-\d+)")


def known(name: str) -> bool:
    """Whether some run could measure a number of this name."""
    return name in NAMES or CELL.fullmatch(name) is not None


def measures(folder: pathlib.Path) -> dict[str, float]:
    """What a finished run measured, by name.

    Raises:
      ConfigError: a file of the run is cut off.
    """
    summary = read(folder / "summary.json")
    logged = lines(folder, steps=summary.get("steps"))
    train = [line for line in logged if line["kind"] == "train"]
    tenth = max(1, len(train) // 10)
    found = {"loss": _mean([line["loss"] for line in train[-tenth:]])}
    bits = summary.get("bits_per_byte")
    found |= {} if bits is None else {"bits_per_byte": bits}
    found |= _balance(train, tenth)
    logits = [line["max_attention_logit"] for line in train if line.get("max_attention_logit")]
    found |= {"max_logit": float(np.nanmax(np.array(logits, float)))} if logits else {}
    found["skipped"] = float(sum(line.get("event") == "skipped" for line in logged))
    found |= read(folder / "more.json")
    return found | _accuracy(read(folder / "evaluation.json").get("tasks", []))


def _balance(train: list[dict[str, Any]], tenth: int) -> dict[str, float]:
    found = {}
    for name in ("max_over_mean", "dead_share"):
        values = [_mean(line["balance"][name]) for line in train if "balance" in line]
        if values:
            found |= {name: _mean(values[-tenth:]), f"{name}_start": _mean(values[:tenth])}
    return found


def _accuracy(tasks: list[dict[str, Any]]) -> dict[str, float]:
    if not tasks:
        return {}
    found = {"accuracy": _mean([_mean([cell["accuracy"] for cell in task["cells"]]) for task in tasks])}
    for task in tasks:
        prefix = f"{task['task']}." if len(tasks) > 1 else ""
        for length in sorted({cell["length"] for cell in task["cells"]}):
            cells = [cell for cell in task["cells"] if cell["length"] == length]
            found[f"{prefix}accuracy@{length}"] = _mean([cell["accuracy"] for cell in cells])
            found[f"{prefix}nats@{length}"] = _mean([cell["nats"] for cell in cells])
        for distance in task["distances"]:
            found[f"{prefix}recall@{distance['from']}-{distance['to']}"] = distance["accuracy"]
    return found


def _mean(values: list[float | None]) -> float:
    """Mean; infinite when a number was not finite, which metric lines write as null."""
    return float(np.mean([np.inf if value is None else value for value in values]))


def sizes(config: TrainConfig) -> dict[str, float]:
    """What a configuration costs, by name."""
    counts, model = accounting.count_parameters(config.model), config.model
    embedding, head = counts.parts["embedding"], counts.parts["head"]
    width = model.moe.latent.dim if model.moe.latent else model.dim
    experts = any(kind.ffn == "moe" for kind in model.kinds)
    cache = accounting.cache_bytes(model)
    return {
        "parameters": counts.total - embedding - head,
        "active_parameters": counts.active - head,
        "flops_per_token": model_flops_per_token(model, config.seq_len),
        "dispatch_bytes": 2 * 2 * model.moe.active * width if experts else 0,
        "cache_bytes": cache.mla_per_token * 4096 + cache.kda_state + cache.kda_conv,
    }
