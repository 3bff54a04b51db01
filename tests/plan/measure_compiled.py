"""Compiles the train step for the layouts below and writes what it needs of a device to compiled_memory.json.

PYTHONPATH=. JAX_OPTIMIZATION_LEVEL=O1 python tests/plan/measure_compiled.py

It needs libtpu, and two to four minutes of processor time per layout (K3: seven). Entries that are there stay; remove
those that should be made again. `test_arithmetic.py` holds the arithmetic model to them.
"""

import importlib.metadata
import json
import os
import pathlib
import time
from collections.abc import Iterable
from typing import NamedTuple

from absl import app

from k3jax import config_io, layouts, presets, runtime
from k3jax.plan import chips, compiled
from k3jax.run_config import TrainConfig

FILE = pathlib.Path(__file__).parent / "compiled_memory.json"
BODY = ("model.dense_layers=0", "optimizer.matrices=AdamW()")
KDA = ("model.layers=4", "model.full_attention=()", *BODY)
MLA = ("model.layers=4", "model.full_attention=(1,2,3,4)", *BODY)
MIXED = ("model.layers=8", "model.full_attention=(4,8)", "model.dense_layers=0")
"""Layers of one kind, or of both in a nested loop with Muon: two to four minutes of processor time each. All widths are
those of the preset."""


class Case(NamedTuple):
    """A layout to compile. settings: as for --set."""

    config: str
    topology: str
    layout: str
    settings: tuple[str, ...] = ()


CASES = [
    Case("attnres_194m", "v5p:2x2x2", "fsdp=2,expert=4", (*KDA, "batch=8")),
    Case("attnres_194m", "v5p:2x2x2", "expert=8,transport=RaggedAllToAll()", (*KDA, "batch=16")),
    Case("attnres_194m", "v5p:2x2x2", "expert=8,transport=Balanced()", (*KDA, "batch=8")),
    Case("attnres_194m", "v5e:2x4", "fsdp=8", (*KDA, "batch=8")),
    Case("attnres_194m", "v5p:2x2x2", "fsdp=2,expert=4", (*MLA, "batch=8")),
    Case("attnres_194m", "v6e:2x4", "data=2,expert=4,optimizer=('data',)", (*MLA, "batch=8")),
    Case("attnres_194m", "v5p:2x2x2", "fsdp=2,expert=4", (*MLA, "batch=16", "model.remat=Save")),
    Case("attnres_194m", "v5p:2x2x2", "fsdp=2,expert=4", (*KDA, "batch=8", "model.remat=dots")),
    Case("attnres_194m", "v5p:2x2x4", "attnres_16", (*MIXED, "batch=32")),
    Case("attnres_436m", "v5p:4x4x4", "attnres_64", (*MIXED, "batch=64")),
    Case("attnres_436m", "v6e:4x4", "attnres_16", (*KDA, "batch=32", "micro_batches=2")),
    Case("kimi_linear_653m", "v5p:2x2x2", "expert=4,tensor=2", (*KDA, "batch=8")),
    Case("kimi_linear_653m", "v5p:2x2x2", "expert=4,tensor=2", (*MLA, "batch=16")),
    Case("kimi_linear_653m", "v5p:2x2x2", "expert=4,context=2", (*KDA, "batch=4", "seq_len=32768")),
    Case("kimi_linear_653m", "v5p:2x2x2", "expert=4,context=2", (*MLA, "batch=4", "seq_len=32768")),
    Case("kimi_linear_48b", "v5p:4x4x4", "fsdp=4,expert=16", (*KDA, "batch=128")),
    Case("kimi_linear_48b", "v5p:4x4x4", "expert=16,tensor=4,transport=RaggedAllToAll()", (*KDA, "batch=64")),
    Case("kimi_linear_48b", "v5p:4x4x4", "expert=16,tensor=4", (*MIXED, "batch=64")),
    Case("kimi_k3", "v5p:4x4x4", "expert=16,tensor=4,transport=RaggedAllToAll()", (*KDA, "batch=16")),
    Case("kimi_linear_48b", "v5p:8x8x8", "kimi_linear_48b_v5p", ("batch=1024",)),
    Case("kimi_linear_48b", "v6e:16x16", "fsdp=4,expert=64,transport=Balanced", ("batch=256",)),
    Case("kimi_linear_48b", "v5e:16x16", "fsdp=16,expert=16", ("batch=256",)),
    Case("attnres_194m", "v5p:2x2x4", "attnres_16", ("batch=192", "micro_batches=12")),
    Case("attnres_194m", "v6e:4x4", "attnres_16", ("batch=192", "micro_batches=12")),
    Case("attnres_194m", "v5e:4x4", "attnres_16", ("batch=192", "micro_batches=12")),
    Case("kimi_linear_48b", "v5p:8x8x8", "kimi_linear_48b_1m_v5p", ("seq_len=1048576", "batch=8")),
    Case("kimi_k3", "v5p:16x16x16", "kimi_k3_v5p", ("batch=1024", "optimizer.matrices.dtype=bfloat16")),
    Case("kimi_k3", "tpu7x:16x16x16", "kimi_k3_tpu7x", ("batch=1024", "optimizer.matrices.dtype=bfloat16")),
]


def configuration(config: str, settings: Iterable[str]) -> TrainConfig:
    return config_io.override(presets.load(config), settings)


def measure(case: Case) -> dict:
    """The entry of one layout."""
    config, topology, layout = configuration(case.config, case.settings), chips.topology(case.topology), case.layout
    start, layout = time.process_time(), layouts.load(layout)
    compiled.check_devices(layout, topology)
    program = compiled.lower(config, layout, chips.devices_of(topology)).compile()
    memory = compiled.memory_of(config, layout, topology, program.memory_analysis())
    seconds = round(time.process_time() - start)
    return {**case._asdict(), "bytes": memory.total, "parts": vars(memory), "processor_seconds": seconds}


def main(argv: list[str]) -> None:
    runtime.refuse_stray(argv)
    entries = json.loads(FILE.read_text())["layouts"] if FILE.exists() else []
    known = [(one["config"], one["topology"], one["layout"], tuple(one["settings"])) for one in entries]
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    for number, case in enumerate(CASES, 1):
        if tuple(case) in known:
            continue
        print(f"{number} of {len(CASES)}: {case}", flush=True)
        entries.append(measure(case))
        level = os.environ.get("JAX_OPTIMIZATION_LEVEL", "")
        FILE.write_text(json.dumps({**versions, "optimization_level": level, "layouts": entries}, indent=1) + "\n")


if __name__ == "__main__":
    runtime.start_without_devices()
    app.run(main)
