"""A study of the smallest model, and one whose runs are made up."""

import json

import pytest

from experiments import folder, group
from experiments.folder import Run
from experiments.study import Metric, Rung, Study, changed
from k3jax import config as c
from k3jax.config_data import TextFolder
from k3jax.config_optim import Cosine, Optimizer, Tunable
from k3jax.config_tasks import Copy
from k3jax.run_config import TrainConfig
from k3jax.run_folder import write_json


@pytest.fixture(scope="session")
def small_model(micro_model) -> c.ModelConfig:
    """Two layers without experts."""
    return c.replace(
        micro_model, layers=2, full_attention=(2,), dense_layers=2, residual=c.PlainResidual(), dense_width=16
    )


@pytest.fixture(scope="session")
def study(small_model, tmp_path_factory) -> Study:
    """Two variants and two rates on a few lines of text."""
    text = tmp_path_factory.mktemp("text")
    for number in range(6):
        (text / f"{number}.txt").write_text("".join(f"line {line} of {number}\n" for line in range(30)))
    config = TrainConfig(
        model=small_model,
        optimizer=Optimizer(schedule=Tunable(Cosine(peak=1e-2))),
        data=TextFolder(path=str(text), held_out=0.2),
        seq_len=16,
        batch=2,
        steps=4,
        log_every=1,
        eval_every=4,
        checkpoint_every=2,
        loss_chunk=16,
        sample_tokens=0,
    )
    return Study(
        name="toy",
        question="Does it work?",
        rungs={"small": Rung(config), "published": Rung(changed(config, {"model.dim": 4096}), planned=True)},
        variants={"control": {}, "swiglu": {"model.activation": c.SwiGLU()}},
        control="control",
        rates=(1e-3, 1e-2),
        seeds=3,
        metric=Metric("bits_per_byte", "lower"),
        rule="lower wins",
        shown=("loss", "parameters"),
    )


@pytest.fixture
def made_up(study, tmp_path):
    """Writes a result without a run."""

    def write(variant: str, rate: float, seed: int, value: float | None, **more: float):
        run = Run(study, "small", variant, rate, seed)
        place = run.folder(tmp_path)
        place.mkdir(parents=True, exist_ok=True)
        line = {"step": study.rungs["small"].config.steps, "kind": "train", "loss": 2.0}
        (place / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        what = dict(study="toy", rung="small", variant=variant, rate=rate, seed=seed)
        cost = dict(parameters=10, active_parameters=10, flops_per_token=5.0, tokens=100, flops=500.0)
        ended = {"loss": 1.0} if value is not None else {"diverged": "step 3: the loss is not finite"}
        metrics = {"bits_per_byte": value, **ended, **more}
        write_json(place / folder.RESULT, {**what, "metrics": metrics, "cost": cost, "seconds": 2.0, "commit": "abc"})

    return write


@pytest.fixture
def fake_training(monkeypatch):
    """Replaces training by a formula; returns the list of configurations that were trained."""
    trained = []

    def train(config, place, options):
        trained.append(config)
        loss = abs(config.optimizer.schedule.schedule.peak - 2e-3) + 0.01 * config.seed
        line = {"step": 1, "kind": "train", "loss": loss}
        (place / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        write_json(place / "summary.json", {"bits_per_byte": loss, "steps": 1})

    monkeypatch.setattr(group, "train", train)
    return trained


@pytest.fixture
def copy_task() -> Copy:
    return Copy(vocab=8, lengths=(8, 16), examples=100)
