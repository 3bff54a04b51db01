"""The runs of one variant at one rung, in one process: the learning rates with the first seed, then the other seeds at
the best rate. They share one compiled step, because neither rate nor seed is part of it (`k3jax.step.program`).

    python -m experiments.group s01_kda_ancestors recall kda
    python -m experiments.group s01_kda_ancestors recall kda --seeds 1 --root runs/trial

One seed is for a trial: it has no interval, so that `experiments.run` and `experiments.table` ask for two. The exit
codes are those of training (`k3jax.exits`).
"""

import json
import pathlib
import time

from absl import app, flags

from experiments import files, folder, measures
from experiments.folder import Run
from experiments.run import groups
from experiments.study import Study, changed, load
from k3jax import diagnose, runtime
from k3jax.checkpoint import Checkpoints
from k3jax.config import require
from k3jax.data import Batch
from k3jax.data.load import load_data
from k3jax.evaluate import evaluate, tasks_of
from k3jax.exits import leave
from k3jax.loop import NonFiniteError, SpikeError
from k3jax.model.weights import Weights
from k3jax.run_config import TrainConfig
from k3jax.run_folder import write_json
from k3jax.train import CODES, Options, exit_code, train

MAXIMA = {"hidden_max", "activation_max"}  # measured on a training batch, and only where a study shows them


def run_group(study: Study, rung: str, variant: str, *, seeds: int, root: pathlib.Path = folder.ROOT) -> list[dict]:
    """Every result of the group; runs that are finished are not made again, and one that was cut goes on."""
    searched = [perform(Run(study, rung, variant, rate, 0), root) for rate in study.rates]
    best = study.metric.best([study.metric.of(found) for found in searched])
    others = [perform(Run(study, rung, variant, study.rates[best], seed), root) for seed in range(1, seeds)]
    return searched + others


def perform(run: Run, root: pathlib.Path = folder.ROOT) -> dict:
    """Makes one run, measures it, and writes ``result.json``: what it was, what it found and what it cost.

    Raises:
      ConfigError: the folder holds another run, or the metric that decides is none of those measured.
    """
    found = folder.result(run, root)
    if found is not None:
        return found
    place, config, began = run.folder(root), run.config, time.time()
    place.mkdir(parents=True, exist_ok=True)
    before = files.seconds_before(place)
    write_json(place / "diff.json", run.diff)
    try:
        train(config, place, Options(report=False, began=began))
        metrics = _measured(run, place)
    except (NonFiniteError, SpikeError) as error:
        metrics = {run.study.metric.name: None, "diverged": str(error).partition("\n")[0]}
    sizes = measures.sizes(config)
    found = {
        **run.identity,
        "metrics": metrics,
        "cost": {**sizes, "tokens": config.tokens, "flops": sizes["flops_per_token"] * config.tokens},
        "seconds": before + time.time() - began,
        "commit": runtime.commit(),
    }
    write_json(place / folder.RESULT, found)
    return found


def _measured(run: Run, place: pathlib.Path) -> dict[str, float]:
    """The numbers of a run that came to its end."""
    config = run.config
    tasks = (*tasks_of(config.data), *run.study.tasks)
    if tasks:
        found = evaluate(config, _weights(place), tasks=tasks, examples=run.study.examples)
        write_json(place / "evaluation.json", found)
    if run.study.stretch > 1 or MAXIMA & {*run.study.measured}:
        write_json(place / "more.json", _more(run.study, config, _weights(place)))
    metrics = measures.measures(place)
    check_metric(run.study, metrics)
    return metrics


def check_metric(study: Study, metrics: dict[str, float]) -> None:
    """Raises ConfigError when no run measures what the study decides by or shows."""
    for name in study.measured:
        require(
            name in (*metrics, *measures.SIZES, "tokens", "flops"),
            f"study {study.name}: no run measures {name!r} (measured: {', '.join(sorted(metrics))})",
        )


def _weights(place: pathlib.Path) -> Weights:
    with Checkpoints(place, create=False) as checkpoints:
        return checkpoints.load()[1].weights


def _more(study: Study, config: TrainConfig, weights: Weights) -> dict[str, float]:
    """What neither training nor evaluation measures: see `experiments.measures`."""
    found, times = {}, study.stretch
    if times > 1:
        longer = changed(config, {"seq_len": times * config.seq_len, "batch": max(1, config.batch // times)})
        (source,) = evaluate(longer, weights, tasks=())["sources"].values()
        found["long_bits_per_byte"] = source["bits_per_byte"]
    maxima = MAXIMA & {*study.measured}
    batch = _first_batch(config) if maxima else None
    if "hidden_max" in maxima:
        layers = diagnose.layer_statistics(config, weights, batch)
        found["hidden_max"] = float(max(layer.hidden_max for layer in layers))
    if "activation_max" in maxima:
        found["activation_max"] = max(diagnose.activation_maxima(config, weights, batch))
    return found


def _first_batch(config: TrainConfig) -> Batch:
    """What the first step was trained on."""
    data = load_data(config.data, config.tokenizer, vocab=config.model.vocab, seed=config.seed)
    return data.batches(length=config.seq_len, batch=config.batch, seed=config.seed, packing=config.packing)[0]


def main(argv: list[str]) -> None:
    runtime.start()
    try:
        require(len(argv) == 4, f"give a study, a rung and a variant, got {argv[1:]}")
        study, _ = load(argv[1])
        seeds = flags.FLAGS.seeds or study.seeds
        (group,) = groups(study, argv[2:3], argv[3:])
        results = run_group(study, *group, seeds=seeds, root=pathlib.Path(flags.FLAGS.root))
    except tuple(CODES) as error:
        leave(f"experiments.group: {error}", exit_code(error))
    for found in results:
        print(json.dumps({"rate": found["rate"], "seed": found["seed"], **found["metrics"]}))


if __name__ == "__main__":
    flags.DEFINE_integer("seeds", 0, "runs at the best rate; 0 for those of the study", lower_bound=0)
    flags.DEFINE_string("root", str(folder.ROOT), "where the folders of runs lie")
    app.run(main)
