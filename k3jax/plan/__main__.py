"""Compiles the train step for a pod that is not here, and says what it needs, what it sends and how long it takes.

python -m k3jax.plan --config attnres_194m --topology v5p:2x2x4 --layout attnres_16
"""

import os
import pathlib

from absl import app, flags

from k3jax import config_io, layouts, presets, runtime
from k3jax.config import ConfigError
from k3jax.plan import chips, compiled, report
from k3jax.progress import Progress
from k3jax.run_config import TrainConfig


def settings(given) -> TrainConfig:
    """The configuration that the flags describe."""
    fields = {"seq_len": given.seq, "batch": given.batch, "model.remat": given.remat}
    changes = [f"{name}={value}" for name, value in fields.items() if value is not None]
    return config_io.override(presets.load(given.config), [*changes, *given["set"].value])


def main(argv: list[str]) -> None:
    runtime.refuse_stray(argv)
    given = flags.FLAGS
    try:
        config, topology = settings(given), chips.topology(given.topology)
        layout = layouts.load(given.layout)
        tokens = config.batch * config.seq_len
        print(f"{given.config}: {config.batch:,} rows of {config.seq_len:,} = {tokens:,} tokens a step", flush=True)
        with Progress(1) as progress:
            progress.phase(f"compiling the train step for {topology.devices:,} devices")
            found = compiled.plan(config, layout, topology)
        print(report.text(found))
        if given.out:
            report.write(found, config.model, given.config, pathlib.Path(given.out))
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    # A machine with libtpu and no TPU would look for one, and ask its cloud for its place in a slice.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    runtime.start()
    flags.DEFINE_string("config", "nano", "a preset or a JSON file")
    flags.DEFINE_string("topology", "v5p:2x2x2", "chip:shape, such as v5p:16x16x16, tpu7x:4x4x8 or v6e:4x4")
    flags.DEFINE_string("layout", "", "a named layout, or fields: fsdp=4,expert=8,tensor=2,transport=Balanced")
    flags.DEFINE_integer("seq", None, "tokens of a row", lower_bound=1)
    flags.DEFINE_integer("batch", None, "rows of a step", lower_bound=1)
    flags.DEFINE_string("remat", None, "what layers keep: a value of model.remat")
    flags.DEFINE_multi_string("set", [], "path.to.field=value; repeat for several")
    flags.DEFINE_string("out", "", "folder for plan.txt, plan.json and plan.png")
    app.run(main)
