"""Programs whose schedules are held to a budget: every kernel, at shapes small enough to compile in seconds.

After a change that is meant to cost cycles: ``python tests/kernels/schedule_targets.py`` writes the budgets anew.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels import depth_mix, schedule
from pallas_kernels.kda import Pool, Records, mosaic_tpu_decode
from pallas_kernels.kda.mosaic_tpu import kda_mosaic_tpu
from pallas_kernels.short_conv import short_conv

LIBTPU = "0.0.52"  # every version schedules in its own way: .ci/run installs this one
BUDGETS = Path(__file__).with_name("schedule_budgets.json")
TARGET = "schedule_targets:kernels"
B, T, H, WIDTH = 1, 128, 2, 128
N, SLOTS, DRAFT, TAPS = 4, 4, 2, 4
DEPTH_WIDTH = 7168


def _array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def kernels():
    """Forward and backward for both gates and with packed documents; decoding, verification, commit; forward and
    backward of the convolution and of the depth mixture."""
    return _sequences() + _decoding() + around_attention()


def _sequences():
    wide = _array(B, T, H, WIDTH)
    parameters = _array(H, dtype=jnp.float32), _array(H, WIDTH, dtype=jnp.float32)
    arguments = (wide, wide, wide, wide, wide, _array(B, T, H), *parameters)
    ids = _array(B, T, dtype=jnp.int32)
    packed = lambda ids, *x: _gradients(*x, lower_bound=-5.0, ids=ids)  # noqa: E731
    return [
        ("gradients", functools.partial(_gradients, lower_bound=-5.0), arguments),
        ("gradients, unbounded", functools.partial(_gradients, lower_bound=None), arguments),
        ("gradients, packed", packed, (ids, *arguments)),
    ]


def _gradients(do, *arguments, lower_bound, ids=None):
    static = dict(lower_bound=lower_bound, num_segments=None, chunk_size=64)
    o, pull = jax.vjp(lambda *x: kda_mosaic_tpu(*x, None, ids, **static)[0], *arguments)
    return o, pull(do)


def _decoding():
    def tokens(m):
        return [_array(N, m, H, WIDTH)] * 4 + [_array(N, m, H)]

    f32 = functools.partial(_array, dtype=jnp.float32)
    parameters = (f32(H), f32(H, WIDTH), *[f32(TAPS, H, WIDTH)] * 3)
    pool = Pool(f32(SLOTS, H, WIDTH, WIDTH), (_array(SLOTS, TAPS - 1, H, WIDTH),) * 3)
    row = _array(N, dtype=jnp.int32)
    records = Records(*[f32(N, DRAFT, H, WIDTH)] * 3, tuple(tokens(DRAFT)[:3]))
    step = functools.partial(mosaic_tpu_decode.decode, lower_bound=-5.0)
    verify = functools.partial(mosaic_tpu_decode.verify, lower_bound=-5.0)
    return [
        ("decode", step, (tokens(1), parameters, pool, row)),
        ("verify", verify, (tokens(DRAFT), parameters, pool, row)),
        ("commit", mosaic_tpu_decode.commit, (pool, row, records, row)),
    ]


def around_attention():
    x, taps = _array(B, T, H, WIDTH), _array(TAPS, H, WIDTH, dtype=jnp.float32)
    ids, count, u = _array(B, T, dtype=jnp.int32), _array(dtype=jnp.int32), _array(DEPTH_WIDTH, dtype=jnp.float32)
    running, sources = _array(B, 32, DEPTH_WIDTH), _array(8, B, 32, DEPTH_WIDTH)

    def convolution(x, taps, ids, dy):
        y, pull = jax.vjp(lambda x, taps: short_conv(x, taps, ids), x, taps)
        return y, pull(dy)

    def mixture(running, sources, count, u, dh):
        arrays = running, sources, count, u
        return depth_mix.forward(*arrays, eps=1e-5), depth_mix.backward(*arrays, dh, eps=1e-5)

    return [
        ("short convolution", convolution, (x, taps, ids, x)),
        ("depth mixture", mixture, (running, sources, count, u, running)),
    ]


def measure(topology) -> dict:
    """Cycles of the kernels by program; what XLA puts around them is not counted."""
    reports = schedule.measure(TARGET, topology, search=Path(__file__).parent)
    kernel = lambda op: any(name in op for name in ("kda_", "short_conv", "depth_mix"))  # noqa: E731
    return {r["label"]: sum(n for op, n in r["ops"].items() if kernel(op)) for r in reports}


if __name__ == "__main__":
    BUDGETS.write_text(json.dumps({topology: measure(topology) for topology in schedule.TOPOLOGIES}, indent=1) + "\n")
