"""Text under a model: log-likelihoods of continuations, and continuations up to a stop string, in batches.

Rows are padded to few lengths, so that few programs are compiled.
"""

from collections.abc import Sequence

import numpy as np

from k3jax import config as c
from k3jax.data import Batch
from k3jax.data.packing import padding, stack
from k3jax.data.tokenizers import Tokenizer
from k3jax.evaluation.predict import Predict
from k3jax.model.weights import Weights
from k3jax.sampling import Sampling, stream

GREEDY = Sampling(temperature=0.0)
PAD_TO = 64
Pair = tuple[Sequence[int], Sequence[int]]


def log_likelihoods(
    predict: Predict, pairs: Sequence[Pair], *, batch: int, max_length: int
) -> list[tuple[float, bool]]:
    """For each pair of a context and a continuation, token ids: the continuation's log-probability in nats given the
    context, and whether greedy decoding would give it.

    Args:
      batch: rows of a call of the model.
      max_length: tokens that the model reads at the most; of a longer context the end counts.

    Raises:
      ValueError: an empty context (give BOS), or a continuation longer than ``max_length``.
    """
    for number, (context, continuation) in enumerate(pairs):
        if not len(context):
            raise ValueError(f"request {number} has no context; give at least BOS")
        if len(continuation) > max_length:
            raise ValueError(f"request {number} continues for {len(continuation)} tokens; at most {max_length} fit")
    results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    order = sorted(range(len(pairs)), key=lambda number: -sum(map(len, pairs[number])))
    for first in range(0, len(order), batch):
        numbers = order[first : first + batch]
        rows = [_row(*pairs[number], max_length) for number in numbers]
        length = min(_padded(max(map(len, (row.tokens_BT for row in rows)))), max_length)
        blank = padding(length)
        packed = stack([_pad(row, length) for row in rows] + [blank] * (batch - len(rows)))
        scores = predict(packed)
        for row, number in enumerate(numbers):
            asked = packed.weights_BT[row] > 0
            right = scores.best[row][asked] == packed.targets_BT[row][asked]
            results[number] = (-float(scores.nats[row][asked].sum(dtype=np.float64)), bool(right.all()))
    return results


def continue_until(
    model: c.ModelConfig,
    weights: Weights,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    until: Sequence[str],
    max_new: int,
    batch: int,
    sampling: Sampling = GREEDY,
) -> list[str]:
    """The text with which each prompt goes on, up to the first of the strings ``until``, EOS, or ``max_new`` tokens.

    Arguments as for :func:`k3jax.sampling.generate`; ``batch`` rows are made at a time.
    """
    texts = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    for first in range(0, len(order), batch):
        numbers = order[first : first + batch]
        rows = [prompts[number] for number in numbers]
        rows += [[tokenizer.bos]] * (batch - len(rows))
        steps = stream(model, weights, rows, max_new=max_new, sampling=sampling, pad_to=PAD_TO)
        new: list[list[int]] = [[] for _ in numbers]
        done = [False] * len(numbers)
        for tokens, _ in steps:
            for row, token in enumerate(tokens[: len(numbers)].tolist()):
                if not done[row]:
                    new[row].append(token)
                    done[row] = token == tokenizer.eos or _ends(tokenizer, new[row], until)
            if all(done):
                break
        for number, row in zip(numbers, new):
            texts[number] = _cut(_decode(tokenizer, row), until)
    return texts


def _row(context: Sequence[int], continuation: Sequence[int], max_length: int) -> Batch:
    """One row that predicts the continuation from as much of the context as fits."""
    tokens = np.array([*context, *continuation], np.int32)[-max_length - 1 :]
    weights = np.zeros(len(tokens) - 1, np.float32)
    weights[len(weights) - len(continuation) :] = 1.0
    return Batch(tokens[:-1], tokens[1:], np.zeros(len(weights), np.int32), weights)


def _pad(row: Batch, length: int) -> Batch:
    return Batch(*(np.concatenate([x, blank[len(x) :]]) for x, blank in zip(row, padding(length))))


def _padded(length: int) -> int:
    """The next power of two, from ``PAD_TO`` on."""
    return max(PAD_TO, 1 << (length - 1).bit_length())


def _ends(tokenizer: Tokenizer, tokens: list[int], until: Sequence[str]) -> bool:
    """Whether a stop string is complete. A token is at least a byte, so the last tokens are enough to look at."""
    longest = max((len(stop.encode()) for stop in until), default=0)
    return longest > 0 and any(stop in _decode(tokenizer, tokens[-longest:]) for stop in until if stop)


def _decode(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Text up to EOS. A model may have more embeddings than the tokenizer has tokens: these stand for nothing."""
    if tokenizer.eos in tokens:
        tokens = tokens[: tokens.index(tokenizer.eos)]
    return tokenizer.decode([token for token in tokens if token < tokenizer.size])


def _cut(text: str, until: Sequence[str]) -> str:
    ends = [text.index(stop) for stop in until if stop and stop in text]
    return text[: min(ends, default=len(text))]
