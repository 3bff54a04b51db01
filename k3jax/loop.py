"""From a step to the last one: the part of a run between its preparation and its report.

A step is dispatched before the metrics of the one before it are fetched, so the device never waits for the host. A
step that the guards refuse leaves the weights alone, and once they halt the run every later step does too, so that
being one step late loses nothing.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from k3jax import diagnose, guard, placement, runtime, sharding
from k3jax.checkpoint import Checkpoints
from k3jax.config_layout import ALONE, Layout
from k3jax.data import Batch
from k3jax.data.held_out import HeldOutBatches
from k3jax.data.order import Batches
from k3jax.exits import Exit
from k3jax.model.weights import Weights
from k3jax.progress import Progress
from k3jax.run_config import TrainConfig
from k3jax.step import StepMetrics, TrainState, eval_step, program, train_step
from k3jax.stop import StopRequest
from k3jax.telemetry import trace
from k3jax.telemetry.clock import Clock
from k3jax.telemetry.line import model_flops_per_token, train_line
from k3jax.telemetry.writers import Writers


class NonFiniteError(RuntimeError):
    """Too many steps in a row were not applied, the last one because its loss or gradient is not finite; the message
    holds the step, every layer's statistics, and the last checkpoint."""


class SpikeError(RuntimeError):
    """The loss jumped, and the configuration says to stop then, or it did so too many times in a row."""


class Stopped(RuntimeError):
    """Somebody asked the run to stop, and it was saved. ``exit`` is the code to leave with."""

    def __init__(self, code: Exit, step: int):
        super().__init__(f"asked to stop; saved after step {step}, and the same command goes on from there")
        self.exit = code


@dataclasses.dataclass(frozen=True)
class Tools:
    """What a run holds open beside its state. ``profile``: steps to trace; ``dump_hlo``: keep the compiled step;
    ``owed``: the step whose evaluation was left out because somebody asked the run to stop."""

    run: pathlib.Path
    mesh: Mesh | None
    shardings: TrainState | None
    checkpoints: Checkpoints
    writers: Writers
    clock: Clock
    progress: Progress
    stop: StopRequest
    peak_flops: float | None
    layout: Layout = ALONE
    profile: range = range(0)
    dump_hlo: bool = False
    workers: int = 0
    owed: int | None = None


@dataclasses.dataclass(frozen=True)
class StageData:
    """One stage's data: ``batches[n]`` is what the step after n of its steps reads; ``held_out`` makes the held-out
    batches of each source; ``identity`` names the exact text; bytes_per_token is of the training text, None for what
    is no text; ``skipped`` names the documents of each source that are not UTF-8."""

    batches: Batches
    held_out: dict[str, Callable[..., HeldOutBatches]]
    identity: str
    bytes_per_token: float | None
    skipped: dict[str, list[str]]


def run_stages(
    config: TrainConfig, state: TrainState, open_data: Callable[[int], StageData], tools: Tools
) -> TrainState:
    """Trains through the remaining stages to the last step.

    Raises:
      NonFiniteError, SpikeError, Stopped: see there. StorageError: a checkpoint could not be written.
    """
    for number in range(config.stage_number(min(int(state.step), config.steps - 1)), config.last_stage + 1):
        start, end = config.bounds(number)
        if int(state.step) >= end:
            continue
        tools.progress.phase("reading the data")
        with tools.clock.book("data"):
            data = open_data(number)
        if number and int(state.step) == start:
            state = state._replace(guard=fresh_guard(config, tools.shardings))
            tools.writers.write({"step": start + 1, "kind": "event", "event": "stage", "stage": number})
        state = _Stage(config, number, data, tools).run(state)
    return state


def fresh_guard(config: TrainConfig, shardings: TrainState | None) -> guard.GuardState:
    """The guard at the start of a stage: at a change of data the losses of before say nothing about those to come."""
    empty = guard.init(config.spikes)
    return empty if shardings is None else placement.put(empty, shardings.guard)


