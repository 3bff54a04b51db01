"""Shared test set-up: a CPU backend with eight devices, quick compilation, and the persistent compilation cache."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile much and compute little: an unoptimized backend halves their time.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"

import jax  # noqa: E402
import pytest  # noqa: E402

from k3jax import runtime  # noqa: E402

runtime.start()

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="session")
def goldens() -> pathlib.Path:
    """The committed goldens."""
    return ROOT / "tests" / "goldens"


@pytest.fixture
def key():
    return jax.random.key(0)
