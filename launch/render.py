"""Writes what an engine takes for a run, and says the command that submits it.

python -m launch.render run.json --to slurm
python -m launch.render run.json --to local --run
"""

import os
import pathlib
from typing import NoReturn

from absl import flags

from k3jax.config import require
from launch import cli, files
from launch import spec as specs
from launch.command import Rendered
from launch.engines import gke, local, skypilot, slurm, xpk
from launch.spec import RunSpec

ENGINES = {
    "local": local.render, "slurm": slurm.render, "gke": gke.render, "xpk": xpk.render, "skypilot": skypilot.render,
}  # fmt: skip


def summary(spec: RunSpec, rendered: Rendered, path: pathlib.Path) -> str:
    """What was written, what it takes, and how it is submitted."""
    chips = spec.machines.chips * spec.slices
    lines = [f"wrote {path}"]
    if spec.machines.kind != "cpu":
        lines.append(f"cost: {chips:,} chips, so {chips:,} chip-hours an hour")
    lines += [f"note: {note}" for note in rendered.notes]
    lines += [f"before the first time: {line}" for line in rendered.before]
    lines.append(f"submit: {rendered.submit.format(file=path)}")
    return "\n".join(lines)


def make(
    spec: RunSpec, engine: str, out: str | pathlib.Path, *, source: str | pathlib.Path | None = None
) -> pathlib.Path:
    """Writes what an engine takes, and says what to do with it.

    Args:
      out: the file, or a folder for one that is named after run and engine, which keeps those of two engines apart.
      source: the file of the spec, which is not overwritten.

    Raises:
      ConfigError: the engine cannot give what the spec asks for, or the file cannot be written.
    """
    rendered = ENGINES[engine](spec)
    path = files.target(out, f"{spec.name}.{engine}{rendered.suffix}", source)
    files.write(rendered.text, path)
    print(summary(spec, rendered, path), flush=True)
    return path


def run_here(script: pathlib.Path) -> NoReturn:
    """Goes on as the script of a local run."""
    os.execvp("bash", ["bash", str(script)])


def main(argv: list[str]) -> None:
    given, source = flags.FLAGS, cli.only_argument(argv, "spec")
    require(not given.run or given.to == "local", f"--run with --to {given.to}: only local runs are started from here")
    path = make(specs.load(source), given.to, given.out or pathlib.Path(source).parent, source=source)
    if given.run:
        run_here(path)


if __name__ == "__main__":
    flags.DEFINE_enum("to", None, list(ENGINES), "the engine")
    flags.DEFINE_bool("run", False, "also start it, with --to local")
    flags.DEFINE_string("out", "", "the file to write, or a folder for it; default: NAME.ENGINE.* beside the spec")
    flags.mark_flag_as_required("to")
    cli.start(main, "python -m launch.render SPEC --to ENGINE [--out FILE] [--run]")
