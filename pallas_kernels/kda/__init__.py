"""Kimi Delta Attention: one public function, its reference and its implementations; decoding on a pool of states."""

from pallas_kernels.kda.api import describe, kda, kda_step
from pallas_kernels.kda.decode import Pool, Records, kda_commit, kda_decode, kda_verify

__all__ = ["Pool", "Records", "describe", "kda", "kda_commit", "kda_decode", "kda_step", "kda_verify"]
