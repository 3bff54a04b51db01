"""The short convolution and the depth mixture as XLA compiles them, beside their kernels. Needs libtpu, but no TPU.

  python tests/kernels/beside_xla.py --topologies=v5e:2x2,v5p:2x2x1,v6e:2x2,tpu7x:2x2x1

B = 1, T = 2048, bfloat16, packed documents: 96 heads of 128 with 4 taps; 8 sources of width 7168. The bound of a
program is the larger of its cycles over the clock and its HBM bytes over the bandwidth, all operations together.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
from absl import app, flags

from k3jax.model import attnres, kda
from pallas_kernels import depth_mix, schedule
from pallas_kernels.short_conv import short_conv

T, H, K, TAPS, S, D, EPS = 2048, 96, 128, 4, 8, 7168, 1e-5
# Clock in Hz and HBM bytes per second of a device; TPU7x's clock is fitted to published times of a kernel.
CHIPS = {"v5e:2x2": (1.5e9, 0.819e12), "v5p:2x2x1": (1.75e9, 2.765e12), "v6e:2x2": (1.75e9, 1.64e12)}
CHIPS |= {"tpu7x:2x2x1": (1.55e9, 3.69e12)}


def programs():
    return _convolution() + _mixture()


def _convolution():
    x, ids = jax.ShapeDtypeStruct((1, T, H, K), jnp.bfloat16), jax.ShapeDtypeStruct((1, T), jnp.int32)
    taps = jax.ShapeDtypeStruct((TAPS, H, K), jnp.float32)

    def both(run):
        def gradients(x, taps, dy, ids):
            y, pull = jax.vjp(lambda x, taps: run(x, taps, ids), x, taps)
            return y, pull(dy)

        return [("forward", run, (x, taps, ids)), ("forward + backward", gradients, (x, taps, x, ids))]

    return _named("convolution", {"XLA": both(kda._short_conv_plain), "kernel": both(short_conv)})


def _mixture():
    running, sources = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, T, D), (S, 1, T, D)))
    count, u = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((D,), jnp.float32)

    def both(forward, backward):
        def gradients(running, sources, count, u, dh):
            arrays = running, sources, count, u
            return forward(*arrays), backward(*arrays, dh)

        arrays = running, sources, count, u
        return [("forward", forward, arrays), ("forward + backward", gradients, (*arrays, running))]

    plain = both(lambda *x: attnres._mix_plain(EPS, *x), lambda *x: attnres._gradients_plain(EPS, *x))
    fused = both(lambda *x: depth_mix.forward(*x, eps=EPS), lambda *x: depth_mix.backward(*x, eps=EPS))
    return _named("depth mixture", {"XLA": plain, "kernel": fused})


def _named(operation, programs):
    return [(f"{operation:14}{label:20}{kind}", *rest) for kind, those in programs.items() for label, *rest in those]


def main(_):
    print(f"{'':14}{'':42}{'cycles':>10}{'HBM MB':>9}{'bound us':>10}")
    for topology in flags.FLAGS.topologies:
        clock, bandwidth = CHIPS[topology]
        for report in schedule.measure("beside_xla:programs", topology, search=Path(__file__).parent):
            bound = max(report["cycles"] / clock, report["hbm_bytes"] / bandwidth)
            numbers = f"{report['cycles']:10,}{report['hbm_bytes'] / 1e6:9.0f}{1e6 * bound:10.0f}"
            print(f"{topology:14}{report['label']:42}{numbers}", flush=True)


if __name__ == "__main__":
    flags.DEFINE_list("topologies", list(CHIPS), "what to compile for")
    app.run(main)