def compile_step(
    config: TrainConfig, state: TrainState, batch: Batch, shardings: TrainState | None, layout: Layout = ALONE
):
    """The compiled train step of a stage."""
    lowered = lower_step(config, state, batch, shardings, layout)
    return lowered.compile(compiler_options=runtime.compiler_options())


def lower_step(
    config: TrainConfig, state: TrainState, batch: Batch, shardings: TrainState | None, layout: Layout
) -> jax.stages.Lowered:
    """The train step for the devices of its shardings, from arrays or from their shapes."""
    mesh = None if shardings is None else jax.tree.leaves(shardings)[0].mesh
    out = None if mesh is None else (shardings, sharding.replicated(mesh))
    step = jax.jit(train_step, static_argnums=(0, 3), donate_argnums=1, out_shardings=out)
    with sharding.scope(mesh), runtime.collection_paused():
        return step.lower(program(config), state, batch, layout)


class _Stage:
    """The steps of one stage."""

    def __init__(self, config: TrainConfig, number: int, data: StageData, tools: Tools):
        self._config, self._stage, self._number = config, config.at(number), number
        self._start, self._end = config.bounds(number)
        self._data, self._tools = data, tools
        self._rows = Rows(self._stage, tools.mesh)
        self._batches = self._rows.local(data.batches)
        self._flops = model_flops_per_token(config.model, self._stage.seq_len)
        self._evaluator = Evaluator(self._stage, tools.mesh, tools.layout)
        self._pending: tuple[int, StepMetrics] | None = None

    def run(self, state: TrainState) -> TrainState:
        tools, first = self._tools, int(state.step)
        self._report_data(first)
        with tools.clock.book("checkpoint"):
            tools.checkpoints.wait()  # the next lines may end the process
        tools.progress.phase(f"compiling the train step ({self._stage.batch} rows of {self._stage.seq_len})")
        with tools.stop.nothing_to_save(), tools.clock.book("compile"):
            step = compile_step(self._stage, state, self._batch(first), tools.shardings, tools.layout)
        if tools.dump_hlo:
            trace.dump_hlo(tools.run, step, self._number)
        if tools.owed == first:
            self._evaluate(first, state.weights)
        feed = self._batches.iterate(first - self._start, self._end - first, workers=tools.workers)
        with tools.clock.steps(), trace.Trace(tools.run, tools.profile) as tracer:
            for number in range(first + 1, self._end + 1):
                with tools.clock.book("data"):
                    batch = self._rows.place(next(feed))
                tracer.before(number)
                state, seen = step(state, batch)
                self._settle(state.weights, first)
                self._pending = (number, seen)
                tracer.after(number, seen)
                self._at_boundary(number, first, state)
        return state

    def _report_data(self, first: int) -> None:
        """What reading and packing did to each source; no text goes missing silently."""
        reports = {name: report._asdict() for name, report in self._data.batches.packing_report.items()}
        skipped = {name: len(names) for name, names in self._data.skipped.items() if names}
        event = {"event": "data", "packing": reports, "skipped": skipped}
        self._tools.writers.write({"step": first + 1, "kind": "event", **event})
        for name, names in self._data.skipped.items():
            if names:
                self._tools.progress.log(
                    f"{name}: {len(names):,} documents are not UTF-8 and left out, first {names[0]}"
                )
        for name, report in reports.items():
            if report["dropped"]:
                self._tools.progress.log(
                    f"{name}: {report['truncated']:,} documents are cut to the row of {self._stage.seq_len} tokens, "
                    f"and {report['dropped']:,} tokens are left out"
                )

    def _at_boundary(self, number: int, first: int, state: TrainState) -> None:
        """Evaluates, saves and stops where it is time to."""
        config, tools = self._config, self._tools
        code = tools.stop.at_step(number)
        due = number % config.eval_every == 0 if number < config.steps else config.keep.best > 0
        save = number == self._end or number % config.checkpoint_every == 0 or code is not None
        if not (due or save):
            return
        self._settle(state.weights, first)
        bits, evaluated = None, False
        if due and code is None:
            bits, evaluated = self._evaluate(number, state.weights)
            code = tools.stop.exit if tools.stop.hurried else None
        if save or code is not None:
            position = self._position(number) | {"owed": due and not evaluated}
            with tools.clock.book("checkpoint"):
                tools.checkpoints.save(config, state, position, bits_per_byte=bits)
            tools.writers.write({"step": number, "kind": "event", "event": "saved"})
        if code is not None:
            with tools.clock.book("checkpoint"):
                tools.checkpoints.wait()
            tools.writers.write({"step": number, "kind": "event", "event": "stopped", "reason": code.name.lower()})
            raise Stopped(code, number)

    def _position(self, number: int) -> dict[str, Any]:
        made = number - self._start
        return {"stage": self._number, "corpus": self._data.identity, "data": self._data.batches.position(made)}

    def _batch(self, step: int) -> Batch:
        """What the step after ``step`` reads."""
        return self._rows.place(self._batches[step - self._start])

    def _evaluate(self, number: int, weights: Weights) -> tuple[float | None, bool]:
        """Bits per byte over the part of the held-out text that periodic evaluations read, and whether the evaluation
        came to its end before somebody asked the run to stop."""
        with self._tools.clock.book("evaluation"):
            line = self._evaluator.line(
                weights,
                self._data.held_out,
                max_bytes=self._config.eval_bytes,
                give_up=lambda: self._tools.stop.hurried,
            )
        if line is None:
            return None, False
        self._tools.writers.write({"step": number, "kind": "eval", **line})
        return line.get("bits_per_byte"), True

    def _settle(self, weights: Weights, first: int) -> None:
        """Fetches, checks, logs and shows the pending step, if there is one. ``weights`` are those of now: the same as
        then, if the guards halted the run."""
        if self._pending is None:
            return
        (number, seen), self._pending = self._pending, None
        config, tools = self._config, self._tools
        with tools.clock.book("device"):
            loss, verdict = float(seen.loss), jax.device_get(seen.verdict)
        spent = tools.clock.settle(useful=bool(verdict.apply))
        if number == first + 1:
            tools.progress.log(f"first step done {runtime.seconds_since_start():.1f} s after the start of the process")
        tools.progress.update(number, loss=loss, tokens_per_second=config.tokens_per_step / spent.total)
        # The first step after a checkpoint is what a replay is held against.
        after_save = number == first + 1 or (number - 1) % config.checkpoint_every == 0
        if after_save or number % config.log_every == 0 or number == config.steps:
            self._log(number, seen)
        if not verdict.apply:
            self._refused(number, loss, verdict, weights)

    def _log(self, number: int, seen: StepMetrics) -> None:
        line = train_line(
            seen,
            self._tools.clock,
            lr=float(seen.lr),
            tokens_per_step=self._config.tokens_per_step,
            flops_per_token=self._flops,
            peak_flops=self._tools.peak_flops,
            bytes_per_token=self._data.bytes_per_token,
        )
        self._tools.writers.write({"step": number, "kind": "train", **line})

    def _refused(self, number: int, loss: float, verdict: guard.Verdict, weights: Weights) -> None:
        """Logs a step that was not applied, and ends the run if the guards halted it."""
        reason = "spike" if verdict.finite else "non_finite"
        facts = {"loss": loss, "median": float(verdict.median), "deviation": float(verdict.deviation)}
        event = {"event": "skipped", "reason": reason, "in_a_row": int(verdict.in_a_row), **facts}
        self._tools.writers.write({"step": number, "kind": "event", **event})
        if not verdict.halted:
            self._tools.progress.log(f"step {number} was not applied: {_reason(reason, facts)}")
            return
        self._tools.checkpoints.wait()
        last = f"last good checkpoint: {self._tools.checkpoints.path(self._tools.checkpoints.latest())}"
        row = f", number {verdict.in_a_row} in a row" if verdict.in_a_row > 1 else ""
        head = f"step {number}{row}: {_reason(reason, facts)}; the step was not applied"
        self._tools.writers.write({"step": number, "kind": "event", "event": "stopped", "reason": reason})
        if verdict.finite:
            raise SpikeError(f"{head}\n{last}")
        with sharding.scope(self._tools.mesh):
            layers = diagnose.layer_statistics(self._stage, weights, self._batch(number - 1))
        raise NonFiniteError(f"{head}\n{diagnose.table(layers)}\n{last}")


