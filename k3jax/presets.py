"""Named runs. Each gives its parameters and those active for one token (the head counted, the embedding not).

What a paper prints is cited; what it leaves out is our choice and named as such. Every preset reads the embedded corpus
as bytes, because no pretraining corpus is public: set ``data`` and the steps for a run of your own.
"""

from collections.abc import Callable
from pathlib import Path

from k3jax import config as c
from k3jax import config_io
from k3jax.config_data import StdlibCorpus
from k3jax.config_optim import WSD, Cosine, Optimizer
from k3jax.data import ByteTokenizer
from k3jax.run_config import TrainConfig

VOCAB = 163840


def nano() -> TrainConfig:
    """The demonstration: every part of K3 at a size that two CPU cores train in minutes.

    2,665,179 parameters, 1,350,171 active.
    """
    model = c.ModelConfig(
        vocab=ByteTokenizer.size,
        dim=96,
        layers=13,
        full_attention=c.every_fourth(13),
        kda=c.KDA(heads=3, head_dim=32, forget_rank=16),
        mla=c.MLA(heads=3, q_rank=48, kv_rank=32, nope_dim=32, shared_dim=16, v_dim=32),
        dense_width=256,
        dense_layers=3,
        moe=c.MoE(experts=16, active=2, width=64, shared=1, latent=c.Latent(48)),
        residual=c.BlockAttnRes(4),
        init_std=0.05,
        dtype="float32",
        remat="full",
    )
    return TrainConfig(
        model=model,
        optimizer=Optimizer(schedule=Cosine(peak=1e-2)),
        data=StdlibCorpus(held_out=0.008),
        seq_len=256,
        batch=4,
        steps=360,
        eval_every=90,
        eval_bytes=30_000,
        checkpoint_every=180,
        loss_chunk=128,
    )


def tiny() -> TrainConfig:
    """For tests: the smallest model that takes every branch, with widths that are all different where they can be.

    236,331 parameters, 179,691 active.
    """
    model = c.ModelConfig(
        vocab=ByteTokenizer.size,
        dim=32,
        layers=13,
        full_attention=c.every_fourth(13),
        kda=c.KDA(heads=3, head_dim=16, forget_rank=8),
        mla=c.MLA(heads=2, q_rank=24, kv_rank=20, nope_dim=12, shared_dim=6, v_dim=10),
        dense_width=48,
        dense_layers=1,
        moe=c.MoE(experts=8, active=2, width=14, shared=2, latent=c.Latent(16)),
        residual=c.BlockAttnRes(3),
        dtype="float32",
        remat="none",
    )
    return TrainConfig(
        model=model,
        optimizer=Optimizer(),
        data=StdlibCorpus(),
        seq_len=72,
        batch=4,
        steps=20,
        log_every=1,
        eval_every=10,
        eval_bytes=1000,
        checkpoint_every=10,
        loss_chunk=40,
        sample_tokens=16,
    )


def attnres_194m() -> TrainConfig:
    """First rung of the scaling ladder of Attention Residuals (arXiv 2603.15031, table 2); see :func:`_attnres`.

    1,149,535,276 parameters, 340,411,436 active, of which 194 M are printed (without the head).
    """
    return _attnres(layers=12, dim=896, width=400, peak=2.99e-3, batch=192, tokens=38.7e9)


def attnres_241m() -> TrainConfig:
    """Second rung of the same ladder.

    1,391,288,053 parameters, 397,926,133 active, of which 241 M are printed (without the head).
    """
    return _attnres(layers=13, dim=960, width=432, peak=2.80e-3, batch=256, tokens=45.4e9)


def attnres_296m() -> TrainConfig:
    """Third rung of the same ladder.

    1,668,868,812 parameters, 463,399,628 active, of which 296 M are printed (without the head).
    """
    return _attnres(layers=14, dim=1024, width=464, peak=2.50e-3, batch=320, tokens=62.1e9)


def attnres_436m() -> TrainConfig:
    """Fourth rung of the same ladder, the one of the paper's ablations.

    2,372,629,808 parameters, 627,170,608 active, of which 436 M are printed (without the head).
    """
    return _attnres(layers=16, dim=1168, width=528, peak=2.20e-3, batch=384, tokens=87.9e9)


def attnres_528m() -> TrainConfig:
    """Fifth rung of the same ladder.

    2,845,188,732 parameters, 735,421,052 active, of which 528 M are printed (without the head).
    """
    return _attnres(layers=17, dim=1264, width=560, peak=2.02e-3, batch=432, tokens=119e9)


def kimi_linear_653m() -> TrainConfig:
    """First rung of the scaling ladder of Kimi Linear (arXiv 2510.26692): 16 layers and heads, width 1216, 8 experts of
    64, batch 336 x 4096, learning rate 2.006e-3, 38.8 B tokens.

    The expert width 544 is inferred from the printed 653 M active, taken to count one of the two embeddings; the width
    of the dense layer is nine experts, as in the 48 B model; the cosine schedule is our choice.

    2,518,642,496 parameters, 652,422,976 active.
    """
    model = _kimi_linear(layers=16, heads=16, dim=1216, experts=64, width=544, dense_width=9 * 544)
    return _run(model, Cosine(peak=2.006e-3), seq_len=4096, batch=336, tokens=38.8e9)


