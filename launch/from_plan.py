"""Writes the spec of a plan that `k3jax.plan --out` left, and says what the run will cost at least.

python -m launch.from_plan plans/k3/plan.json --runs gs://bucket/runs --out specs/k3.json
"""

import json
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from absl import flags

from k3jax import config_io, presets
from k3jax.config import ConfigError, require
from k3jax.run_config import TrainConfig
from launch import cli, files
from launch import spec as specs
from launch.machines import machines
from launch.spec import RunSpec, Train

DECISIVE = ("model", "optimizer", "seq_len", "batch", "micro_batches", "loss_chunk")
"""The fields of a configuration that a plan depends on."""
RATES = "optimizer.schedule"
"""And what it does not depend on within them."""
READ = {
    "name": str, "topology": str, "layout": str, "memory.fits": bool, "memory.total": float, "memory.hbm": float,
    "seconds.step": float,
}  # fmt: skip
"""The fields of a plan that are read, besides its configuration."""
WORDS = {str: "a text", bool: "true or false", float: "a number above 0"}


def read(path: pathlib.Path) -> dict[str, Any]:
    """The plan as JSON, with its ``config`` as a `TrainConfig`.

    Raises:
      ConfigError: no such file, or none that the planner wrote.
    """
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        for field, kind in READ.items():
            _check(plan, field, kind)
        require("config" in plan, "it has no config")
        config = config_io.from_dict(TrainConfig, plan["config"])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} is no plan.json of k3jax.plan: {error}") from error
    return plan | {"config": config}


def _check(plan: Any, field: str, kind: type) -> None:
    """Raises ConfigError where a field of a plan, by its dotted path, is missing or something else."""
    value = plan
    for name in field.split("."):
        require(isinstance(value, dict) and name in value, f"it has no {field}")
        value = value[name]
    right = type(value) is kind
    if kind is float:
        right = type(value) in (int, float) and 0 < value < 1e30
    require(right, f"{field} = {str(value)[:80]!r}, but it must be {WORDS[kind]}")


def configuration(plan: dict[str, Any], given: str) -> str:
    """What the spec can name as its configuration: the one that is given, if it is what was planned, or the preset that
    was; nothing where what was planned has no name.

    Raises:
      ConfigError: the configuration given is another one.
    """
    planned = plan["config"]
    if given:
        differ = {
            path: values
            for path, values in config_io.diff(planned, presets.load(given)).items()
            if path.split(".")[0] in DECISIVE and not path.startswith(RATES)
        }
        said = ", ".join(f"{path} = {new}, but {old} was planned" for path, (old, new) in differ.items())
        require(not differ, f"--config={given} is not what was planned: {said}")
        return given
    return plan["name"] if plan["name"] in presets.PRESETS and presets.load(plan["name"]) == planned else ""


def write(plan: dict[str, Any], given: str, path: pathlib.Path, *, settings: Sequence[str] = (), **fields) -> str:
    """Writes the spec of a plan, and beside it what was planned, if that is no preset and no file is ``given``. Nothing
    is written unless all is well, so the spec is made with a draft of that file first.

    Args:
      settings: ``field=value`` of the spec.
      fields: as for :func:`spec_of`.

    Returns:
      what the spec names as its configuration.

    Raises:
      ConfigError: as :func:`configuration` and :func:`spec_of`, or a file cannot be written.
    """

    def made(config: str) -> RunSpec:
        return config_io.override(spec_of(plan, config=config, **fields), settings)

    if not (named := configuration(plan, given)):
        beside = path.with_name(f"{path.stem}.config.json")
        with tempfile.TemporaryDirectory() as folder:
            draft = f"{folder}/{beside.name}"
            specs.save(plan["config"], draft)
            made(draft)
        specs.save(plan["config"], beside)
        named = str(beside)
    specs.save(made(named), path)
    return named


def spec_of(plan: dict[str, Any], *, config: str, name: str, runs: str, **fields) -> RunSpec:
    """The spec of a plan; ``fields`` are further ones of `launch.spec.RunSpec`.

    Raises:
      ConfigError: the plan does not fit into memory.
    """
    memory = plan["memory"]
    require(
        memory["fits"],
        f"the plan does not fit: {memory['total'] / 1e9:.1f} GB of {memory['hbm'] / 1e9:.1f} GB on every device of "
        f"{plan['topology']}",
    )
    there = machines(plan["topology"])
    per_host = min(there.chips, 4) * there.cores if there.is_tpu else there.shape[1]
    return RunSpec(
        name=name,
        job=Train(config),
        topology=plan["topology"],
        hosts=there.devices // per_host,
        devices_per_host=per_host,
        layout=plan["layout"],
        runs=runs,
        **fields,
    )


def cost(plan: dict[str, Any], config: TrainConfig) -> str:
    """Chip-hours of the whole run by the predicted step, to which stalls, saving and starting come on top."""
    chips, step = machines(plan["topology"]).chips, plan["seconds"]["step"]
    hours = config.steps * step / 3600
    return (
        f"cost: at least {hours * chips:,.1f} chip-hours: {config.steps:,} steps of {step:.3f} s are {hours:,.1f} h on "
        f"{chips:,} chips"
    )


def main(argv: list[str]) -> None:
    given, source = flags.FLAGS, pathlib.Path(cli.only_argument(argv, "plan.json"))
    plan = read(source)
    name = given.name or pathlib.Path(given.config or plan["name"]).stem.replace("_", "-")
    said = cost(plan, plan["config"])
    path = files.target(given.out or ".", f"{name}.json", source, given.config)
    config = write(plan, given.config, path, settings=given["set"].value, name=name, runs=given.runs)
    if config.endswith(".json"):
        print(f"the run reads {config}: it must be in the image, or at that place on every host")
    print(f"wrote {path}\n{said}\nnext: python -m launch.render {path} --to ENGINE")


if __name__ == "__main__":
    flags.DEFINE_string("config", "", "a preset or JSON file to name in the spec; default: what was planned")
    flags.DEFINE_string("runs", None, "the folder of run folders: a path, gs://, s3:// or pvc://")
    flags.DEFINE_string("name", "", "the run's name; default: the configuration's")
    flags.DEFINE_multi_string("set", [], "field=value of the spec; repeat for several")
    flags.DEFINE_string("out", "", "the file to write, or a folder for it; default: NAME.json")
    flags.mark_flag_as_required("runs")
    cli.start(main, "python -m launch.from_plan PLAN.json --runs FOLDER [--config CONFIG] [--out FILE]")
