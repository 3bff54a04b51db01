"""Small models and folders in the released format."""

import pathlib
import shutil
from collections.abc import Callable

import numpy as np
import pytest

from k3jax import config as c
from k3jax.model import weights

GOLDENS = ("k3_tiny", "k3_tiny_mxfp4", "kimi_linear_tiny")


@pytest.fixture(scope="session")
def small_k3() -> c.ModelConfig:
    """Every part of K3; widths that differ where they can, and experts that can be packed."""
    return c.ModelConfig(
        vocab=40,
        dim=48,
        layers=6,
        full_attention=(3, 6),
        kda=c.KDA(heads=3, head_dim=8, forget_rank=8),
        mla=c.MLA(heads=4, q_rank=14, kv_rank=10, nope_dim=6, shared_dim=4, v_dim=7),
        dense_width=20,
        dense_layers=1,
        moe=c.MoE(experts=5, active=2, width=32, shared=2, latent=c.Latent(64)),
        residual=c.BlockAttnRes(2),
        dtype="float32",
    )


@pytest.fixture(scope="session")
def small_linear(small_k3) -> c.ModelConfig:
    """Every part of Kimi Linear."""
    kda = c.replace(small_k3.kda, decay=c.SoftplusDecay(), output_gate=c.LowRankGate(8))
    return c.replace(
        small_k3,
        kda=kda,
        mla=c.replace(small_k3.mla, q_rank=None, output_gate=c.NoGate()),
        moe=c.replace(small_k3.moe, latent=None, width=12, shared=1, scale=2.4),
        residual=c.PlainResidual(),
        activation=c.SwiGLU(),
    )


@pytest.fixture(scope="session")
def numbered() -> Callable:
    """Weights in which no two numbers of a tensor are equal, so that a wrong axis order cannot pass."""

    def make(model: c.ModelConfig) -> tuple[dict, dict]:
        rng = np.random.default_rng(0)

        def draw(tree):
            if isinstance(tree, dict):
                return {key: draw(node) for key, node in tree.items()}
            return rng.normal(size=tree.shape).astype(np.float32)

        shapes = weights.structure(model).shapes
        return draw(shapes.params), draw(shapes.router)

    return make


@pytest.fixture(params=GOLDENS)
def golden(request, goldens) -> pathlib.Path:
    return goldens / request.param


@pytest.fixture
def linear_copy(goldens, tmp_path) -> pathlib.Path:
    """A Kimi Linear folder to damage."""
    return _copy(goldens / "kimi_linear_tiny", tmp_path)


@pytest.fixture
def k3_copy(goldens, tmp_path) -> pathlib.Path:
    """A Kimi K3 folder, experts packed, to damage."""
    return _copy(goldens / "k3_tiny_mxfp4", tmp_path)


def _copy(source: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    target = tmp_path / source.name
    target.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(source / file, target / file)
    return target
