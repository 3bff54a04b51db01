"""What the devices can compute at best: from their makers' data sheets, or measured on a CPU."""

import os
import pathlib
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax import run_folder

FILE = "peak.json"

# Dense bfloat16 floating-point operations per second of one JAX device, by how its kind begins; longer names first.
# TPUs: cloud.google.com/tpu/docs/{v3,v4,v5e,v5p,v6e,tpu7x}. JAX shows one device per chip from v4 on, except that the
# two TensorCores of v3 and TPU7x chips are devices of their own.
# GPUs: NVIDIA's data sheets, without the factor 2 for sparsity.
PEAKS = {
    "TPU v3": 61.5e12,
    "TPU v4 lite": 138e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,
    "NVIDIA A100": 312e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA B300": 2250e12,
    "NVIDIA GB300": 2500e12,
}


class Peak(NamedTuple):
    """Operations per second of all devices together; None where it is not known. ``source`` says of what and whence."""

    flops_per_second: float | None
    source: str


def of_devices(run: str | os.PathLike) -> Peak:
    """The peak of the devices that this run trains on.

    A CPU's is measured once, as the best of a few float32 matrix products, and kept in the run's folder.
    """
    devices = jax.devices()
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        return _of_cpu(pathlib.Path(run) / FILE)
    one = device_peak(kind)
    if one is None:
        return Peak(None, f"no peak is known for {kind!r}")
    return Peak(one * len(devices), f"{len(devices)} x {kind}, {one / 1e12:g} TFLOP/s each (data sheet, bfloat16)")


def device_peak(kind: str) -> float | None:
    """Dense bfloat16 operations per second of one device, by its ``device_kind``; None if it is not in the table."""
    found = [name for name in PEAKS if kind.lower().startswith(name.lower())]
    return PEAKS[max(found, key=len)] if found else None


def _of_cpu(path: pathlib.Path) -> Peak:
    kept = run_folder.read_json(path)
    if kept.get("cores") != os.cpu_count():
        kept = {"cores": os.cpu_count(), "flops_per_second": measure()}
        if jax.process_index() == 0:
            run_folder.write_json(path, kept)
    total = kept["flops_per_second"] * jax.process_count()
    return Peak(total, f"{jax.process_count()} CPU, {kept['cores']} cores (measured, float32)")


def measure(size: int = 1024, repeats: int = 5) -> float:
    """Operations per second of the default device in the fastest of some products of two float32 matrices."""
    a = jnp.ones((size, size), jnp.float32)
    product = jax.jit(jnp.matmul).lower(a, a).compile()
    product(a, a).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        product(a, a).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
