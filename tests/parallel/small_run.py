"""The smallest runs with every part of a model in them, for tests on eight devices.

Rows of packed documents that cross all borders between shards, decays so weak that what one shard leaves behind matters
in all later ones, float32 throughout. Many widths are equal, so that Muon has few stacks of matrices to compile.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import config as c
from k3jax import step
from k3jax.config_data import StdlibCorpus
from k3jax.config_optim import Cosine, Optimizer, QKClip
from k3jax.data import Batch
from k3jax.roles import path_name
from k3jax.run_config import TrainConfig

B, T, D, VOCAB = 8, 32, 16, 264
CLIP = QKClip(threshold=0.2)


def run_of(
    layers: int,
    full_attention: tuple[int, ...],
    *,
    conv: int = 2,
    share: int = 1,
    experts: c.Balancer | None,
    **changes,
):
    """Layers of KDA, and of MLA where ``full_attention`` says, with a depth block for every two; ``experts``: how they
    are balanced, None for a model without."""
    balancer = experts or c.NoBalancing()
    model = c.ModelConfig(
        vocab=VOCAB,
        dim=D,
        layers=layers,
        full_attention=full_attention,
        kda=c.KDA(heads=4, head_dim=4, forget_rank=D, conv=conv),
        mla=c.MLA(heads=4, q_rank=D, kv_rank=8, nope_dim=4, shared_dim=8, v_dim=4, share=share),
        dense_width=D,
        dense_layers=0 if experts else layers,
        moe=c.MoE(experts=16, active=2, width=D, shared=1, latent=c.Latent(D), balancer=balancer),
        residual=c.BlockAttnRes(2),
        init_std=0.2,
        dtype="float32",
        remat="none",
    )
    return TrainConfig(
        model=c.replace(model, **changes),
        optimizer=Optimizer(schedule=Cosine(peak=0.1, warmup=0.0), qk_clip=CLIP),
        data=StdlibCorpus(),
        seq_len=T,
        batch=B,
        steps=4,
        loss_chunk=16,
    )


def batch() -> Batch:
    """Documents of 1 to 32 tokens that end anywhere, and padding at the end of some rows."""
    rng = np.random.default_rng(0)
    lengths = [[32], [5, 11, 9, 4], [1, 2, 3, 20, 6], [13, 19], [7], [3, 3, 3, 3, 3, 3], [31, 1], [16, 16]]
    segments = np.full((B, T), -1, np.int32)
    for row, documents in enumerate(lengths):
        ids = np.repeat(np.arange(len(documents)), documents)
        segments[row, : len(ids)] = ids
    tokens, targets = rng.integers(0, VOCAB, (2, B, T), dtype=np.int32)
    return Batch(tokens, targets, segments, (segments >= 0).astype(np.float32))


@functools.cache
def state_of(config: TrainConfig) -> step.TrainState:
    """Noise on every array, so that all of them take part, and decays of a few percent a token."""
    state, rng = step.init_state(config), np.random.default_rng(1)

    def shake(path, x):
        weak = path_name(path).endswith("dt_bias")
        return jnp.asarray((-4.0 if weak else np.asarray(x)) + 0.1 * rng.standard_normal(x.shape), jnp.float32)

    return state._replace(weights=jax.tree_util.tree_map_with_path(shake, state.weights))
