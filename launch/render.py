"""Writes what an engine takes for a run, and says the command that submits it.

python -m launch.render run.json --to slurm
"""

import pathlib
import sys

from absl import app, flags

from k3jax.config import ConfigError
from k3jax.exits import Exit
from launch import spec as specs
from launch.command import Rendered
from launch.engines import gke, local, skypilot, slurm, xpk
from launch.spec import RunSpec

ENGINES = {
    "local": local.render, "slurm": slurm.render, "gke": gke.render, "xpk": xpk.render, "skypilot": skypilot.render,
}  # fmt: skip


def write(rendered: Rendered, path: pathlib.Path) -> None:
    """Writes the script or manifest.

    Raises:
      ConfigError: the path cannot be written.
    """
    try:
        path.write_text(rendered.text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error}") from error


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


def main(argv: list[str]) -> None:
    given = flags.FLAGS
    try:
        if len(argv) != 2:
            raise app.UsageError(f"one spec is needed, got {len(argv) - 1}")
        spec = specs.load(argv[1])
        rendered = ENGINES[given.to](spec)
        # The name of the engine keeps the files of two scripts apart.
        path = pathlib.Path(given.out or pathlib.Path(argv[1]).parent / f"{spec.name}.{given.to}{rendered.suffix}")
        write(rendered, path)
    except ConfigError as error:
        print(f"launch.render: {error}", file=sys.stderr)
        raise SystemExit(int(Exit.CONFIGURATION)) from None
    print(summary(spec, rendered, path))


if __name__ == "__main__":
    flags.DEFINE_enum("to", None, list(ENGINES), "the engine")
    flags.DEFINE_string("out", "", "the file to write; default: NAME.ENGINE.* beside the spec")
    flags.mark_flag_as_required("to")
    app.run(main)
