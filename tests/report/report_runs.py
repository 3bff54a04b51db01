"""Run folders as training leaves them, with every field that it logs."""

import json
import pathlib
import time

import numpy as np

from k3jax import config_io, presets

ROLES = ("conv", "embedding", "experts", "heads", "matrix", "norm", "router", "unembedding", "vector")
SUMMARY = {
    "bits_per_byte": 2.125,
    "held_out_bytes": 593_526,
    "seconds": 402.3,
    "parameters": 5_312_448,
    "active_parameters": 1_350_171,
    "baselines": {"gzip": {"whole": 2.5, "per_file": 2.75}, "xz": {"whole": 2.0, "per_file": 2.625}},
}
MOE, MLA, KDA, LAYERS = 10, 4, 9, 13
SPIKE = 0.617  # where in the run one step's loss and gradient jump


def numbers(rng, *shape: int, around: float = 1.0, spread: float = 0.1):
    """Positive numbers with seven digits at most, as training writes them."""
    return np.round(around * np.exp(spread * rng.standard_normal(shape)), 7)


def train_lines(steps: int, *, upto: int | None = None, seed: int = 0) -> list[dict]:
    """The training lines of a run: the first `upto` of `steps`, one a step."""
    rng = np.random.default_rng(seed)
    last, part = upto or steps, np.arange(1, (upto or steps) + 1) / steps
    loss = np.round(1.3 + 4.2 * np.exp(-30 * part) - 0.4 * part + 0.05 * rng.standard_normal(last), 6)
    roles = {key: numbers(rng, last, len(ROLES)).tolist() for key in ("grad_norm_by_role", "param_norm_by_role")}
    roles["update_rms"] = numbers(rng, last, len(ROLES), around=1e-3).tolist()
    balance = {"max_over_mean": 1 + numbers(rng, last, MOE), "margin": numbers(rng, last, MOE, around=0.05)}
    balance |= {"dead_share": np.round(rng.uniform(0, 0.2, (last, MOE)), 4), "bias_drift": numbers(rng, last, MOE)}
    kda = {f"log_decay_{end}": -numbers(rng, last, KDA) for end in ("mean", "min", "max")}
    kda["state_norm"] = numbers(rng, last, KDA, around=3.0)
    balance, kda = ({key: value.tolist() for key, value in group.items()} for group in (balance, kda))
    logits, grads = numbers(rng, last, MLA, around=10.0).tolist(), numbers(rng, last).tolist()
    sites = [1 + min(4, layer // 3 + 1) for layer in range(LAYERS)]
    depth = [[round(1 / sources, 5)] * sources for sources in sites]
    began = time.time() - 30 - 0.9 * last
    return [
        {
            "step": i + 1,
            "kind": "train",
            "loss": float(loss[i]),
            "bits_per_token": float(loss[i] / np.log(2)),
            "bits_per_byte": float(loss[i] / np.log(2)),
            "accuracy": 0.4,
            "lr": 1e-3,
            "grad_norm": grads[i],
            **{key: dict(zip(ROLES, value[i])) for key, value in roles.items()},
            "tokens_per_second": 1e4 + i % 7,
            "mfu": 0.31,
            "step_seconds": {"data": 0.01, "device": 0.8, "host": 0.05},
            "goodput": 0.9,
            "memory": {"bytes": 2.8e9, "peak_bytes": 3.1e9, "limit_bytes": 8e10, "of": "device"},
            "seconds": 30 + 0.9 * i,
            "balance": {key: value[i] for key, value in balance.items()},
            "max_attention_logit": logits[i],
            "kda": {key: value[i] for key, value in kda.items()},
            "depth_weights": {"mixer": depth, "ffn": depth},
            "unix": began + 30 + 0.9 * i,
            "clock": {"useful": 0.8 * i, "compile": 20.0, "restore": 0.0, "other": 10.0},
        }
        for i in range(last)
    ]


def with_events(lines: list[dict], steps: int) -> list[dict]:
    """The lines with evaluations, and all that can happen: a restart, a spike, a new stage."""
    found = [{"step": 0, "kind": "event", "event": "start", "unix": lines[0]["unix"] - 30}]
    for line in lines:
        step = line["step"]
        if step == max(2, int(SPIKE * steps)):
            line["loss"], line["grad_norm"] = line["loss"] + 5.0, 70.0
            line["bits_per_byte"] = line["loss"] / np.log(2)
            facts = {"loss": line["loss"], "median": 1.3, "deviation": 0.05}
            found.append({"step": step, "kind": "event", "event": "skipped", "reason": "spike", "in_a_row": 1, **facts})
        found.append(line)
        if step == steps // 4:
            found.append({"step": step, "kind": "event", "event": "stopped", "reason": "preempted"})
            found.append({"step": step, "kind": "event", "event": "resumed", "commit": "abc1234"})
        if step == steps // 2:
            found.append({"step": step, "kind": "event", "event": "stage", "stage": 1})
        if step % max(1, steps // 10) == 0:
            bits = round(3.0 - 0.8 * step / steps, 4)
            held_out = {
                "bits_per_byte": bits,
                "bytes": 4096,
                "unix": line["unix"],
                "clock": line["clock"],
                "bits_per_byte_by_source": {"code": bits - 0.2, "text": bits + 0.3},
            }
            found.append({"step": step, "kind": "eval", **held_out})
    if lines[-1]["step"] == steps:
        clock = lines[-1]["clock"] | {"evaluation": 9.0}
        found.append({"step": steps, "kind": "event", "event": "stopped", "reason": "done", "clock": clock})
    return found


def evaluation(steps: int) -> dict:
    """As `k3jax.evaluate` writes it, with a task of every form."""
    scores = {"examples": 64, "answers": 128, "stderr": 0.02, "nats": 1.0}
    recall = [{"length": n, "pairs": n // 16, "accuracy": 0.9, "exact": 0.5, **scores} for n in (64, 128, 256)]
    depths = [
        {"length": n, "depth": d, "accuracy": 0.5, "exact": d, **scores} for n in (64, 128) for d in (0.0, 0.5, 1)
    ]
    depths[0] |= {"accuracy": None, "exact": None}
    back = [{"from": 2**n, "to": 2 ** (n + 1) - 1, "answers": 9, "accuracy": 1 - n / 9} for n in range(7)]
    return {
        "step": steps,
        "commit": "abc1234",
        "sources": {"code": {"bits_per_byte": 2.0, "bytes": 4096}, "text": {"bits_per_byte": 2.5, "bytes": 4096}},
        "tasks": [
            {"task": "MultiQueryRecall", "settings": {}, "chance": 0.03, "cells": recall, "distances": back},
            {"task": "PermutationTracking", "settings": {}, "chance": 0.17, "cells": recall, "distances": []},
            {"task": "Needle", "settings": {}, "chance": 0.1, "cells": depths, "distances": back[:3]},
        ],
    }


def write_lines(folder: pathlib.Path, lines: list[dict]) -> None:
    """Writes `metrics.jsonl`."""
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)


def make_run(
    folder: pathlib.Path, *, steps: int = 60, upto: int | None = None, settings: tuple[str, ...] = (), seed: int = 0
) -> pathlib.Path:
    """A run that is over, or that goes on at step `upto`. settings: of its configuration, beside those of `nano`."""
    folder.mkdir(parents=True)
    write_lines(folder, with_events(train_lines(steps, upto=upto, seed=seed), steps))
    config = config_io.override(presets.nano(), [f"steps={steps}", *settings])
    config_io.save_json(config, folder / "config.json")
    if upto is None:
        environment = {"python": "3.12", "device": "8 x TPU v5p", "commit": f"abc{seed}"}
        (folder / "summary.json").write_text(json.dumps(SUMMARY))
        (folder / "environment.json").write_text(json.dumps(environment))
        (folder / "evaluation.json").write_text(json.dumps(evaluation(steps)))
        (folder / "sample.txt").write_text("def f(a, b):\n    return a < b & '\x00'\n")
    return folder
