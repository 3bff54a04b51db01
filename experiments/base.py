"""What the studies start from: small runs on two CPU cores, and the published ones."""

from k3jax import config as c
from k3jax.config_data import StdlibCorpus
from k3jax.config_optim import Cosine, Optimizer, Tunable
from k3jax.config_tasks import Task
from k3jax.data import ByteTokenizer
from k3jax.run_config import TrainConfig


def tiny_model(
    *, vocab: int, layers: int, full_attention: tuple[int, ...], moe: bool = False, dim: int = 64
) -> c.ModelConfig:
    """K3 in small: two heads, SiTU, gated MLA without positions, a plain residual.

    Feed-forward parts are dense unless the study is about experts: a step without experts compiles in a third of the
    time.
    """
    half, quarter = dim // 2, dim // 4
    return c.ModelConfig(
        vocab=vocab,
        dim=dim,
        layers=layers,
        full_attention=full_attention,
        kda=c.KDA(heads=2, head_dim=half, forget_rank=quarter),
        mla=c.MLA(heads=2, q_rank=half, kv_rank=half, nope_dim=quarter, shared_dim=quarter, v_dim=half),
        dense_width=2 * dim,
        dense_layers=1 if moe else layers,
        moe=c.MoE(experts=16, active=2, width=half, shared=1, latent=c.Latent(half)),
        residual=c.PlainResidual(),
        init_std=0.05,
        dtype="float32",
        remat="none",
    )


def run(model: c.ModelConfig, data, *, seq_len: int, batch: int, steps: int, warmup: float = 0.05) -> TrainConfig:
    """A run whose peak learning rate the study searches; evaluated and saved at its end only."""
    return TrainConfig(
        model=model,
        optimizer=Optimizer(schedule=Tunable(Cosine(peak=1e-2, warmup=warmup))),
        data=data,
        seq_len=seq_len,
        batch=batch,
        steps=steps,
        log_every=10,
        eval_every=steps,
        checkpoint_every=steps,
        loss_chunk=min(128, seq_len),
        sample_tokens=0,
    )


def task_run(
    task: Task, *, layers: int, batch: int, steps: int, dim: int = 64, vocab: int | None = None
) -> TrainConfig:
    """KDA layers trained on one generated task, in rows as long as its longest example."""
    model = tiny_model(vocab=vocab or -(-task.vocab // 8) * 8, layers=layers, full_attention=(), dim=dim)
    return run(model, task, seq_len=task.lengths[-1], batch=batch, steps=steps)


def text_run(
    *, layers: int = 4, steps: int = 300, seq_len: int = 256, batch: int = 4, moe: bool = False, dim: int = 64
) -> TrainConfig:
    """Bytes of the Python standard library, three KDA layers to one of MLA."""
    attention = c.every_fourth(layers)
    model = tiny_model(vocab=ByteTokenizer.size, layers=layers, full_attention=attention, moe=moe, dim=dim)
    return run(model, StdlibCorpus(held_out=0.002), seq_len=seq_len, batch=batch, steps=steps)
