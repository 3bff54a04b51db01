"""Writes the spec of a plan that `k3jax.plan --out` left, and says what the run will cost at least.

python -m launch.from_plan plans/k3/plan.json --config kimi_k3 --runs gs://bucket/runs --out k3.json
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


def read(path: pathlib.Path) -> dict[str, Any]:
    """The plan as JSON.

    Raises:
      ConfigError: no such file, or none that the planner wrote.
    """
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        fields = plan["topology"], plan["layout"], plan["layers"], plan["memory"]["fits"], plan["seconds"]["step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{str(path)!r} is no plan.json of k3jax.plan: {error!r}") from error
    require(None not in fields, f"{str(path)!r} is no plan.json of k3jax.plan")
    return plan


def spec_of(plan: dict[str, Any], *, config: str, name: str, runs: str, **fields) -> RunSpec:
    """The spec of a plan; ``fields`` are further ones of `launch.spec.RunSpec`.

    Raises:
      ConfigError: the plan does not fit into memory, or is of another model.
    """
    memory, layers = plan["memory"], presets.load(config).model.layers
    require(
        memory["fits"],
        f"the plan does not fit: {memory['total'] / 1e9:.1f} GB of {memory['hbm'] / 1e9:.1f} GB on every device of "
        f"{plan['topology']}",
    )
    require(
        layers == plan["layers"], f"--config={config} has {layers} layers, but the plan is of one with {plan['layers']}"
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
        plan, name = read(pathlib.Path(argv[1])), given.name or pathlib.Path(given.config).stem.replace("_", "-")
        spec = spec_of(plan, config=given.config, name=name, runs=given.runs)
        spec = config_io.override(spec, given["set"].value)
        path = given.out or f"{spec.name}.json"
        specs.save(spec, path)
    except ConfigError as error:
        print(f"launch.from_plan: {error}", file=sys.stderr)
        raise SystemExit(int(Exit.CONFIGURATION)) from None
    print(f"wrote {path}\n{cost(plan, presets.load(given.config))}\nnext: python -m launch.render {path} --to ENGINE")


if __name__ == "__main__":
    flags.DEFINE_string("config", None, "the preset or JSON file that was planned")
    flags.DEFINE_string("runs", None, "the folder of run folders: a path, gs://, s3:// or pvc://")
    flags.DEFINE_string("name", "", "the run's name; default: the configuration's")
    flags.DEFINE_multi_string("set", [], "field=value of the spec; repeat for several")
    flags.DEFINE_string("out", "", "the file to write; default: NAME.json")
    flags.mark_flags_as_required(["config", "runs"])
    app.run(main)
