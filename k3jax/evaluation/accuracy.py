"""Accuracy of a model on generated tasks: for each cell (length, and pairs or depth), and by distance to the answer.

A prediction is the token with the largest logit, made with the right tokens before it (teacher forcing), and counts
where the document has a weight. Chance is what guessing among the possible answers would reach.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from k3jax import config_io
from k3jax.config_data import BestFit
from k3jax.config_tasks import Copy, MultiQueryRecall, Needle, Palindrome, PermutationTracking, StackTracking, Task
from k3jax.data.packing import PackedRows, padding, stack
from k3jax.data.tasks import TaskDocuments, cells
from k3jax.evaluation.predict import Predict


class Answers(NamedTuple):
    """One entry per asked position, over all examples.

    example: its number. correct: bool. nats: of the right answer. distance: how many tokens back it stands.
    """

    example: np.ndarray
    correct: np.ndarray
    nats: np.ndarray
    distance: np.ndarray


def measure(
    task: Task, predict: Predict, *, length: int, batch: int, examples: int = 64, seed: int = 0
) -> dict[str, Any]:
    """Accuracy on held-out examples, as JSON types.

    Args:
      length, batch: of the rows that examples are packed into; all batches have this one shape.
      examples: number of examples for each cell.
      seed: of the examples.

    Returns:
      {"task": its class, "settings": its fields, "examples", "seed", "chance", "cells": [{"length", perhaps "pairs" or
      "depth", "examples", "answers", "accuracy", "stderr", "exact", "nats"}], "distances": [{"from", "to", "answers",
      "accuracy"}]}. "stderr" is the standard error of the accuracy over examples, "exact" the share of examples with
      every answer right, "nats" the mean loss of an answer. Distances are in steps of powers of two. Numbers of a cell
      without any answers are null.

    Raises:
      DataError: an example is longer than a row.
    """
    documents = TaskDocuments(task, "held_out", seed=seed, count=examples * len(cells(task)))
    answers = Answers(*(np.concatenate(field) for field in zip(*_answers(documents, predict, length, batch))))
    return {
        "task": type(task).__name__,
        "settings": config_io.to_dict(task),
        "examples": examples,
        "seed": seed,
        "chance": chance(task),
        "cells": [
            {**cell, "examples": examples, **_summary(answers, answers.example % len(documents.cells) == number)}
            for number, cell in enumerate(documents.cells)
        ],
        "distances": _by_distance(answers),
    }


def chance(task: Task) -> float:
    """Accuracy of guessing evenly among the possible answers."""
    match task:
        case MultiQueryRecall():
            return 2 / task.vocab
        case Palindrome() | Copy():
            return 1 / (task.vocab - 1)
        case StackTracking():
            return 1 / task.elements
        case PermutationTracking():
            return 1 / math.factorial(task.degree)
        case Needle():
            return 1 / 10
    raise TypeError(f"there is no task {type(task).__name__}")


def _answers(documents: TaskDocuments, predict: Predict, length: int, batch: int) -> Iterator[Answers]:
    """The answers of one document after the other, in the order of the rows."""
    rows = PackedRows(documents, length, BestFit(long="refuse"))
    for first in range(0, len(rows), batch):
        numbers = range(first, min(first + batch, len(rows)))
        packed = [rows[number] for number in numbers]
        scores = predict(stack(packed + [padding(length)] * (batch - len(packed))))
        for row, number in enumerate(numbers):
            at = 0
            for example, start, stop in zip(*rows.plan.row(number)):
                where = slice(at, at + stop - start)
                yield _document_answers(documents, int(example), scores.best[row, where], scores.nats[row, where])
                at = where.stop


def _document_answers(documents: TaskDocuments, number: int, best: np.ndarray, nats: np.ndarray) -> Answers:
    document, _, sources = documents.example(number)
    asked = np.flatnonzero(document.weights)
    return Answers(
        example=np.full(len(asked), number),
        correct=best[asked] == document.targets[asked],
        nats=nats[asked].astype(np.float64),
        distance=asked + 1 - sources[asked],
    )


def _summary(answers: Answers, mask: np.ndarray) -> dict[str, Any]:
    example, correct, nats, _ = (field[mask] for field in answers)
    if not len(example):
        return {"answers": 0, "accuracy": None, "stderr": None, "exact": None, "nats": None}
    _, place, count = np.unique(example, return_inverse=True, return_counts=True)
    shares = np.bincount(place, correct) / count
    accuracy = float(correct.mean())
    # Of a ratio of sums over examples, which may have different numbers of answers.
    residual = count / count.mean() * (shares - accuracy)
    return {
        "answers": len(example),
        "accuracy": accuracy,
        "stderr": float(np.sqrt(np.mean(residual**2) / len(count))),
        "exact": float((shares == 1).mean()),
        "nats": float(nats.mean()),
    }


def _by_distance(answers: Answers) -> list[dict[str, Any]]:
    """Accuracy between powers of two of the distance."""
    steps = np.log2(answers.distance).astype(int)
    found = []
    for step in np.unique(steps).tolist():
        correct = answers.correct[steps == step]
        found.append(
            {"from": 2**step, "to": 2 ** (step + 1) - 1, "answers": len(correct), "accuracy": float(correct.mean())}
        )
    return found
