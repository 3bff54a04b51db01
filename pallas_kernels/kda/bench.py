"""Time and memory of KDA, value and all gradients, beside tokamax: ``python -m pallas_kernels.kda.bench``.

Every implementation runs in a process of its own, so that its peak memory is its own. tokamax is no requirement of this
repository; ``pip install tokamax`` into this environment, or name the interpreter of another one:

  python -m pallas_kernels.kda.bench --shape=1,4096,4,128,128 --tokamax_python=/path/to/venv/bin/python

On a TPU, `--runs=mosaic_tpu,"tokamax mosaic" --dtype=bfloat16 --shape=1,8192,32,128,128` also prints the share of the
matrix units' and of the memory's limit that is reached: `work` over the peak over the measured time. What a program
without a TPU can say is in `compare.py`.
"""

import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from pallas_kernels.kda import kda

SHAPE = flags.DEFINE_list("shape", ["1", "4096", "4", "128", "128"], "B, T, H, K, V")
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "dtype of tokens")
RUNS = flags.DEFINE_list("runs", ["chunked", "tokamax xla_chunked"], "implementations; 'tokamax NAME' is tokamax's")
REPEATS = flags.DEFINE_integer("repeats", 7, "timed calls per measurement")
TOKAMAX_PYTHON = flags.DEFINE_string("tokamax_python", sys.executable, "interpreter that has tokamax")
WORKER = flags.DEFINE_string("worker", None, "measure this run in this process and print it as JSON")

MEASURES = {"value_ms": "value ms", "both_ms": "value+grad ms", "both_median_ms": "median", "temp_mb": "temp MB"}
MEASURES |= {"peak_mb": "process peak MB", "compile_s": "compile s"}
SHARES = {"value_mxu": "value MXU %", "value_hbm": "value HBM %", "both_mxu": "both MXU %", "both_hbm": "both HBM %"}
# Dense bfloat16 operations and bytes of HBM per second, by kind of device as JAX names it (vendor's data sheets).
PEAKS = {"TPU v5 lite": (197e12, 819e9), "TPU v5": (459e12, 2765e9), "TPU v6 lite": (918e12, 1640e9)}
PEAKS |= {"TPU7x": (1153e12, 3690e9)}
CHUNK, BLOCK, INVERSE_PRODUCTS = 64, 16, 10


def make_arguments(shape, dtype):
    """q, k, v, gate, beta, A_log, dt_bias with decays as at the start of training."""
    B, T, H, K, V = shape
    rng = np.random.default_rng(0)
    tokens = [rng.standard_normal((B, T, H, *width)) for width in ((K,), (K,), (V,), (K,), ())]
    decays = [jnp.zeros(H), jnp.asarray(0.5 * rng.standard_normal((H, K)) - 2, jnp.float32)]
    return [jnp.asarray(x, dtype) for x in tokens] + decays


def own(name):
    def run(q, k, v, gate, beta, A_log, dt_bias):
        return kda(q, k, v, gate, beta, A_log=A_log, dt_bias=dt_bias, implementation=name)[0]

    return run


def tokamax(name):
    """tokamax's function with this project's arguments; it wants heads first and beta after its sigmoid."""
    from tokamax._src.ops.kda import api  # not exported at the top in 0.0.17

    def run(q, k, v, gate, beta, A_log, dt_bias):
        q, k, v, gate, beta = (jnp.moveaxis(x, 2, 0) for x in (q, k, v, gate, jax.nn.sigmoid(beta)))
        options = dict(use_qk_l2norm=True, use_gate_in_kernel=True, lower_bound=-5.0, implementation=name)
        decays = dict(a_log=A_log, delta_time_bias=dt_bias.reshape(-1))
        return jnp.moveaxis(api.kimi_delta_attention(q, k, v, gate, beta, **decays, **options)[0], 0, 2)

    return run


