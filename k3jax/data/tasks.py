"""Examples of the generated tasks as documents, each a function of the task, the split, the seed and its number.

NumPy only. Random numbers come from a counter, not from a generator with a state: no example waits for another, and
threads share nothing.
"""

import hashlib
import json
from functools import lru_cache
from itertools import permutations
from typing import Literal, NamedTuple

import numpy as np

from k3jax import config_io
from k3jax.config_tasks import Copy, MultiQueryRecall, Needle, Palindrome, PermutationTracking, StackTracking, Task
from k3jax.data.documents import Document

Split = Literal["train", "held_out"]
Cell = dict[str, int | float]


class Example(NamedTuple):
    """A document, its cell, and for every position with a weight where its answer stands in the inputs.

    sources: [n] int32; -1 where the weight is 0. The answer of a permutation depends on all tokens: on those from 0 on.
    """

    document: Document
    cell: Cell
    sources: np.ndarray


class TaskDocuments:
    """The examples of one split of a task, a source of documents (:class:`k3jax.data.documents.Documents`).

    Example i has the cell i modulo their number: every cell is met as often. ``count`` is how many examples there are,
    by default the share of the split; example i is the same whatever the count.
    """

    def __init__(self, task: Task, split: Split, *, seed: int = 0, count: int | None = None):
        if count is None:
            held_out = max(1, round(task.examples * task.held_out))
            count = {"train": max(1, task.examples - held_out), "held_out": held_out}[split]
        what = {name: value for name, value in config_io.to_dict(task).items() if name not in ("examples", "held_out")}
        self.name = type(task).__name__
        self.task = task
        self.cells = cells(task)
        self.lengths = np.resize(np.array([cell["length"] for cell in self.cells], np.int64), count)
        self.bytes = np.broadcast_to(np.int64(0), count)
        self._key = f"{self.name} {json.dumps(what)} {split} {seed} "

    def __len__(self) -> int:
        return len(self.lengths)

    def title(self, index: int) -> str:
        """What messages call a document."""
        return f"{self.name}, example {index}"

    def __getitem__(self, index: int) -> Document:
        return self.example(index).document

    def example(self, index: int) -> Example:
        """Example ``index``; negative numbers and those beyond the end raise IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: example {index} of {len(self)}")
        cell = self.cells[index % len(self.cells)]
        inputs, targets, weights, sources = _MAKE[type(self.task)](self.task, cell, _Noise(f"{self._key}{index}"))
        return Example(Document(inputs, targets, weights, 0), cell, sources)


def cells(task: Task) -> list[Cell]:
    """The kinds of examples of a task, as {"length": ...} and what else varies; accuracy is reported for each."""
    match task:
        case MultiQueryRecall():
            return [{"length": length, "pairs": pairs} for length, pairs in zip(task.lengths, task.pairs)]
        case Needle():
            return [{"length": length, "depth": depth} for length in task.lengths for depth in task.depths]
        case _:
            return [{"length": length} for length in task.lengths]


_GOLDEN = 0x9E3779B97F4A7C15
_27, _30, _31, _11 = (np.uint64(shift) for shift in (27, 30, 31, 11))
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@lru_cache(maxsize=1024)
def _steps(count: int) -> np.ndarray:
    """The counter 1..count times the golden constant, uint64."""
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)


class _Noise:
    """Even random numbers: SplitMix64 (Steele et al. 2014) on a counter that starts at the hash of a name."""

    def __init__(self, name: str):
        self._start = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")

    def uniform(self, count: int) -> np.ndarray:
        """[count] float64 in [0, 1), of 53 random bits."""
        x = _steps(count) + np.uint64(self._start)
        self._start = (self._start + count * _GOLDEN) % 2**64
        x ^= x >> _30
        x *= _MIX1
        x ^= x >> _27
        x *= _MIX2
        x ^= x >> _31
        x >>= _11
        return x * 2.0**-53

    def integers(self, count: int, size: int) -> np.ndarray:
        """[count] int32 in 0..size-1."""
        return (self.uniform(count) * size).astype(np.int32)

    def distinct(self, count: int, size: int) -> np.ndarray:
        """[count] different int32 in 0..size-1: the first ones of a sequence of draws, or else of a permutation."""
        if 2 * count <= size:
            drawn = self.integers(2 * count, size)
            first = np.unique(drawn, return_index=True)[1]
            if len(first) >= count:
                return drawn[np.sort(first)[:count]]
        return np.argsort(self.uniform(size))[:count].astype(np.int32)


def _next_token(tokens: np.ndarray, asked: np.ndarray, source: np.ndarray):
    """Inputs, targets, weights and sources of n + 1 tokens of which those at ``asked`` follow from ``source``."""
    weights = np.zeros(len(tokens) - 1, np.float32)
    sources = np.full(len(tokens) - 1, -1, np.int32)
    weights[asked - 1] = 1.0
    sources[asked - 1] = source
    return tokens[:-1], tokens[1:], weights, sources


def _recall(task: MultiQueryRecall, cell: Cell, noise: _Noise):
    """Pairs, then a random value at every position that is not a query; a query's target is its key's last value."""
    length, pairs, half = cell["length"], cell["pairs"], task.vocab // 2
    keys = 1 + noise.distinct(pairs, half - 1)
    inputs = half + noise.integers(length, half)
    bound = task.bindings * pairs
    which = np.argsort(noise.uniform(bound)) % pairs
    inputs[0 : 2 * bound : 2] = keys[which]
    last = 2 * (bound - 1 - np.unique(which[::-1], return_index=True)[1]) + 1
    chances = _gaps((length - 2 * bound) // 2, task.power)
    # The smallest of exponential times with these rates are a weighted draw without replacement, one after the other.
    times = -np.log1p(-noise.uniform(len(chances))) / chances
    queries = 2 * bound + 2 * np.argsort(times)[:pairs]
    inputs[queries] = keys
    targets = np.append(inputs[1:], inputs[:1])
    targets[queries] = inputs[last]
    weights = np.zeros(length, np.float32)
    weights[queries] = 1.0
    sources = np.full(length, -1, np.int32)
    sources[queries] = last
    return inputs, targets, weights, sources


@lru_cache
def _gaps(count: int, power: float) -> np.ndarray:
    """Unnormalized chance of each gap 1..count."""
    return np.arange(1, count + 1) ** (power - 1.0)


def _palindrome(task: Palindrome, cell: Cell, noise: _Noise):
    half = cell["length"] // 2
    symbols = noise.integers(half, task.vocab - 1)
    tokens = np.concatenate([symbols, np.array([task.vocab - 1], np.int32), symbols[::-1]])
    return _next_token(tokens, np.arange(half + 1, 2 * half + 1), np.arange(half)[::-1])


def _copy(task: Copy, cell: Cell, noise: _Noise):
    half = cell["length"] // 2
    symbols = noise.integers(half, task.vocab - 1)
    tokens = np.concatenate([symbols, np.array([task.vocab - 1], np.int32), symbols])
    return _next_token(tokens, np.arange(half + 1, 2 * half + 1), np.arange(half))


def _stacks(task: StackTracking, cell: Cell, noise: _Noise):
    """The height of one stack is the absolute value of a random walk: from the ground both directions go up.

    A pop takes what the last push to its level brought: sorted by stack, level and time, its predecessor.
    """
    length = cell["length"]
    count = -(-(length + 1) // 3)
    which = noise.integers(count, task.stacks)
    steps = np.where(noise.uniform(count) < 0.5, -1, 1)
    elements = noise.integers(count, task.elements)
    order = np.argsort(which, kind="stable")
    grouped, moves = which[order], steps[order]
    walk = np.cumsum(moves)
    first = np.searchsorted(grouped, grouped)
    walk -= (walk - moves)[first]
    after, before = np.abs(walk), np.abs(walk - moves)
    level = np.maximum(after, before)
    by_level = order[np.lexsort((level, grouped))]
    pop = np.zeros(count, bool)
    pop[order] = after < before
    popped = np.flatnonzero(pop[by_level])
    pops, pushes = by_level[popped], by_level[popped - 1]
    elements[pops] = elements[pushes]
    tokens = np.stack([pop, 2 + which, 2 + task.stacks + elements], axis=1).astype(np.int32).reshape(-1)[: length + 1]
    asked = 3 * pops + 2
    inside = asked <= length
    return _next_token(tokens, asked[inside], 3 * pushes[inside] + 2)


def _permutations(task: PermutationTracking, cell: Cell, noise: _Noise):
    """Prefix products by doubling: after round r, entry i is the product of the last 2^r permutations up to i."""
    table, length = _products(task.degree), cell["length"]
    inputs = noise.integers(length, task.vocab)
    product, span = inputs.copy(), 1
    while span < length:
        product[span:] = table[product[span:], product[:-span]]
        span *= 2
    return inputs, product, np.ones(length, np.float32), np.zeros(length, np.int32)


@lru_cache
def _products(degree: int) -> np.ndarray:
    """[n!, n!] int32: number of "first b, then a" for the permutations in lexicographic order."""
    all_ = np.array(list(permutations(range(degree))))
    place = degree ** np.arange(degree)
    codes = all_ @ place
    rank = np.zeros(codes.max() + 1, np.int32)
    rank[codes] = np.arange(len(all_))
    return rank[(all_[:, all_] * place).sum(axis=2)]


NAMES = (
    "amber birch cedar daisy ebony flint grape hazel ivory jewel karst lilac maple nylon olive pearl"  # of the needles
).split()
SENTENCES = (
    "The road goes on along the river.",
    "A light rain fell through the night.",
    "Nobody had opened the window yet.",
    "The train was late again that day.",
    "They sat in the kitchen and talked.",
    "Two dogs ran over the empty field.",
    "She read the letter a second time.",
    "The shop at the corner was closed.",
    "Snow lay on the roofs of the town.",
    "He put the kettle back on the fire.",
    "The map showed a bridge and a mill.",
    "Some of the boats were out at sea.",
    "We waited until the bell had rung.",
    "An old clock stood in the hall.",
    "The garden was full of tall grass.",
    "There was a book under the chair.",
)
"""Hay: no digits, no names of needles."""
BOS = 256


def _needle(task: Needle, cell: Cell, noise: _Noise):
    """BOS, sentences with the needles between them, and the beginning of one needle again, to be completed."""
    names = [NAMES[i] for i in noise.distinct(task.keys, len(NAMES))]
    numbers = noise.integers(task.keys * task.digits, 10).reshape(task.keys, task.digits)
    needles = [f" The number of {name} is " + "".join(map(str, number)) for name, number in zip(names, numbers)]
    room = cell["length"] - sum(len(needle) + 1 for needle in needles) - len(needles[0])
    hay, ends = _hay(room, noise)
    places = ends[(noise.uniform(task.keys) * len(ends)).astype(int)]
    places[0] = ends[np.argmin(np.abs(ends - cell["depth"] * room))]
    text, done, answer = [], 0, 0
    for i in np.argsort(places, kind="stable"):
        text += [hay[done : places[i]], needles[i], "."]
        done = places[i]
        if i == 0:
            answer = sum(map(len, text)) - task.digits  # with BOS in front and the full stop behind
    text = "".join([*text, hay[done:], needles[0]])
    tokens = np.empty(len(text) + 1, np.int32)
    tokens[0] = BOS
    tokens[1:] = np.frombuffer(text.encode("ascii"), np.uint8)
    digits = np.arange(task.digits)
    return _next_token(tokens, len(tokens) - task.digits + digits, answer + digits)


def _hay(size: int, noise: _Noise) -> tuple[str, np.ndarray]:
    """``size`` characters of random sentences, the first one cut, and where each of them ends (and 0)."""
    shortest = min(map(len, SENTENCES)) + 1
    drawn = [" " + SENTENCES[i] for i in noise.integers(-(-size // shortest), len(SENTENCES))]
    ends = np.cumsum([len(sentence) for sentence in drawn], dtype=np.int64)
    needed = int(np.searchsorted(ends, size)) + 1 if size else 0
    text = "".join(drawn[:needed])
    cut = len(text) - size
    return text[cut:], np.append(0, np.maximum(ends[:needed] - cut, 0))


_MAKE = {
    MultiQueryRecall: _recall,
    Palindrome: _palindrome,
    Copy: _copy,
    StackTracking: _stacks,
    PermutationTracking: _permutations,
    Needle: _needle,
}
