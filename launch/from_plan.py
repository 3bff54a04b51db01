"""Writes the spec of a plan that `k3jax.plan --out` left, and says what the run will cost at least.

python -m launch.from_plan plans/k3/plan.json --runs gs://bucket/runs --out specs/k3.json
"""

import json
import pathlib
import sys
from typing import Any

from absl import app, flags

from k3jax import config_io, presets
from k3jax.config import ConfigError, require
from k3jax.exits import Exit
from k3jax.run_config import TrainConfig
from launch import spec as specs
from launch.machines import machines
from launch.spec import RunSpec, Train

DECISIVE = ("model", "optimizer", "seq_len", "batch", "micro_batches", "loss_chunk")
"""The fields of a configuration that a plan depends on."""
RATES = "optimizer.schedule"
"""And what it does not depend on within them."""


def read(path: pathlib.Path) -> dict[str, Any]:
    """The plan as JSON, with its ``config`` as a `TrainConfig`.

    Raises:
      ConfigError: no such file, or none that the planner wrote.
    """
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        config = config_io.from_dict(TrainConfig, plan["config"])
        fields = plan["name"], plan["topology"], plan["layout"], plan["memory"]["fits"], plan["seconds"]["step"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{str(path)!r} is no plan.json of k3jax.plan: {error!r}") from error
    require(None not in fields, f"{str(path)!r} is no plan.json of k3jax.plan")
    return plan | {"config": config}


def configuration(plan: dict[str, Any], given: str, spec: pathlib.Path) -> str:
    """What the spec names as its configuration: the one that is given, if it is what was planned, or the preset that
    was, or a file beside the spec with what was planned, which is written.

    Raises:
      ConfigError: the configuration given is another one, or the file cannot be written.
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
    if plan["name"] in presets.PRESETS and presets.load(plan["name"]) == planned:
        return plan["name"]
    path = spec.with_name(f"{spec.stem}.config.json")
    specs.save(planned, path)
    return str(path)


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
    given = flags.FLAGS
    try:
        if len(argv) != 2:
            raise app.UsageError(f"one plan.json is needed, got {len(argv) - 1}")
        plan = read(pathlib.Path(argv[1]))
        name = given.name or pathlib.Path(given.config or plan["name"]).stem.replace("_", "-")
        path = pathlib.Path(given.out or f"{name}.json")
        config = configuration(plan, given.config, path)
        spec = config_io.override(spec_of(plan, config=config, name=name, runs=given.runs), given["set"].value)
        specs.save(spec, path)
    except ConfigError as error:
        print(f"launch.from_plan: {error}", file=sys.stderr)
        raise SystemExit(int(Exit.CONFIGURATION)) from None
    if config.endswith(".json"):
        print(f"the run reads {config}: it must be in the image, or at that place on every host")
    print(f"wrote {path}\n{cost(plan, plan['config'])}\nnext: python -m launch.render {path} --to ENGINE")


if __name__ == "__main__":
    flags.DEFINE_string("config", "", "a preset or JSON file to name in the spec; default: what was planned")
    flags.DEFINE_string("runs", None, "the folder of run folders: a path, gs://, s3:// or pvc://")
    flags.DEFINE_string("name", "", "the run's name; default: the configuration's")
    flags.DEFINE_multi_string("set", [], "field=value of the spec; repeat for several")
    flags.DEFINE_string("out", "", "the file to write; default: NAME.json")
    flags.mark_flag_as_required("runs")
    app.run(main)
