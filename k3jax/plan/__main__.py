"""Compiles the train step for a pod that is not here, and says what it needs, what it sends and how long it takes.

python -m k3jax.plan --config attnres_194m --topology v5p:2x2x4 --layout attnres_16
python -m k3jax.plan --config kimi_k3 --topology v5p:16x16x16 --layout kimi_k3_v5p --no-compile   # seconds, no libtpu
python -m k3jax.plan --config attnres_194m --topology v5p:2x2x4 --search --budget 1800 --out runs/plan
"""

import pathlib
import tempfile

from absl import app, flags

from k3jax import config_io, layouts, placement, presets, runtime
from k3jax.config import ConfigError
from k3jax.exits import leave
from k3jax.plan import arithmetic, chips, compiled, report, search, search_report, workers
from k3jax.plan.chips import Topology
from k3jax.plan.remedies import remedied
from k3jax.progress import Progress
from k3jax.run_config import TrainConfig


def changes(given) -> list[str]:
    """The flags that change the configuration, as settings."""
    fields = {"seq_len": given.seq, "batch": given.batch, "model.remat": given.remat}
    return [*(f"{name}={value}" for name, value in fields.items() if value is not None), *given["set"].value]


def hardest(config: TrainConfig) -> TrainConfig:
    """The run at the stage that needs most memory: that of the most tokens at a time, and of the longest rows."""
    stages = placement.stages_of(config)
    at_a_time = [(one.tokens_per_step // one.micro_batches, one.seq_len) for one in stages]
    number = at_a_time.index(max(at_a_time))
    if len(stages) > 1:
        rows = f"rows of {stages[number].seq_len:,} tokens"
        print(f"of {len(stages)} stages number {number} needs most, and is planned: {rows}", flush=True)
    return stages[number]


def writable(folder: str) -> pathlib.Path | None:
    """The folder, made before anything takes minutes.

    Raises:
      ConfigError: nothing can be written there.
    """
    if not folder:
        return None
    try:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"--out={folder}: nothing can be written there ({error.strerror})") from error
    return pathlib.Path(folder)


def one(given, config: TrainConfig, topology: Topology, out: pathlib.Path | None) -> None:
    """Plans one layout."""
    layout, stage = layouts.load(given.layout), hardest(config)
    with Progress(1) as progress:
        doing, planner = ("adding up", arithmetic) if given["no-compile"].value else ("compiling", compiled)
        progress.phase(f"{doing} the train step for {topology.devices:,} devices")
        found = remedied(stage, planner.plan(stage, layout, topology))
    print(report.text(found))
    if out:
        report.write(found, config, given.config, out)


def many(given, config: TrainConfig, topology: Topology, out: pathlib.Path | None) -> None:
    """Searches for the best layout."""
    if given.layout:
        raise ConfigError(f"--search looks for a layout, so that --layout={given.layout} says nothing; leave one out")
    with Progress(1) as progress:
        progress.phase(f"adding up the layouts of {topology.devices:,} devices")
        found = search.ranked(hardest(config), topology)
        if not given["no-compile"].value:
            call = workers.Call(given.config, topology.name, tuple(changes(given)))
            found = workers.compiled(found, call, out, budget=given.budget, count=given.candidates, progress=progress)
    print(search_report.text(found))
    if out:
        search_report.write(found, config, given.config, out)
    if found.failed and not any(one.compiled for one in found.fitting):
        raise ConfigError(f"none of the {len(found.failed)} layouts that were compiled can be used")


def main(argv: list[str]) -> None:
    runtime.refuse_stray(argv)
    given = flags.FLAGS
    try:
        config, topology = (
            config_io.override(presets.load(given.config), changes(given)),
            chips.topology(given.topology),
        )
        tokens = config.batch * config.seq_len
        print(f"{given.config}: {config.batch:,} rows of {config.seq_len:,} = {tokens:,} tokens a step", flush=True)
        (many if given.search else one)(given, config, topology, writable(given.out))
    except ConfigError as error:
        leave(f"error: {error}")


if __name__ == "__main__":
    runtime.start_without_devices()
    flags.DEFINE_string("config", "nano", "a preset or a JSON file")
    flags.DEFINE_string("topology", "v5p:2x2x2", "chip:shape, such as v5p:16x16x16, tpu7x:4x4x8, v6e:4x4 or h200:4x8")
    flags.DEFINE_string("layout", "", "a named layout, or fields: fsdp=4,expert=8,tensor=2,transport=Balanced")
    flags.DEFINE_integer("seq", None, "tokens of a row", lower_bound=1)
    flags.DEFINE_integer("batch", None, "rows of a step", lower_bound=1)
    flags.DEFINE_string("remat", None, "what layers keep: a value of model.remat")
    flags.DEFINE_multi_string("set", [], "path.to.field=value; repeat for several")
    flags.DEFINE_bool("no-compile", False, "by arithmetic alone: seconds, without libtpu")
    flags.DEFINE_bool("search", False, "rank the layouts of the topology, and compile the best few")
    flags.DEFINE_integer("budget", 1800, "seconds that a search may compile for", lower_bound=1)
    flags.DEFINE_integer("candidates", 4, "layouts that a search compiles at most", lower_bound=1)
    flags.DEFINE_string(
        "out", "", "folder for plan.txt, plan.json and plan.png; of a search, search.* and the best plan"
    )
    app.run(main)
