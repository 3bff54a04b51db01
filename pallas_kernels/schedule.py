"""Cycles of a TPU program, counted in the compiler's schedule on a machine without a TPU.

libtpu compiles for a described topology and can write out the final instruction bundles of every op. One bundle issues
per cycle, so bundles times trip counts of the loops around them is the issue time. Stalls on memory and network are not
in it. The number is the same on every run. A loop whose trip count is not a constant counts once.

    python -m pallas_kernels.schedule MODULE:FUNCTION --topology v5p:2x2x1

FUNCTION takes no argument and returns [(label, function, arguments)]; arguments may be jax.ShapeDtypeStruct. Prints one
JSON object per label: total cycles, cycles by op, the bytes of temporary memory, and those that ops move through HBM,
operands counted whole. Needs jax and libtpu.
"""

import argparse
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
ITEM_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4,
    "f32": 4, "s64": 8, "u64": 8, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "f8e8m0fnu": 1, "f4e2m1fn": 0.5,
}  # fmt: skip

_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s*([A-Z]{2})?\s*:\s*((?:>\s*)*)\{(\})?")
_TRIPS = re.compile(r"totalorder [^,]+, (-?\d+)\s*/\* loop exit test")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-<>]+) = (.*?[\s)}])([a-z][\w\-]*)\((.*?)\)(?:,|$)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_MOVE_NOTHING = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "copy-done", "after-all", "iota"}
_FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")


def measure(target: str, topology: str, *, search: Path | str = "") -> list[dict]:
    """Compiles what MODULE:FUNCTION lists for the topology, in a process of its own, and counts.

    search: folder of MODULE if it is not importable.

    Raises:
      RuntimeError: the compilation failed; the message is the end of its output.
    """
    with tempfile.TemporaryDirectory() as dump:
        flags = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_emit_annotations=true"
        environment = dict(
            os.environ,
            JAX_PLATFORMS="cpu",
            JAX_ENABLE_COMPILATION_CACHE="0",
            TPU_SKIP_MDS_QUERY="1",
            TPU_WORKER_HOSTNAMES="localhost",
            ALLOW_MULTIPLE_LIBTPU_LOAD="1",
            LIBTPU_INIT_ARGS=flags,
            PYTHONPATH=os.pathsep.join(filter(None, (str(search), os.environ.get("PYTHONPATH")))),
        )
        command = [sys.executable, "-m", "pallas_kernels.schedule", target, "--topology", topology, "--dump", dump]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"compiling {target} for {topology} failed:\n{run.stderr[-2000:]}")
        return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def compile_and_count(target: str, topology: str, dump: str):
    """Runs in the process that `measure` starts: yields one report per program."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    sys.path.insert(0, os.getcwd())
    module, function = target.split(":")
    description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    mesh = jax.sharding.Mesh(np.array(description.devices[:1]), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for label, run, arguments in getattr(importlib.import_module(module), function)():
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
        before = set(os.listdir(dump))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            compiled = jax.jit(run).lower(*shapes).compile()
        new = map(_FILE.fullmatch, set(os.listdir(dump)) - before)
        ops = {m[1]: cycles(Path(dump, m[0]).read_text(errors="replace")) for m in new if m and _is_op(m[1])}
        memory = compiled.memory_analysis().temp_size_in_bytes
        total = sum(ops.values())
        moved = hbm_bytes(compiled.as_text())
        yield dict(
            label=label, topology=topology, cycles=total, ops=ops, temporary_bytes=memory, hbm_bytes=sum(moved.values())
        )


def _is_op(name):
    """False for dumps of the whole program and of passes that ran again."""
    return not name.startswith(("TLP", "<late")) and "schedule-analysis" not in name


def cycles(text: str) -> int:
    """Issue cycles of one op from its listing of final bundles.

    A bundle is `address FLAG : > > { ... }` with one `>` per loop around it; LB marks the first bundle of a loop, and
    the exit test inside the loop names its trip count.
    """
    total, open_loops = 0, []  # of [depth, trips, cycles]

    def close(depth):
        nonlocal total
        while open_loops and open_loops[-1][0] >= depth:
            _, trips, inside = open_loops.pop()
            if open_loops:
                open_loops[-1][2] += trips * inside
            else:
                total += trips * inside

    depth = 0
    for line in text.splitlines():
        bundle = _BUNDLE.match(line)
        if bundle:
            if not bundle[3]:  # an empty bundle is printed without its depth
                depth = bundle[2].count(">")
            close(depth + 1 if bundle[1] != "LB" else depth)
            if bundle[1] == "LB":
                open_loops.append([depth, 1, 0])
            if open_loops:
                open_loops[-1][2] += 1
            else:
                total += 1
        exit_test = _TRIPS.search(line)
        if exit_test and open_loops and open_loops[-1][0] == depth:
            open_loops[-1][1] = max(int(exit_test[1]), 1)
    close(0)
    return total


def hbm_bytes(program: str) -> dict[str, int]:
    """Bytes of results and operands of each instruction of the entry computation that are not kept in VMEM."""
    sizes, moved = {}, {}
    for line in program[program.index("\nENTRY ") :].splitlines()[2:]:
        found = _INSTRUCTION.match(line)
        if not found:
            continue
        name, result, operation, operands = found.groups()
        arrays = [x for x in _ARRAY.findall(result) if x[0] in ITEM_BYTES and "S(1)" not in x[2]]
        counts = [(kind, math.prod(int(n) for n in shape.split(",") if n)) for kind, shape, _ in arrays]
        sizes[name] = sum(ITEM_BYTES[kind] * count for kind, count in counts)
        if operation not in _MOVE_NOTHING:
            moved[name] = sizes[name] + sum(sizes.get(x, 0) for x in re.findall(r"%([\w.\-<>]+)", operands))
    return moved


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="MODULE:FUNCTION")
    parser.add_argument("--topology", default="v5p:2x2x1", help=", ".join(TOPOLOGIES))
    parser.add_argument("--dump", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.dump:
        reports = compile_and_count(arguments.target, arguments.topology, arguments.dump)
    else:
        reports = measure(arguments.target, arguments.topology)
    for report in reports:
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
