"""What every rung of a study would take on a TPU slice that is not here: memory, time and communication, compiled.

python -m experiments.plan s05_attention_residuals --topology v5p:2x2x2 --rung attnres_194m
"""

import math

from absl import app, flags

from experiments.run import groups
from experiments.study import Rung, Study, load
from k3jax import layouts, runtime
from k3jax.config import ConfigError
from k3jax.exits import leave
from k3jax.plan import chips, compiled
from k3jax.plan.compiled import Plan

GB = 1e9
COLUMNS = ("rung", "variant", "layout", "GB of a device", "fits", "step, s", "bound by", "MFU at most")


def layout_of(rung: Rung, devices: int) -> str:
    """The rung's own layout where it is for as many devices; else fsdp, as far as rows go round, and context."""
    if rung.layout and layouts.load(rung.layout).devices == devices:
        return rung.layout
    fsdp = math.gcd(rung.config.batch, devices)
    return f"fsdp={fsdp}" + (f",context={devices // fsdp}" if fsdp < devices else "")


def row(study: Study, rung: str, variant: str, topology: chips.Topology, layout: str) -> tuple[str, ...]:
    """One rung and variant compiled for the topology, or the reason why it cannot be."""
    chosen = layout or layout_of(study.rungs[rung], topology.devices)
    try:
        found: Plan = compiled.plan(study.config(rung, variant), layouts.load(chosen), topology)
    except ConfigError as error:
        return rung, variant, chosen, str(error), "", "", "", ""
    memory, times = found.memory, found.times
    fits = "yes" if memory.fits else f"no: {memory.largest}"
    return (
        *(rung, variant, chosen, f"{memory.total / GB:.2f} of {memory.hbm / GB:.0f}", fits),
        *(f"{times.step:.3f}", times.binding, f"{times.mfu:.1%}"),
    )


def main(argv: list[str]) -> None:
    args = flags.FLAGS
    try:
        if len(argv) != 2:
            raise ConfigError(f"give one study, got {argv[1:]}")
        study, _ = load(argv[1])
        topology = chips.topology(args.topology)
        chosen = groups(study, args.rung, args.variants or [study.control], planned=True)
        # What is wrong for all rows is said once, and is no row.
        layouts.load(args.layout), chips.devices_of(topology)
        print(f"| {' | '.join(COLUMNS)} |\n| {' | '.join(['---'] * len(COLUMNS))} |", flush=True)
        for rung, variant in chosen:
            print(f"| {' | '.join(row(study, rung, variant, topology, args.layout))} |", flush=True)
    except ConfigError as error:
        leave(f"experiments.plan: {error}")


if __name__ == "__main__":
    runtime.start_without_devices()
    flags.DEFINE_string("topology", "v5p:2x2x2", "chip:shape, such as v5p:16x16x16, tpu7x:4x4x8 or v6e:4x4")
    flags.DEFINE_string("layout", "", "a named layout, or fields; default one for the rung and as many devices")
    flags.DEFINE_multi_string("rung", [], "a rung; repeat for several; default all")
    flags.DEFINE_list("variants", [], "variants, separated by commas; default the control")
    app.run(main)
