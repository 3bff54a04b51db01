"""Training, from a configuration to a report.

    python -m k3jax.train --config nano --run runs/nano
    python -m k3jax.train --config nano --run runs/wide --set model.dim=192 --set optimizer.schedule.peak=0.01

The same command with the same run folder goes on where the last checkpoint stands.
"""

import json
import math
import pathlib
import sys
import time
from functools import partial

import jax
import numpy as np
from absl import app, flags

from k3jax import accounting, config_io, diagnose, presets, report, runtime, sampling
from k3jax.checkpoint import CheckpointError, Checkpoints
from k3jax.config import ConfigError
from k3jax.data import ByteTokenizer, HeldOutBatches, compression_baselines, load_corpus, train_batches
from k3jax.metrics import MetricsWriter
from k3jax.model.weights import Weights
from k3jax.optim import make_schedule
from k3jax.progress import Progress
from k3jax.run_config import TrainConfig
from k3jax.step import StepMetrics, TrainState, eval_step, init_state, train_step

NON_FINITE_EXIT = 3
INTERRUPTED_EXIT = 130


class NonFiniteError(RuntimeError):
    """The loss or the gradient is not finite; the message holds the step, every layer's statistics, and the last
    checkpoint from before."""


def train(config: TrainConfig, run: pathlib.Path) -> dict:
    """Trains to the last step, evaluates on all held-out text, samples, and writes the report into ``run``.

    Where to start: the latest complete checkpoint in the run folder, if there is one; otherwise fresh weights. A run
    that is over is left as it is.

    Returns:
      the summary, as written to ``summary.json``.

    Raises:
      NonFiniteError: see there. CheckpointError: the folder's checkpoint is damaged, or of another configuration or
        corpus.
    """
    run.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with (
        Checkpoints(run) as checkpoints,
        Progress(config.steps, first=min(checkpoints.latest() or 0, config.steps)) as progress,
    ):
        progress.phase("reading the corpus")
        tokenizer = ByteTokenizer()
        tokenizer.check_fits(config.model.vocab)
        corpus = load_corpus(config.data)
        rows = dict(length=config.seq_len, batch=config.batch, tokenizer=tokenizer)
        batches = train_batches(corpus.train, seed=config.seed, **rows)
        held_out = partial(HeldOutBatches, corpus.held_out, **rows)

        progress.phase("preparing the weights")
        resumed = checkpoints.latest()
        if resumed is None:
            state = init_state(config)
        else:
            state = checkpoints.restore(config)
            _check_corpus(run, corpus.fingerprint)
            if resumed == config.steps and (run / "summary.json").exists():
                return json.loads((run / "summary.json").read_text(encoding="utf-8"))
        _write_json(run / "config.json", config_io.to_dict(config))
        _write_json(run / "environment.json", {**runtime.environment(), "corpus": corpus.fingerprint})

        progress.phase("compiling the train step")
        step = jax.jit(train_step, static_argnums=0, donate_argnums=1)
        lowered = step.lower(config, state, batches[int(state.step)])
        step = lowered.compile(compiler_options=runtime.compiler_options())
        evaluator = Evaluator(config)
        with MetricsWriter(run / "metrics.jsonl", resume_step=resumed or 0) as metrics:
            state = _loop(config, state, step, batches, evaluator, held_out, checkpoints, metrics, progress, began)
            checkpoints.save(config, state)
            progress.phase("evaluating all held-out text")
            bits = evaluator.bits_per_byte(state.weights, held_out())
            metrics.write({"step": int(state.step), "kind": "eval", "bits_per_byte": bits, "bytes": held_out().bytes})

        progress.phase("sampling")
        sample = _sample(config, state.weights, tokenizer)
        (run / "sample.txt").write_text(sample, encoding="utf-8")
        progress.phase("writing the report")
        counts = accounting.count_parameters(config.model)
        summary = {
            "steps": int(state.step),
            "bits_per_byte": bits,
            "held_out_bytes": held_out().bytes,
            "seconds": time.monotonic() - began,
            "parameters": counts.total,
            "active_parameters": counts.active,
            "baselines": compression_baselines(corpus.held_out),
        }
        _write_json(run / "summary.json", summary)
        checkpoints.wait()
        report.write_report(run)
    return summary


def _loop(config, state: TrainState, step, batches, evaluator, held_out, checkpoints, metrics, progress, began):
    """From the state's step to the last.

    A step's metrics are read when the next batch is ready and before it is sent: the device waits for no log, and a
    step that is not finite is found while its weights are still those it began with.
    """
    start, first = time.monotonic(), int(state.step)
    schedule = make_schedule(config.optimizer.schedule, config.steps)
    pending: tuple[int, StepMetrics] | None = None

    def settle(pending, state) -> None:
        """Checks, logs and shows the metrics of a step that is over."""
        number, seen = pending
        if not bool(seen.finite):
            _stop_non_finite(config, number, state.weights, batches[number - 1], checkpoints)
        if number == first + 1:
            progress.log(f"first step done {runtime.seconds_since_start():.1f} s after the start of the process")
        speed = (number - first) * config.batch * config.seq_len / (time.monotonic() - start)
        progress.update(number, loss=float(seen.loss), tokens_per_second=speed)
        if number % config.log_every == 0 or number == config.steps:
            line = _metrics_line(seen, float(schedule(number - 1)), speed, time.monotonic() - began)
            metrics.write({"step": number, "kind": "train", **line})

    for number in range(first + 1, config.steps + 1):
        batch = batches[number - 1]
        if pending is not None:
            settle(pending, state)
        state, seen = step(state, batch)
        pending = (number, seen)
        if number % config.eval_every == 0 and number < config.steps:
            partly = held_out(max_bytes=config.eval_bytes)
            bits = evaluator.bits_per_byte(state.weights, partly)
            metrics.write({"step": number, "kind": "eval", "bits_per_byte": bits, "bytes": partly.bytes})
        if number % config.checkpoint_every == 0 and bool(seen.finite):
            checkpoints.save(config, state)
    if pending is not None:
        settle(pending, state)
    return state


