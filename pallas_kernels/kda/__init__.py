"""Kimi Delta Attention: one public function, its reference and its implementations."""

from pallas_kernels.kda.api import describe, kda, kda_step

__all__ = ["describe", "kda", "kda_step"]