def _reason(reason: str, facts: dict[str, float]) -> str:
    if reason == "non_finite":
        return "the loss or the gradient is not finite"
    return "the loss {loss:.3f} is a spike over the median {median:.3f} (deviation {deviation:.3f})".format(**facts)


class Rows:
    """Which rows of a batch this process reads, and how they become arrays of the mesh."""

    def __init__(self, config: TrainConfig, mesh: Mesh | None):
        self._mesh = mesh
        self._part, self._parts = (0, 1) if mesh is None else placement.rows_of_this_process(config.batch, mesh)

    def local[B: (Batches, HeldOutBatches)](self, batches: B) -> B:
        """The part of the data that this process reads."""
        return batches.local(self._part, self._parts)

    def place(self, batch: Batch) -> Batch:
        """The global batch from the rows of this process."""
        return batch if self._mesh is None else placement.put_batch(batch, self._mesh, self._part, self._parts)


class Evaluator:
    """The compiled evaluation step of a stage."""

    def __init__(self, stage: TrainConfig, mesh: Mesh | None = None, layout: Layout = ALONE):
        self._mesh, everywhere = mesh, None if mesh is None else sharding.replicated(mesh)
        evaluate = jax.jit(eval_step, static_argnums=(0, 3), out_shardings=everywhere)
        self._step = lambda weights, batch: evaluate(program(stage), weights, batch, layout)
        self._rows = Rows(stage, mesh)

    def line(
        self,
        weights: Weights,
        held_out: dict[str, Callable[..., HeldOutBatches]],
        *,
        max_bytes: int | None = None,
        give_up: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any] | None:
        """The fields of an `eval` line: bits per byte over all text and by source, and nats per token of what is no
        text. ``max_bytes`` bounds the bytes of each source. None once ``give_up`` says so, asked before each batch."""
        bits, sizes, nats = {}, {}, {}
        for name, make in held_out.items():
            batches = make(max_bytes=max_bytes)
            sums = self.totals(weights, batches, give_up=give_up)
            if sums is None:
                return None
            total, tokens = sums
            if batches.bytes:
                bits[name], sizes[name] = total / math.log(2), batches.bytes
            else:
                nats[name] = total / tokens
        line: dict[str, Any] = {}
        if bits:
            line = {"bits_per_byte": sum(bits.values()) / sum(sizes.values()), "bytes": sum(sizes.values())}
            line["bits_per_byte_by_source"] = {name: bits[name] / sizes[name] for name in bits}
        return line | ({"nats_per_token_by_source": nats} if nats else {})

    def totals(
        self, weights: Weights, batches: HeldOutBatches, *, give_up: Callable[[], bool] = lambda: False
    ) -> tuple[float, float] | None:
        """Summed nats of all predicted tokens, and their summed weight."""
        local, found = self._rows.local(batches), []
        for number in range(len(local)):
            # One batch stays under way, so that the device never waits for the question.
            jax.block_until_ready(found[-2:-1])
            if give_up():
                return None
            with sharding.scope(self._mesh):
                found.append(self._step(weights, self._rows.place(local[number])))
        sums = np.array(jax.device_get([(stats.nats, stats.weight) for stats in found]), np.float64).sum(axis=0)
        return float(sums[0]), float(sums[1])
