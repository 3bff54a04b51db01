"""Training, from a configuration to a report.

    python -m k3jax.train --config nano --run runs/nano
    python -m k3jax.train --config nano --run runs/wide --set model.dim=192 --set optimizer.schedule.peak=0.01
    python -m k3jax.train --config nano --run runs/nano --layout data=8

The same command with the same run folder goes on where the last checkpoint stands. Exit codes: `k3jax.exits`.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import time
import traceback
from typing import NoReturn

import jax
from absl import app, flags
from jax.sharding import Mesh

from k3jax import (
    accounting,
    config_io,
    distributed,
    layouts,
    peak,
    placement,
    preflight,
    preflight_devices,
    presets,
    report,
    runtime,
    sampling,
)
from k3jax.checkpoint import CheckpointError, Checkpoints, Restored, StorageError, check_paths
from k3jax.config import ConfigError
from k3jax.config_layout import ALONE, Layout
from k3jax.data import DataError
from k3jax.data.load import load_data
from k3jax.data.tokenizers import make_tokenizer
from k3jax.exits import Exit
from k3jax.loop import Evaluator, NonFiniteError, SpikeError, StageData, Stopped, Tools, run_stages
from k3jax.metrics import iterate_metrics
from k3jax.model.weights import Weights
from k3jax.progress import Progress
from k3jax.run_config import TrainConfig
from k3jax.run_folder import BusyError, RunLock, read_json, write_json, write_text
from k3jax.step import TrainState, init_state
from k3jax.stop import StopRequest
from k3jax.telemetry import trace, trackers
from k3jax.telemetry.clock import Clock, goodput
from k3jax.telemetry.writers import Writers
from k3jax.watchdog import Watchdog

LINGER = 2.0  # seconds in which the others can fail with codes of their own: the end of process 0 ends them


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command decides about a run beside its configuration. None of it changes what is trained.

    Attributes:
      mesh: the devices of the run, None for the first one alone.
      layout: what travels between them.
      allow: configuration fields that may differ from those of the checkpoint.
      trackers: who gets the metrics beside the JSON lines.
      profile: steps to trace.
      dump_hlo: keep the text of the compiled step.
      workers: processes that make batches ahead of time; 0 is a thread.
      hang_after: seconds after which a step that does not end ends the process (`k3jax.watchdog`); 0 is never.
      report: write the page and its figure when the run is over.
      began: seconds since 1970 at which the run began, for a process that makes several; None is the process's start.
    """

    mesh: Mesh | None = None
    layout: Layout = ALONE
    allow: tuple[str, ...] = ()
    trackers: tuple[str, ...] = ()
    profile: range = range(0)
    dump_hlo: bool = False
    workers: int = 0
    hang_after: float = 0.0
    report: bool = True
    began: float | None = None


def train(config: TrainConfig, run: pathlib.Path, options: Options = Options()) -> dict:
    """Trains to the last step, evaluates on all held-out text, samples, and writes the report into ``run``.

    Where to start: the newest good checkpoint in the run folder, if there is one; otherwise fresh weights. A run that
    is over is left as it is.

    Returns:
      the summary, as written to ``summary.json``.

    Raises:
      NonFiniteError, SpikeError, Stopped: see `k3jax.loop`. BusyError: another live process has the run.
      CheckpointError: no checkpoint is good, or they are of another configuration or corpus.
    """
    if options.mesh is not None:
        placement.check_batch(config, options.mesh)
        placement.check_model(config.model, options.mesh)
    run.mkdir(parents=True, exist_ok=True)
    clock = Clock(began=options.began or time.time() - runtime.seconds_since_start())
    with (
        _lock(run),
        StopRequest() as stop,
        Checkpoints(run, keep=config.keep) as checkpoints,
        Progress(config.steps, first=min(checkpoints.latest() or 0, config.steps)) as progress,
        _watchdog(run, clock, progress, options.hang_after),
    ):
        progress.phase("reading the data")
        open_data = OpenData(config)
        with stop.nothing_to_save(), clock.book("data"):
            identities = [open_data(number).identity for number in range(config.last_stage + 1)]
        progress.phase("preparing the weights")
        with stop.nothing_to_save(), clock.book("restore"):
            state, shardings, restored = _start(config, run, checkpoints, options, identities)
        summary = read_json(run / "summary.json")
        if restored is not None and restored.step == summary.get("steps") == config.steps:
            if jax.process_index() == 0 and options.report and not (run / "report.html").exists():
                report.write_report(run)
            return summary
        step = None if restored is None else restored.step
        described = config_io.to_dict(config)
        with Writers(run, options.trackers, clock=clock, resume_step=step or 0, config=described) as writers:
            _record(config, run, options, identities[0], restored, writers)
            tools = Tools(
                run,
                options.mesh,
                shardings,
                checkpoints,
                writers,
                clock,
                progress,
                stop,
                peak_flops=peak.of_devices(run).flops_per_second,
                layout=options.layout,
                profile=options.profile,
                dump_hlo=options.dump_hlo,
                owed=restored.step if restored is not None and restored.position.get("owed") else None,
                workers=options.workers,
            )
            state = run_stages(config, state, open_data, tools)
            checkpoints.wait()
            with stop.nothing_to_save():
                return _finish(config, state, open_data, tools, write_report=options.report)


