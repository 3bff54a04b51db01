"""The smallest model with both kinds of attention and experts."""

import pytest

from k3jax import config as c


@pytest.fixture(scope="session")
def model() -> c.ModelConfig:
    """Two layers: KDA with a dense part, MLA with experts."""
    return c.ModelConfig(
        vocab=258,
        dim=16,
        layers=2,
        full_attention=(2,),
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
