"""A model small enough for every test here, with every part of K3 in it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax import config as c
from k3jax import nn


@pytest.fixture(scope="session")
def tiny() -> c.ModelConfig:
    """Three layers, KDA with a dense feed-forward and MLA twice, in depth blocks of two; the last block is partial.

    No two widths are equal, and weights start large enough for every part to matter.
    """
    return c.ModelConfig(
        vocab=29,
        dim=24,
        layers=3,
        full_attention=(2, 3),
        kda=c.KDA(heads=2, head_dim=8, forget_rank=5),
        mla=c.MLA(heads=3, q_rank=14, kv_rank=10, nope_dim=6, shared_dim=4, v_dim=7),
        dense_width=20,
        dense_layers=1,
        moe=c.MoE(experts=6, active=2, width=9, shared=2, latent=c.Latent(11)),
        residual=c.BlockAttnRes(2),
        init_std=0.2,
        dtype="float32",
        remat="none",
    )


@pytest.fixture(scope="session")
def shaken() -> Callable:
    """Weights with noise on every array: what starts at zero or one (queries, gains, biases) takes part too."""

    def shake(tree):
        rng = np.random.default_rng(1)
        return jax.tree.map(lambda x: jnp.asarray(x + 0.2 * rng.standard_normal(x.shape), x.dtype), tree)

    return shake


@pytest.fixture(scope="session")
def build(shaken) -> Callable:
    """``(weights, bind)`` of a module: a plain dict of shaken arrays, and what makes the module from such a dict."""

    def split(make):
        graph, state = nnx.split(nn.initialize(make, 0))
        return shaken(nnx.to_pure_dict(state)), lambda weights: nnx.merge(graph, weights)

    return split


@pytest.fixture(scope="session")
def assert_close() -> Callable:
    """Compares two trees leaf by leaf: ``|got - want| <= tolerance (|want| + floor)`` in the Frobenius norm."""

    def compare(got, want, tolerance: float, floor: float = 1e-6):
        got, want = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (got, want))
        assert [path for path, _ in got] == [path for path, _ in want]
        for (path, a), (_, b) in zip(got, want):
            assert jnp.shape(a) == jnp.shape(b), jax.tree_util.keystr(path)
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            error = np.linalg.norm(a - b) / (np.linalg.norm(b) + floor)
            assert error <= tolerance, f"{jax.tree_util.keystr(path)}: relative error {error:.2e} above {tolerance:.0e}"

    return compare