def _watchdog(run: pathlib.Path, clock: Clock, progress: Progress, limit: float) -> Watchdog:
    here = dict(process=jax.process_index(), processes=jax.process_count())
    return Watchdog(run, clock, lambda: progress.step, limit=limit, **here)


@contextlib.contextmanager
def _lock(run: pathlib.Path):
    """The run's folder for this run alone; all processes are told if another has it."""
    lock, problem = None, None
    if jax.process_index() == 0:
        try:
            lock = RunLock(run)
        except BusyError as error:
            problem = str(error)
    problem = runtime.from_first_process(problem)
    if problem is not None:
        raise BusyError(problem)
    with lock or contextlib.nullcontext():
        yield


def _start(
    config: TrainConfig, run: pathlib.Path, checkpoints: Checkpoints, options: Options, identities: list[str]
) -> tuple[TrainState, TrainState | None, Restored | None]:
    """The state to begin with, where its arrays lie, and what was restored. ``identities``: of each stage's data."""
    check_paths(config, options.allow)
    shardings = None if options.mesh is None else placement.state_shardings(config, options.mesh, options.layout)
    if checkpoints.latest() is None:
        _refuse_lost_checkpoints(config, run)
        state = init_state(config)
        return (state if shardings is None else placement.put(state, shardings)), shardings, None
    restored = checkpoints.restore(config, allow=options.allow, shardings=shardings)
    if options.profile and options.profile.stop - 1 <= restored.step:
        raise ConfigError(
            f"--profile ends with step {options.profile.stop - 1}, but step {restored.step} is made already"
        )
    before = restored.position.get("corpus")
    fingerprint = identities[min(restored.position.get("stage", 0), config.last_stage)]
    if before != fingerprint and "data" not in options.allow:
        raise CheckpointError(
            f"{checkpoints.path(restored.step)} was trained on the corpus {before}, but the files now are the corpus "
            f"{fingerprint}: no batch would be the one that comes next; to go on all the same: --allow_change=data"
        )
    return restored.state, shardings, restored


def _refuse_lost_checkpoints(config: TrainConfig, run: pathlib.Path) -> None:
    """Raises CheckpointError where a run has come too far to have left no checkpoint: a folder that is not mounted
    must not begin the run again, over its own curve."""
    path = run / "metrics.jsonl"
    steps = [line["step"] for line in iterate_metrics(path) if line["kind"] == "train"] if path.exists() else []
    # The second save waits for the first to be complete.
    if max(steps, default=0) > 2 * config.checkpoint_every or (run / "summary.json").exists():
        raise CheckpointError(
            f"{run} has come to step {max(steps, default=config.steps)}, but {run / 'checkpoints'} holds no complete "
            "checkpoint: bring them back, or choose another folder with --run"
        )


def _record(
    config: TrainConfig, run: pathlib.Path, options: Options, identity: str, restored: Restored | None, writers: Writers
) -> None:
    """What this process is and where it starts, for whoever reads the folder."""
    if jax.process_index() == 0:
        (run / "summary.json").unlink(missing_ok=True)  # of a run that ended before this one, at fewer steps
        write_json(run / "config.json", config_io.to_dict(config))
        text = "" if options.mesh is None else layouts.text(placement.layout_of(options.mesh, options.layout))
        write_json(run / "environment.json", {**runtime.environment(), "corpus": identity, "layout": text})
    for problem in restored.passed_over if restored is not None else ():
        writers.write({"step": restored.step, "kind": "event", "event": "damaged_checkpoint", "reason": problem})


