"""What the compiled step of every shipped layout sends, as text: the goldens that the tests compare with.

After a change that is meant to send something else:

    PYTHONPATH=. python tests/plan/golden_collectives.py write small       # few layers, which the tests compile
    PYTHONPATH=. python tests/plan/golden_collectives.py write whole       # whole models, minutes each

followed by names of layouts for only those. ``print`` in place of ``write`` prints one JSON object. Needs libtpu.
"""

import importlib.metadata
import json
import pathlib
import sys
import time
from typing import NamedTuple

from k3jax import layouts, presets, runtime
from k3jax.config import replace
from k3jax.plan import chips, compiled, hlo
from k3jax.run_config import TrainConfig

LIBTPU = "0.0.52"  # every version combines and schedules in its own way: .ci/run installs this one
GOLDENS = pathlib.Path(__file__).with_name("goldens")


class Case(NamedTuple):
    """A layout's configuration and slice; ``changes`` are to the run."""

    config: str
    topology: str
    changes: dict


CASES = {
    "nano_8": Case("nano", "v5p:2x2x2", {}),
    "attnres_16": Case("attnres_194m", "v5p:2x2x4", {}),
    "attnres_64": Case("attnres_436m", "v5p:4x4x4", {}),
    "kimi_linear_48b_v5p": Case("kimi_linear_48b", "v5p:8x8x8", {}),
    "kimi_linear_48b_1m_v5p": Case("kimi_linear_48b", "v5p:8x8x8", {"seq_len": 2**20, "batch": 8}),
    "kimi_k3_v5p": Case("kimi_k3", "v5p:16x16x16", {"batch": 1024}),
    "kimi_k3_v5p_balanced": Case("kimi_k3", "v5p:16x16x16", {"batch": 1024}),
    "kimi_k3_tpu7x": Case("kimi_k3", "tpu7x:16x16x16", {"batch": 1024}),
}


def config_of(name: str, size: str) -> TrainConfig:
    """``whole``: as it is meant. ``small``: one layer of KDA and one of MLA, each with experts; all widths as they are.

    Collectives stand in the bodies of layers, so that fewer layers execute them less often and add none.
    """
    case = CASES[name]
    config = replace(presets.load(case.config), **case.changes)
    if size == "whole":
        return config
    return replace(config, model=replace(config.model, layers=2, full_attention=(2,), dense_layers=0))


def text(name: str, size: str) -> str:
    """Compiles the step and counts."""
    config, layout = config_of(name, size), layouts.LAYOUTS[name]
    topology = chips.topology(CASES[name].topology)
    compiled.check_devices(layout, topology)
    program = compiled.lower(config, layout, chips.devices_of(topology)).compile()
    found = hlo.collectives(hlo.Program.parse(program.as_text()), layout.sizes)
    lines = [
        f"{name}: {layouts.text(layout)}",
        f"{CASES[name].config}, {config.model.layers} layers, {config.batch} rows of {config.seq_len} tokens, "
        f"{topology.name}, libtpu {LIBTPU}",
        f"{'kind':20}{'axes':32}{'instructions':>12}{'executed':>10}{'payload bytes':>20}",
    ]
    for (kind, axes), row in sorted(hlo.summary(found).items()):
        lines.append(
            f"{kind:20}{' x '.join(axes):32}{row['static']:>12}{row['executed']:>10}{row['payload']:>20}"
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def golden(name: str, size: str) -> pathlib.Path:
    return GOLDENS / f"{name}.{size}.txt"


def rows(content: str) -> set[tuple[str, str]]:
    """Kinds and axes in such a text."""
    return {(line[:20].strip(), line[20:52].strip()) for line in content.splitlines()[3:]}


def main(what: str, size: str, *names: str) -> None:
    if importlib.metadata.version("libtpu") != LIBTPU:
        raise SystemExit(f"the goldens are of libtpu {LIBTPU}, and here is {importlib.metadata.version('libtpu')}")
    found = {}
    for name in names or CASES:
        began = time.process_time()
        found[name] = text(name, size)
        print(f"{name}: {time.process_time() - began:.0f} s of processor time", file=sys.stderr, flush=True)
        if what == "write":
            golden(name, size).write_text(found[name])
    if what == "print":
        print(json.dumps(found))


if __name__ == "__main__":
    runtime.start_without_devices()
    main(*sys.argv[1:])
