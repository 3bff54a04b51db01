"""Shared test set-up: a CPU backend with eight devices, quick compilation, and the persistent compilation cache."""

import gc
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile much and compute little: an unoptimized backend halves their time.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"

import jax  # noqa: E402
import pytest  # noqa: E402

from k3jax import config as c  # noqa: E402
from k3jax import runtime  # noqa: E402

runtime.start()

ROOT = pathlib.Path(__file__).parent.parent
MAPS = pathlib.Path("/proc/self/maps")


@pytest.fixture(scope="module", autouse=True)
def room_for_programs():
    """Compiled programs stay mapped, and a process with more than 65,530 maps dies in the midst of a compilation."""
    yield
    if MAPS.exists() and MAPS.read_text().count("\n") > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def tpu_compiler() -> Callable[..., str]:
    """Runs a script in a process of its own, because libtpu and the eight devices here do not mix; what it prints."""

    def run(script: pathlib.Path, *arguments: str, level: str) -> str:
        environment = os.environ | {
            "JAX_OPTIMIZATION_LEVEL": level,
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "XLA_FLAGS": "",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        ended = subprocess.run([sys.executable, script, *arguments], env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr[-3000:]
        return ended.stdout

    return run


@pytest.fixture(scope="session")
def goldens() -> pathlib.Path:
    """The committed goldens."""
    return ROOT / "tests" / "goldens"


@pytest.fixture(scope="session")
def micro_model() -> c.ModelConfig:
    """Three layers: KDA with a dense part, KDA with experts, MLA with experts; two depth blocks."""
    return c.ModelConfig(
        vocab=258,
        dim=16,
        layers=3,
        full_attention=(3,),
        kda=c.KDA(heads=2, head_dim=8, forget_rank=4),
        mla=c.MLA(heads=2, q_rank=8, kv_rank=8, nope_dim=8, shared_dim=4, v_dim=8),
        dense_width=24,
        dense_layers=1,
        moe=c.MoE(experts=4, active=2, width=8, shared=1, latent=c.Latent(8)),
        residual=c.BlockAttnRes(2),
        init_std=0.1,
        dtype="float32",
        remat="none",
    )


@pytest.fixture
def key():
    return jax.random.key(0)
