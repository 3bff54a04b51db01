"""Compiles the train step for a pod that is not here, and says what it needs, what it sends and how long it takes.

python -m k3jax.plan --config attnres_194m --topology v5p:2x2x4 --layout attnres_16
python -m k3jax.plan --config kimi_k3 --topology v5p:16x16x16 --layout kimi_k3_v5p --no-compile   # seconds, no libtpu
python -m k3jax.plan --config attnres_194m --topology v5p:2x2x4 --search --budget 1800 --out runs/plan
"""

import pathlib

from absl import app, flags

from k3jax import config_io, layouts, presets, runtime
from k3jax.config import ConfigError
from k3jax.plan import arithmetic, chips, compiled, report, search, search_report, workers
from k3jax.plan.chips import Topology
from k3jax.progress import Progress
from k3jax.run_config import TrainConfig


def changes(given) -> list[str]:
    """The flags that change the configuration, as settings."""
    fields = {"seq_len": given.seq, "batch": given.batch, "model.remat": given.remat}
    return [*(f"{name}={value}" for name, value in fields.items() if value is not None), *given["set"].value]


def one(given, config: TrainConfig, topology: Topology) -> None:
    """Plans one layout."""
    layout = layouts.load(given.layout)
    with Progress(1) as progress:
        doing, planner = ("adding up", arithmetic) if given["no-compile"].value else ("compiling", compiled)
        progress.phase(f"{doing} the train step for {topology.devices:,} devices")
        found = planner.plan(config, layout, topology)
    print(report.text(found))
    if given.out:
        report.write(found, config, given.config, pathlib.Path(given.out))


def many(given, config: TrainConfig, topology: Topology) -> None:
    """Searches for the best layout."""
    if given.layout:
        raise ConfigError(f"--search looks for a layout, so that --layout={given.layout} says nothing; leave one out")
    out = pathlib.Path(given.out) if given.out else None
    with Progress(1) as progress:
        progress.phase(f"adding up the layouts of {topology.devices:,} devices")
        found = search.ranked(config, topology)
        if not given["no-compile"].value:
            call = workers.Call(given.config, topology.name, tuple(changes(given)))
            found = workers.compiled(found, call, out, budget=given.budget, count=given.candidates, progress=progress)
    print(search_report.text(found))
    if out:
        search_report.write(found, config, given.config, out)


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
        (many if given.search else one)(given, config, topology)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None


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