def _metrics_line(seen: StepMetrics, rate: float, speed: float, seconds: float) -> dict:
    seen = jax.device_get(seen)
    line = {
        "loss": seen.loss,
        "bits_per_byte": seen.loss / math.log(2),
        "accuracy": seen.accuracy,
        "grad_norm": seen.grad_norm,
        "update_rms": seen.update_rms,
        "lr": rate,
        "tokens_per_second": speed,
        "seconds": seconds,
    }
    layers = seen.layers
    if "load" in layers:
        line["balance"] = {
            "max_over_mean": layers["load_max_over_mean"],
            "dead_share": layers["dead_share"],
            "margin": layers["margin"],
        }
    if "max_logit" in layers:
        line["max_attention_logit"] = layers["max_logit"].max(axis=1)
    return line


def _stop_non_finite(config, number: int, weights: Weights, batch, checkpoints) -> None:
    """The bad step left the weights alone, so its batch shows again where it broke."""
    checkpoints.wait()
    layers = diagnose.layer_statistics(config, weights, batch)
    last = checkpoints.path(checkpoints.latest())
    raise NonFiniteError(
        f"step {number}: the loss or the gradient is not finite; the step was not applied\n"
        f"{diagnose.table(layers)}\nlast good checkpoint: {last}"
    )


class Evaluator:
    """The compiled evaluation step of a run."""

    def __init__(self, config: TrainConfig):
        self._step = jax.jit(partial(eval_step, config))

    def bits_per_byte(self, weights: Weights, batches: HeldOutBatches) -> float:
        """Sum of the nats of every predicted token, in bits, over the number of bytes."""
        nats = [self._step(weights, batches[i]).nats for i in range(len(batches))]
        return float(np.sum(jax.device_get(nats), dtype=np.float64)) / math.log(2) / batches.bytes


def _sample(config: TrainConfig, weights: Weights, tokenizer: ByteTokenizer) -> str:
    prompt = [tokenizer.bos, *tokenizer.encode(config.sample_prompt)]
    choice = sampling.Sampling(temperature=0.8, top_p=0.95, seed=config.seed)
    (new,) = sampling.generate(
        config.model, weights, [prompt], max_new=config.sample_tokens, sampling=choice, stop=tokenizer.eos
    )
    return config.sample_prompt + tokenizer.decode([token for token in new if token < tokenizer.size])


def _check_corpus(run: pathlib.Path, fingerprint: str) -> None:
    """Refuses to go on with other text than before: no batch would be the one that comes next."""
    path = run / "environment.json"
    before = json.loads(path.read_text(encoding="utf-8")).get("corpus") if path.exists() else None
    if before not in (None, fingerprint):
        raise CheckpointError(
            f"{run} was trained on the corpus {before}, but the files now are the corpus {fingerprint}"
        )


def _write_json(path: pathlib.Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str]) -> None:
    runtime.refuse_stray(argv)
    runtime.start()
    args = flags.FLAGS
    try:
        config = config_io.override(presets.load(args.config), args["set"].value)
        run = pathlib.Path(args.run or f"runs/{pathlib.Path(args.config).stem}")
        summary = train(config, run)
    except KeyboardInterrupt:
        print("k3jax.train: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        raise SystemExit(INTERRUPTED_EXIT) from None
    except NonFiniteError as error:
        print(error, file=sys.stderr)
        raise SystemExit(NON_FINITE_EXIT) from error
    except (ConfigError, CheckpointError, report.ReportError, ValueError, OSError) as error:
        raise SystemExit(f"k3jax.train: {error}") from error
    print(f"\n{(run / 'sample.txt').read_text(encoding='utf-8')}\n")
    gzip, xz = (summary["baselines"][name]["whole"] for name in ("gzip", "xz"))
    print(f"held-out: {summary['bits_per_byte']:.3f} bits per byte (gzip -9: {gzip:.3f}, xz -9e: {xz:.3f})")
    print(f"report: {run / 'report.html'}  checkpoint: {run / 'checkpoints'}  ({summary['seconds']:.0f} s)")


if __name__ == "__main__":
    flags.DEFINE_string("config", "nano", "a preset, or a JSON file such as a run's config.json")
    flags.DEFINE_multi_string("set", [], "path.to.field=value; repeat for several")
    flags.DEFINE_string("run", None, "the run folder; default runs/CONFIG")
    app.run(main)
