"""Optimization: Muon on Optax, learning-rate schedules, QK-Clip."""

from k3jax.optim.build import build_optimizer, learning_rate, update_rms
from k3jax.optim.muon import newton_schulz, orthogonalize, scale_by_muon
from k3jax.optim.qk_clip import qk_clip
from k3jax.optim.schedule import make_schedule

__all__ = [
    "build_optimizer",
    "learning_rate",
    "make_schedule",
    "newton_schulz",
    "orthogonalize",
    "qk_clip",
    "scale_by_muon",
    "update_rms",
]