def kimi_linear_48b() -> TrainConfig:
    """Kimi Linear 48B-A3B (arXiv 2510.26692): 1.4 T tokens in batches of 32 M, WSD from 1.1e-3. The shares of warm-up
    and decay are our choice.

    49,122,681,728 parameters, 3,106,972,544 active.
    """
    model = _kimi_linear(layers=27, heads=32, dim=2304, experts=256, width=1024, dense_width=9216)
    return _run(model, WSD(peak=1.1e-3), seq_len=4096, batch=8192, tokens=1.4e12)


def kimi_k3() -> TrainConfig:
    """The text backbone of Kimi K3 as released (arXiv 2607.24653), with the row length of the first stage of its
    pretraining. Batch, steps and learning rate are not published: the ones here are ours and untested.

    2,779,484,476,000 parameters, 104,189,612,640 active.
    """
    model = c.ModelConfig(
        vocab=VOCAB,
        dim=7168,
        layers=93,
        full_attention=c.every_fourth(93),
        kda=c.KDA(heads=96, head_dim=128, forget_rank=128),
        mla=c.MLA(heads=96, q_rank=1536, kv_rank=512, nope_dim=128, shared_dim=64, v_dim=128),
        dense_width=33792,
        dense_layers=1,
        moe=c.MoE(experts=896, active=16, width=3072, shared=2, latent=c.Latent(3584)),
        residual=c.BlockAttnRes(12),
    )
    return _run(model, Cosine(peak=2e-4), seq_len=8192, batch=2048, tokens=2e12)


PRESETS: dict[str, Callable[[], TrainConfig]] = {
    function.__name__: function
    for function in (
        nano,
        tiny,
        attnres_194m,
        attnres_241m,
        attnres_296m,
        attnres_436m,
        attnres_528m,
        kimi_linear_653m,
        kimi_linear_48b,
        kimi_k3,
    )
}


def load(name_or_file: str) -> TrainConfig:
    """A preset by name, or a configuration from a JSON file such as the ``config.json`` of a run.

    Raises:
      ConfigError: neither; the message lists the presets.
    """
    if name_or_file in PRESETS:
        return PRESETS[name_or_file]()
    if name_or_file.endswith(".json") or Path(name_or_file).is_file():
        return config_io.load_json(TrainConfig, name_or_file)
    near = config_io.did_you_mean(name_or_file, PRESETS)
    raise c.ConfigError(f"no preset or file {name_or_file!r}{near} (presets: {', '.join(PRESETS)})")


def _kimi_linear(*, layers: int, heads: int, dim: int, experts: int, width: int, dense_width: int) -> c.ModelConfig:
    """The architecture of Kimi Linear (arXiv 2510.26692): an unbounded decay, low-rank output gates on KDA and none on
    MLA, plain queries, SwiGLU, ordinary experts, 8 active and 1 shared, balanced by the sign rule."""
    return c.ModelConfig(
        vocab=VOCAB,
        dim=dim,
        layers=layers,
        full_attention=c.every_fourth(layers),
        kda=c.KDA(heads=heads, head_dim=128, forget_rank=128, decay=c.SoftplusDecay(), output_gate=c.LowRankGate(128)),
        mla=c.MLA(
            heads=heads, q_rank=None, kv_rank=512, nope_dim=128, shared_dim=64, v_dim=128, output_gate=c.NoGate()
        ),
        dense_width=dense_width,
        dense_layers=1,
        moe=c.MoE(experts=experts, active=8, width=width, shared=1, scale=2.446, balancer=c.SignRule()),
        residual=c.PlainResidual(),
        activation=c.SwiGLU(),
    )


def _attnres(*, layers: int, dim: int, width: int, peak: float, batch: int, tokens: float) -> TrainConfig:
    """One rung of arXiv 2603.15031, table 2: Kimi Linear with as many heads as layers and about eight depth blocks.

    Inferred, because the paper does not print it: 64 experts, as in Kimi Linear's own ladder; depth blocks of two
    decoder layers (four sub-layers, the block of the paper's ablations, which makes six to nine blocks); a last layer
    with full attention; one dense layer, of width 6 dim, with which all five active counts, the embeddings left out,
    round to the printed ones.
    """
    plain = _kimi_linear(layers=layers, heads=layers, dim=dim, experts=64, width=width, dense_width=6 * dim)
    model = c.replace(plain, residual=c.BlockAttnRes(2))
    return _run(model, Cosine(peak=peak), seq_len=8192, batch=batch, tokens=tokens)


def _run(model: c.ModelConfig, schedule: Cosine | WSD, *, seq_len: int, batch: int, tokens: float) -> TrainConfig:
    """A pretraining run of as many steps as come nearest to ``tokens``."""
    return TrainConfig(
        model=model,
        optimizer=Optimizer(schedule=schedule),
        data=StdlibCorpus(),
        seq_len=seq_len,
        batch=batch,
        steps=round(tokens / (batch * seq_len)),
    )
