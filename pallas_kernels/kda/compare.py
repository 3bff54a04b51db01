"""KDA beside tokamax by the compiler's schedule: cycles, HBM traffic, temporary memory. Needs libtpu, but no TPU.

  python -m pallas_kernels.kda.compare --topologies=v5p:2x2x1,v6e:2x2,tpu7x:2x2x1 --programs=own,tokamax

Whole operations, from raw inputs to the output and to all gradients; B = 1, T = 2048, H = 16, K = V = 128, bfloat16,
bounded gate; every implementation in its own layout of arguments. tokamax is no requirement of this repository: without
it, its rows say so. The packed programs hold the same tokens with segment ids.

The last columns are chains of matrix products each of which needs the one before, whatever the passes of each: of one
chunk through all kernels, and from the state before a chunk to the state after it, the longest of any kernel.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
from absl import app, flags, logging

from pallas_kernels import schedule
from pallas_kernels.kda.mosaic_tpu import kda_mosaic_tpu
from pallas_kernels.kda.product_chains import chains

B, T, H, WIDTH = 1, 2048, 16, 128
KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
TOPOLOGIES = flags.DEFINE_list("topologies", ["v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"], "what to compile for")
PROGRAMS = flags.DEFINE_list("programs", ["own", "tokamax"], "functions of this file: own, own_packed, tokamax, ...")


def own():
    """Programs of this repository, as ``pallas_kernels.schedule`` takes them."""
    return _programs(_own, (B, T, H), packed=False)


def own_packed():
    return _programs(_own, (B, T, H), packed=True)


def tokamax():
    """Those of tokamax 0.0.17, which wants heads first and beta after its sigmoid."""
    return _programs(_tokamax, (H, B, T), packed=False)


def tokamax_packed():
    return _programs(_tokamax, (H, B, T), packed=True)


def _programs(run, leading, *, packed):
    wide = jax.ShapeDtypeStruct((*leading, WIDTH), jnp.bfloat16)
    parameters = jax.ShapeDtypeStruct((H,), jnp.float32), jax.ShapeDtypeStruct((H, WIDTH), jnp.float32)
    arguments = [wide] * 4 + [jax.ShapeDtypeStruct(leading, jnp.bfloat16), *parameters]
    ids = [jax.ShapeDtypeStruct((B, T), jnp.int32)] if packed else []

    def forward(*x):
        return run(x[: len(ids)], *x[len(ids) :])

    def gradients(*x):
        o, pull = jax.vjp(functools.partial(run, x[1 : 1 + len(ids)]), *x[1 + len(ids) :])
        return o, pull(x[0])

    return [("forward", forward, [*ids, *arguments]), ("forward + backward", gradients, [wide, *ids, *arguments])]


def _own(ids, *arguments):
    static = dict(lower_bound=-5.0, num_segments=None, chunk_size=64)
    return kda_mosaic_tpu(*arguments, None, *(ids or [None]), **static)[0]


def _tokamax(ids, q, k, v, gate, beta, A_log, dt_bias):
    from tokamax import config
    from tokamax._src.ops.kda import api  # not exported at the top in 0.0.17

    options = dict(use_qk_l2norm=True, use_gate_in_kernel=True, lower_bound=-5.0, implementation="mosaic")
    options |= dict(segment_ids=ids[0] + 1, max_num_segments=16) if ids else {}
    decays = dict(a_log=A_log, delta_time_bias=dt_bias.reshape(-1))
    with config.cross_compile(True):
        return api.kimi_delta_attention(q, k, v, gate, jax.nn.sigmoid(beta), **decays, **options)[0]


def rows(name, topology):
    """A line of the table for every program of a function of this file."""
    device = jax.sharding.AbstractDevice(KINDS[topology.split(":")[0]], None, "tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("device",), (jax.sharding.AxisType.Auto,), abstract_device=device)
    traced = {label: (run, arguments) for label, run, arguments in globals()[name]()}
    for report in schedule.measure(f"pallas_kernels.kda.compare:{name}", topology):
        run, arguments = traced[report["label"]]
        with jax.sharding.use_abstract_mesh(mesh):
            longest, of_state = chains(jax.make_jaxpr(run)(*arguments))
        cycles = report["cycles"] / (B * T * H)
        sizes = f"{report['hbm_bytes'] / 1e6:9.0f}{report['temporary_bytes'] / 1e6:14.0f}"
        yield f"{topology:14}{name:16}{report['label']:20}{cycles:22.2f}{sizes}{longest:16}{of_state:16}"


def main(_):
    logging.set_verbosity(logging.ERROR)  # of tokamax, for each kernel that it has not tuned
    titles = f"{'cycles / token, head':>22}{'HBM MB':>9}{'temporary MB':>14}"
    print(f"{'':14}{'':16}{'program':20}{titles}{'chain of chunk':>16}{'chain of state':>16}")
    for topology in TOPOLOGIES.value:
        for name in PROGRAMS.value:
            if name.startswith("tokamax") and importlib.util.find_spec("tokamax") is None:
                print(f"{topology:14}{name:16}not installed: pip install tokamax")
                continue
            for row in rows(name, topology):
                print(row, flush=True)


if __name__ == "__main__":
    app.run(main)
