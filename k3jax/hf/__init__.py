"""The released Hugging Face format: checked import, streaming export."""

from k3jax.hf.checkpoint import Checkpoint, Release, open_checkpoint
from k3jax.hf.errors import CheckpointError
from k3jax.hf.load import load_hf
from k3jax.hf.save import release_for, save_hf

__all__ = ["Checkpoint", "CheckpointError", "Release", "load_hf", "open_checkpoint", "release_for", "save_hf"]
