"""KDA against what it comes from, on the synthetic tasks of Kimi Linear (arXiv 2510.26692, section 5.1)."""

from experiments.base import task_run
from experiments.study import Metric, Published, Rung, Study, changed
from k3jax import config as c
from k3jax.config_optim import AdamW, Cosine, Tunable
from k3jax.config_tasks import MultiQueryRecall, Palindrome, StackTracking, Task
from k3jax.run_config import TrainConfig

VOCAB = 64
LENGTHS = (16, 32, 64)
PALINDROME = Palindrome(vocab=VOCAB, lengths=LENGTHS)
RECALL = MultiQueryRecall(vocab=VOCAB, lengths=LENGTHS, pairs=(4, 8, 16))
REBOUND = MultiQueryRecall(vocab=VOCAB, lengths=LENGTHS, pairs=(2, 4, 8), bindings=3)
STACK = StackTracking(stacks=4, elements=16, lengths=LENGTHS)


def _small(task: Task) -> Rung:
    """The model is the same for all tasks, so that a variant is compiled once."""
    return Rung(task_run(task, layers=2, dim=32, vocab=VOCAB, batch=16, steps=800))


def _published(task: Task) -> Rung:
    """Two layers of two heads of 128, 20,000 steps; width, batch and optimizer are not printed and ours."""
    config = task_run(task, layers=2, batch=64, steps=20_000)
    sizes = {
        "model.dim": 256,
        "model.kda": c.KDA(heads=2, head_dim=128, forget_rank=128),
        "model.mla": c.MLA(heads=2, q_rank=None, kv_rank=256, nope_dim=64, shared_dim=64, v_dim=128),
        "model.dense_width": 512,
        "model.dtype": "bfloat16",
        "optimizer.matrices": AdamW(),
        "optimizer.schedule": Tunable(Cosine(peak=1e-3)),
    }
    return Rung(changed(config, sizes), planned=True)


def _attention(run: TrainConfig) -> dict:
    """RoPE, because two attention layers without positions cannot tell a key from its value."""
    return {"model.full_attention": tuple(range(1, run.model.layers + 1)), "model.mla.position": c.RoPE()}


STUDY = Study(
    name="s01_kda_ancestors",
    question="Does the decay by channel together with the delta rule recall better than each of its ancestors?",
    rungs={
        "palindrome": _small(PALINDROME),
        "recall": _small(RECALL),
        "recall_rebound": _small(REBOUND),
        "stack": _small(STACK),
        "palindrome_published": _published(Palindrome()),
        "recall_published": _published(MultiQueryRecall()),
        "stack_published": _published(StackTracking()),
    },
    variants={
        "kda": {},
        "gated_deltanet": {"model.kda.decay": c.HeadDecay()},
        "deltanet": {"model.kda.decay": c.NoDecay()},
        "mamba2_like": {"model.kda.decay": c.HeadDecay(), "model.kda.rule": c.AdditiveRule()},
        "attention": _attention,
    },
    control="kda",
    rates=(1e-2, 3e-2),
    metric=Metric("accuracy", "higher"),
    rule="Reproduced if KDA is at least as good as Gated DeltaNet on palindrome, recall and stack (no interval of the "
    "difference lies above zero) and decay by head without the delta rule stays behind KDA on recall by more than its "
    "interval. recall_rebound, not published, binds every key three times, of which the last counts: without the delta "
    "rule it must fail there, whatever it does where keys are bound once.",
    shown=("loss",),
    published=(
        Published(
            "arXiv 2510.26692, section 5.1: order of accuracy at lengths 256 to 2048, best of rates 5e-5 to 1e-3",
            {"kda": "highest", "gated_deltanet": "below KDA", "mamba2_like": "fails all three"},
        ),
    ),
)
