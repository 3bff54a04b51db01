"""Kimi Delta Attention: one public function, its reference and its implementations."""

from pallas_kernels.kda.api import kda, kda_step

__all__ = ["kda", "kda_step"]
