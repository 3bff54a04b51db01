"""The smallest run with every kind of layer, shared by the tests of the step, the loop and sampling."""

import pathlib

import pytest

from k3jax.config_data import TextFolder
from k3jax.config_optim import Cosine, Optimizer
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
def micro(text, micro_model) -> TrainConfig:
    """A run of the smallest model with every kind of layer."""
    return TrainConfig(
        model=micro_model,
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