def work(shape, bytes_per_number) -> dict:
    """(operations of matrix products, bytes of HBM) of the value and of value and gradients, by the chunk form.

    Forward: decayed products, inverse, two products with it, three with the state. Backward: those of seven products
    with states and five inside the chunk, after what the forward saved: the state at chunk starts, and the inverse.
    """
    B, T, H, K, V = shape
    C, tokens = CHUNK, B * T * H
    forward = 2 * K * (C + BLOCK) + 2 * C * C * INVERSE_PRODUCTS + 4 * C * V + 6 * K * V
    backward = 14 * K * V + 10 * C * V + 6 * K * (C + BLOCK)
    read, saved = bytes_per_number * (3 * K + V + 1), bytes_per_number * (K * V / C + C)
    out = bytes_per_number * V
    both = 2 * (read + saved) + 2 * out + read
    return {"value": (tokens * forward, tokens * (read + out)), "both": (tokens * (forward + backward), tokens * both)}


def shares(times: dict, shape, bytes_per_number) -> dict:
    """Percent of the peaks of the device under these times; empty for an unknown device."""
    peaks = PEAKS.get(jax.devices()[0].device_kind)
    if peaks is None:
        return {}
    needed = work(shape, bytes_per_number)
    return {
        f"{name}_{unit}": 100 * amount / peak / (1e-3 * times[f"{name}_ms"])
        for name in ("value", "both")
        for unit, amount, peak in zip(("mxu", "hbm"), needed[name], peaks)
    }


def measure(run, arguments, repeats) -> dict:
    """Best and median times of the compiled value and of value and all gradients, and their memory."""
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(arguments[2].shape), jnp.float32)

    def loss(*arguments):
        return jnp.sum(run(*arguments).astype(jnp.float32) * cotangent)

    def timed(function):
        start = time.perf_counter()
        compiled = jax.jit(function).lower(*arguments).compile()
        compile_s, times = time.perf_counter() - start, []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            times.append(1e3 * (time.perf_counter() - start))
        return compiled, compile_s, times[1:]

    _, _, value = timed(run)
    compiled, compile_s, both = timed(jax.value_and_grad(loss, argnums=tuple(range(len(arguments)))))
    return {
        "value_ms": min(value),
        "both_ms": min(both),
        "both_median_ms": statistics.median(both),
        "temp_mb": compiled.memory_analysis().temp_size_in_bytes / 1e6,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "compile_s": compile_s,
    }


def worker(name):
    kind, _, tokamax_name = name.partition(" ")
    run = tokamax(tokamax_name) if kind == "tokamax" else own(name)
    shape = tuple(int(n) for n in SHAPE.value)
    result = measure(run, make_arguments(shape, DTYPE.value), REPEATS.value)
    print(json.dumps(result | shares(result, shape, jnp.dtype(DTYPE.value).itemsize)))


def measure_apart(name) -> dict | str:
    """The measurement of one run in its own process, or why there is none."""
    python = TOKAMAX_PYTHON.value if name.startswith("tokamax") else sys.executable
    if python == sys.executable and name.startswith("tokamax") and importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed: pip install tokamax, or name an interpreter with --tokamax_python"
    flag_values = [f"--shape={','.join(SHAPE.value)}", f"--dtype={DTYPE.value}", f"--repeats={REPEATS.value}"]
    command = [python, "-m", "pallas_kernels.kda.bench", f"--worker={name}", *flag_values]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"failed: {done.stderr.strip().splitlines()[-1]}"
    return json.loads(done.stdout.splitlines()[-1])


def main(_):
    if WORKER.value:
        worker(WORKER.value)
        return
    print(f"KDA, B, T, H, K, V = {', '.join(SHAPE.value)}, {DTYPE.value}, on {jax.devices()[0].device_kind}")
    columns = MEASURES | (SHARES if jax.devices()[0].device_kind in PEAKS else {})
    print(f"{'':22}" + "".join(f"{title:>17}" for title in columns.values()))
    for name in RUNS.value:
        result = measure_apart(name)
        row = result if isinstance(result, str) else "".join(f"{result[key]:17.1f}" for key in columns)
        print(f"{name:22}{row}", flush=True)


if __name__ == "__main__":
    app.run(main)
