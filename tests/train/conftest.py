"""The smallest run with every kind of layer, shared by the tests of the step, the loop and sampling."""

import pathlib

import pytest

from k3jax import config as c
from k3jax.config_data import TextFolder
from k3jax.config_optim import Cosine, Optimizer
from k3jax.data import ByteTokenizer
from k3jax.run_config import TrainConfig


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> pathlib.Path:
    """A folder with a few files of text."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(8):
        lines = [f"line {number * line} of file {number}: {'ab' * (line % 7)}\n" for line in range(30)]
        (folder / f"{number}.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="session")
def micro(text) -> TrainConfig:
    """Three layers: KDA with a dense part, KDA with experts, MLA with experts; two depth blocks."""
    model = c.ModelConfig(
        vocab=ByteTokenizer.size,
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
    return TrainConfig(
        model=model,
        optimizer=Optimizer(schedule=Cosine(peak=1e-2)),
        data=TextFolder(path=str(text), held_out=0.2),
        seq_len=40,
        batch=4,
        steps=6,
        log_every=1,
        eval_every=4,
        eval_bytes=500,
        checkpoint_every=3,
        loss_chunk=16,
        sample_prompt="line ",
        sample_tokens=8,
    )