def _finish(config: TrainConfig, state: TrainState, open_data: "OpenData", tools: Tools, *, write_report: bool) -> dict:
    """Evaluates, samples, sums up and reports a run that came to its last step."""
    data = open_data(config.last_stage)
    tools.progress.phase("evaluating all held-out text")
    with tools.clock.book("evaluation"):
        line = Evaluator(config.at(config.last_stage), tools.mesh, tools.layout).line(state.weights, data.held_out)
    tools.writers.write({"step": config.steps, "kind": "eval", **line})
    tools.progress.phase("sampling")
    sample = _sample(config, state.weights, tools.mesh)
    counts = accounting.count_parameters(config.model)
    tools.writers.write({"step": config.steps, "kind": "event", "event": "stopped", "reason": "done"})
    summary = {
        "steps": config.steps,
        "bits_per_byte": line.get("bits_per_byte"),
        "held_out_bytes": line.get("bytes", 0),
        "evaluation": line,
        "seconds": sum(tools.clock.totals().values()),
        "goodput": goodput(tools.clock.totals()),
        "parameters": counts.total,
        "active_parameters": counts.active,
        "baselines": open_data.baselines(),
    }
    if jax.process_index() == 0:
        write_text(tools.run / "sample.txt", sample)
        write_json(tools.run / "summary.json", summary)
        if write_report:
            tools.progress.phase("writing the report")
            report.write_report(tools.run)
    return summary


class OpenData:
    """The data of each stage, read when it is first asked for, once for stages that share it."""

    def __init__(self, config: TrainConfig):
        self._config = config
        self._load = functools.cache(
            lambda source: load_data(source, config.tokenizer, vocab=config.model.vocab, seed=config.seed)
        )
        self._stage = functools.cache(self._open)

    def __call__(self, number: int) -> StageData:
        return self._stage(number)

    def _open(self, number: int) -> StageData:
        stage, data = self._config.at(number), self._load(self._config.at(number).data)
        shape = dict(length=stage.seq_len, batch=stage.batch, packing=stage.packing)
        # Another order in each stage: one that goes on with the same source must not begin again with the same rows.
        batches = data.batches(seed=(stage.seed + number) % 2**32, **shape)
        held_out = data.held_out(**shape)
        return StageData(batches, held_out, data.fingerprint, data.bytes_per_token(), data.skipped())

    def baselines(self) -> dict[str, dict[str, float]]:
        """Bits per byte of general compressors on the held-out text of the last stage, of its first source of text."""
        return next(iter(self._load(self._config.at(self._config.last_stage).data).baselines().values()), {})


def _sample(config: TrainConfig, weights: Weights, mesh: Mesh | None) -> str:
    """What the model makes of the prompt; on one device."""
    if jax.process_count() > 1:
        return "no sample: weights that lie on several hosts are sampled from by k3jax.generate, from a checkpoint\n"
    tokenizer = make_tokenizer(config.tokenizer)
    if config.model.vocab < tokenizer.size:
        return "no sample: the model has no tokens for text\n"
    prompt = [tokenizer.bos, *tokenizer.encode(config.sample_prompt)]
    weights = weights if mesh is None else jax.device_put(jax.device_get(weights), mesh.devices.flat[0])
    choice = sampling.Sampling(temperature=0.8, top_p=0.95, seed=config.seed)
    (new,) = sampling.generate(
        config.model, weights, [prompt], max_new=config.sample_tokens, sampling=choice, stop=tokenizer.eos
    )
    return config.sample_prompt + tokenizer.decode([token for token in new if token < tokenizer.size])


def main(argv: list[str]) -> None:
    runtime.refuse_stray(argv)
    runtime.start()
    args = flags.FLAGS
    try:
        config = config_io.override(presets.load(args.config), args["set"].value)
        run = pathlib.Path(args.run or f"runs/{pathlib.Path(args.config).stem}")
        numbers = dict(coordinator=args.coordinator, processes=args.processes, process=args.process)
        preflight.start(config, run, hosts=args.hosts, timeout=args.start_timeout, **numbers)
        if args.expect or args.preflight_only or jax.distributed.is_initialized():
            found = preflight_devices.check(args.expect, timeout=args.start_timeout)
        if args.preflight_only:
            print(f"preflight: {found}; nothing is wrong")
            return
        mesh, layout = placement.layout_of_flag(args.layout, config)
        options = Options(
            mesh=mesh,
            layout=layout,
            allow=tuple(args.allow_change),
            trackers=trackers.parse(args.log),
            profile=trace.parse(args.profile, config.steps),
            dump_hlo=args.dump_hlo,
            workers=args.workers,
            hang_after=args.hang_after,
        )
        summary = train(config, run, options)
    except Exception as error:
        _leave(error)
    if jax.process_index() == 0:
        _say(run, summary)


