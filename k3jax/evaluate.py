"""Evaluates a checkpoint: bits per byte of held-out text by source, and accuracy on generated tasks.

    python -m k3jax.evaluate runs/nano
    python -m k3jax.evaluate runs/nano --tasks "Needle(lengths=(256, 512)), PermutationTracking(degree=2)" --step 360

Without ``--tasks`` the tasks are those that the run was trained on. The result is ``evaluation.json`` in the run
folder, and ``evaluation.png`` with the curves of the tasks. Text must be that of the training, unless
``--allow_change=data`` is given: held-out text of other files may have been trained on.
"""

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from absl import app, flags

from k3jax import config_io, runtime
from k3jax.checkpoint import CheckpointError, Checkpoints
from k3jax.config_data import Mixture, Source, reads_text
from k3jax.config_tasks import Task, check_fits
from k3jax.data import DataError
from k3jax.data.load import Data, load_data
from k3jax.evaluation import Predict, bits_per_byte, measure, predictor
from k3jax.evaluation.figure import figure_png
from k3jax.evaluation.table import table
from k3jax.model.weights import Weights
from k3jax.run_config import TrainConfig
from k3jax.run_folder import write_json


@dataclass(frozen=True)
class Tasks:
    """The value of ``--tasks``, written as in a configuration."""

    tasks: tuple[Task, ...] = ()


def parse_tasks(text: str) -> tuple[Task, ...]:
    """Tasks from names with settings, such as ``Needle, Palindrome(lengths=(64, 128))``.

    Raises:
      ConfigError: there is no such task (the message lists those there are), or its settings do not fit together.
    """
    return config_io.override(Tasks(), [f"tasks=[{text}]"]).tasks


def tasks_of(source: Source) -> tuple[Task, ...]:
    """The tasks among the sources of a run."""
    sources = [part.source for part in source.parts] if isinstance(source, Mixture) else [source]
    return tuple(found for found in sources if isinstance(found, Task))


def evaluate_run(
    run: pathlib.Path,
    *,
    tasks: tuple[Task, ...] | None = None,
    step: int | None = None,
    examples: int = 64,
    max_bytes: int | None = None,
    allow: Sequence[str] = (),
) -> dict[str, Any]:
    """Evaluates a checkpoint of a run and writes ``evaluation.json`` and ``evaluation.png`` into its folder.

    Args:
      tasks: what to measure; None for those the run was trained on.
      step: of the checkpoint, by default the newest.
      examples, max_bytes: see :func:`evaluate`.
      allow: with "data" in it, text that is not what the checkpoint was trained on is evaluated all the same.

    Returns:
      what is in ``evaluation.json``: {"step", "commit"} and the result of :func:`evaluate`.

    Raises:
      CheckpointError: there is no such run or step, or it is damaged.
      ConfigError: a task needs more tokens than the model has. DataError: the text of the run cannot be read, or
        it changed.
    """
    with Checkpoints(run, create=False) as checkpoints:
        config, state = checkpoints.load(step)
        made = int(state.step)
        corpus = None if "data" in allow else checkpoints.position(made).get("corpus")
    config = config.at(config.stage_number(max(made - 1, 0)))
    found = evaluate(config, state.weights, tasks=tasks, examples=examples, max_bytes=max_bytes, corpus=corpus)
    record = {"step": made, "commit": runtime.commit(), **found}
    write_json(run / "evaluation.json", record)
    if record["tasks"]:
        (run / "evaluation.png").write_bytes(figure_png(record["tasks"]))
    return record


def evaluate(
    config: TrainConfig,
    weights: Weights,
    *,
    tasks: tuple[Task, ...] | None = None,
    examples: int = 64,
    max_bytes: int | None = None,
    corpus: str | None = None,
) -> dict[str, Any]:
    """Measures a model on the held-out text of its run and on tasks, as JSON types.

    Text and tasks share rows of one shape, and so one compiled program, unless an example is longer than the rows of
    the run: then the tasks have longer and fewer rows, of about as many tokens.

    Args:
      config: of the run, at the stage to evaluate.
      tasks: what to measure; None for those among the sources of the run.
      examples: for each cell of a task.
      max_bytes: of held-out text for each source, None for all of it.
      corpus: fingerprint that the data must have where there is text, None for any.

    Returns:
      {"sources": {name: see :func:`bits_per_byte`}, "tasks": [see :func:`measure`]}.

    Raises:
      ConfigError: a task needs more tokens than the model has. DataError: the text cannot be read, or is another one.
    """
    tasks = tasks_of(config.data) if tasks is None else tasks
    for task in tasks:
        check_fits(task, config.model.vocab)
    data = load_data(config.data, config.tokenizer, vocab=config.model.vocab, seed=config.seed)
    if corpus not in (None, data.fingerprint) and reads_text(config.data):
        raise DataError(
            f"the checkpoint was trained on the corpus {corpus}, but the files now are the corpus {data.fingerprint}: "
            "what is held out now may have been trained on; to evaluate it all the same: --allow_change=data"
        )
    predict = predictor(config.model, weights, chunk=config.loss_chunk)
    length = max([config.seq_len, *(task.lengths[-1] for task in tasks)])
    shape = dict(length=length, batch=max(1, config.tokens_per_step // length))
    return {
        "sources": _sources(config, data, predict, max_bytes),
        "tasks": [measure(task, predict, examples=examples, seed=config.seed, **shape) for task in tasks],
    }


def _sources(config: TrainConfig, data: Data, predict: Predict, max_bytes: int | None) -> dict[str, dict[str, float]]:
    """Held-out results of every source that is text."""
    held_out = data.held_out(length=config.seq_len, batch=config.batch, packing=config.packing)
    batches = {name: make(max_bytes=max_bytes) for name, make in held_out.items() if _is_text(data, name)}
    return {name: bits_per_byte(predict, found, found.bytes) for name, found in batches.items()}


def _is_text(data: Data, name: str) -> bool:
    return any(part.name == name and part.held_out.bytes.any() for part in data.parts)


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        raise app.UsageError(f"give the folder of one run, as in: python -m k3jax.evaluate runs/nano; got {argv[1:]}")
    runtime.start()
    args = flags.FLAGS
    run = pathlib.Path(argv[1])
    try:
        record = evaluate_run(
            run,
            tasks=None if args.tasks is None else parse_tasks(args.tasks),
            step=args.step,
            examples=args.examples,
            max_bytes=args.max_bytes,
            allow=tuple(args.allow_change),
        )
    except (ValueError, OSError, CheckpointError) as error:
        raise SystemExit(f"k3jax.evaluate: {error}") from error
    print(table(record))
    print(f"written: {run / 'evaluation.json'}")


if __name__ == "__main__":
    flags.DEFINE_string("tasks", None, "tasks to measure, with settings; default those the run was trained on")
    flags.DEFINE_integer("step", None, "of the checkpoint; default the newest")
    flags.DEFINE_integer("examples", 64, "for each length (and pairs, or depth) of a task", lower_bound=1)
    flags.DEFINE_integer("max_bytes", None, "of held-out text for each source; default all", lower_bound=1)
    flags.DEFINE_multi_enum("allow_change", [], ["data"], "data: evaluate text that changed since the training")
    app.run(main)
