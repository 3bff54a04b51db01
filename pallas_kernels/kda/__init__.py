"""Kimi Delta Attention: one public function, its reference and its implementations; decoding on a pool of states.

GPUs take the chunked form. A kernel for them is to stand in `mosaic_gpu.py`, beside `mosaic_tpu.py`, under the same
tests.
"""

from pallas_kernels.kda.api import describe, kda, kda_step
from pallas_kernels.kda.decode import Pool, Records, kda_commit, kda_decode, kda_verify

__all__ = ["Pool", "Records", "describe", "kda", "kda_commit", "kda_decode", "kda_step", "kda_verify"]