def _leave(error: Exception) -> NoReturn:
    """Ends the process with what the error means. One of several, unless all stop together, ends at once: at its usual
    exit JAX would wait for the others, which may wait for this one."""
    code = exit_code(error)
    if code is not None:
        print(f"k3jax.train: {error}", file=sys.stderr)
    if isinstance(error, Stopped):
        raise SystemExit(int(error.exit)) from error
    if not jax.distributed.is_initialized():
        raise error if code is None else SystemExit(int(code))
    if code is None:
        traceback.print_exception(error)
    sys.stdout.flush(), sys.stderr.flush()
    if jax.process_index() == 0:
        time.sleep(LINGER)
    os._exit(1 if code is None else code)


CODES: dict[type[BaseException], Exit] = {
    Stopped: Exit.PREEMPTED,
    NonFiniteError: Exit.NON_FINITE,
    SpikeError: Exit.SPIKE,
    BusyError: Exit.BUSY,
    StorageError: Exit.STORAGE,
    CheckpointError: Exit.CHECKPOINT,
    DataError: Exit.DATA,
    ConnectionError: Exit.PEERS,
    ConfigError: Exit.CONFIGURATION,
    report.ReportError: Exit.CONFIGURATION,
    OSError: Exit.STORAGE,
}


def exit_code(error: BaseException) -> Exit | None:
    """What an error means for whoever started the process: the first kind of CODES that it is counts, None without."""
    return next((code for kind, code in CODES.items() if isinstance(error, kind)), None)


def _say(run: pathlib.Path, summary: dict) -> None:
    """The end of a run on the screen."""
    print(f"\n{(run / 'sample.txt').read_text(encoding='utf-8')}\n")
    if summary["bits_per_byte"] is not None:
        against = ", ".join(f"{name} {bits['whole']:.3f}" for name, bits in summary["baselines"].items())
        print(f"held-out: {summary['bits_per_byte']:.3f} bits per byte ({against})")
    for name, nats in summary["evaluation"].get("nats_per_token_by_source", {}).items():
        print(f"held-out {name}: {nats:.3f} nats per token")
    print(f"report: {run / 'report.html'}  checkpoint: {run / 'checkpoints'}  ({summary['seconds']:.0f} s)")


if __name__ == "__main__":
    flags.DEFINE_string("config", "nano", "a preset, or a JSON file such as a run's config.json")
    flags.DEFINE_multi_string("set", [], "path.to.field=value; repeat for several")
    flags.DEFINE_string("run", None, "the run folder; default runs/CONFIG")
    flags.DEFINE_multi_string("allow_change", [], "a configuration field that may differ from the checkpoint's")
    flags.DEFINE_string(
        "layout", "", "a name (k3jax.layouts) or axis=size,...; default: devices share the rows (data), as many as can"
    )
    flags.DEFINE_alias("mesh", "layout")
    flags.DEFINE_string("log", "", "trackers beside the JSON lines: tensorboard, wandb, trackio, mlflow")
    flags.DEFINE_string("profile", "", "START:STOP, the steps to trace for xprof, into RUN/profile")
    flags.DEFINE_bool("dump_hlo", False, "keep the text of the compiled train step, in RUN/hlo")
    flags.DEFINE_integer("workers", 0, "processes that make batches ahead of time; 0 is a thread", lower_bound=0)
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, for a run of several processes")
    flags.DEFINE_integer("processes", None, "how many processes share the run; default: what the cluster says, or one")
    flags.DEFINE_integer("process", None, "the number of this process, 0 to processes - 1")
    flags.DEFINE_float("start_timeout", distributed.TIMEOUT, "seconds in which all processes and devices must be there")
    flags.DEFINE_string("expect", "", "CHIP:DEVICES that each process must have, such as v5p:4 or cpu:8")
    flags.DEFINE_bool("preflight_only", False, "check the hosts, and train nothing")
    flags.DEFINE_alias("preflight-only", "preflight_only")
    flags.DEFINE_float("hang_after", 3600.0, "seconds after which a step counts as hung and ends the process; 0: never")
    flags.DEFINE_list("hosts", [], "host names by process, for messages; default: what the cluster says")
    app.run(main)
