"""Generated tasks: questions about a sequence with one right answer, one frozen dataclass per task.

A task is a source like any other: its examples are documents, the k-th one made from the task, the split, the seed and
k alone (:mod:`k3jax.data.tasks`). Its tokens are the ids 0 to ``vocab`` - 1, without a tokenizer. The sizes are those
of the published setups where these print them; each class says which are our choice.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

from k3jax.config import require, require_positive


def _check(task: "Task") -> None:
    """What holds for every task: some lengths, in rising order, a number of examples, and a share to hold out."""
    name = type(task).__name__
    require_positive(task, "examples")
    require(
        len(task.lengths) > 0 and task.lengths[0] > 0 and all(a < b for a, b in pairwise(task.lengths)),
        f"{name}.lengths = {list(task.lengths)}, but it must name at least one length, in rising order",
    )
    require(
        0 < task.held_out < 1,
        f"{name}.held_out = {task.held_out}, but it must be the share of examples kept for evaluation, strictly "
        "between 0 and 1",
    )


def _check_halves(task: "Palindrome | Copy") -> None:
    """A sequence and its repetition are equally long, and there is a separator beside at least two symbols."""
    _check(task)
    name = type(task).__name__
    odd = [length for length in task.lengths if length % 2]
    require(not odd, f"{name}.lengths = {list(task.lengths)}, but {odd} are odd: half of a length is repeated")
    require(task.vocab >= 3, f"{name}.vocab = {task.vocab}, but it must hold two symbols and the separator: at least 3")


@dataclass(frozen=True, kw_only=True)
class MultiQueryRecall:
    """Multi-query associative recall (arXiv 2312.04927): pairs of a key and its value, then each key once more.

    Keys are ids 1 to vocab/2 - 1, values vocab/2 to vocab - 1. The gap to a query follows a power law, p(g) ~
    g^(power - 1). Between queries stand random values, never keys.

    Attributes:
      vocab: token ids in use.
      lengths: tokens of a document; each example has one of them, in turn.
      pairs: keys, one number for each length; 2 (bindings + 1) tokens are needed for each.
      power: exponent of the gap; 0.01 is published.
      bindings: how often a key is bound, each time to a new value, of which the last counts; the order is random. 1 is
        published; more of them ask for a memory that replaces instead of adding up.
      examples, held_out: number of examples, and the share of them kept for evaluation.
    """

    vocab: int = 8192
    lengths: tuple[int, ...] = (64, 128, 256, 512)
    pairs: tuple[int, ...] = (4, 8, 16, 64)
    power: float = 0.01
    bindings: int = 1
    examples: int = 100_000
    held_out: float = 0.03

    def __post_init__(self):
        _check(self)
        require_positive(self, "bindings")
        require(
            len(self.pairs) == len(self.lengths) and min(self.pairs) >= 1,
            f"MultiQueryRecall.pairs = {list(self.pairs)}, but it must have a number of at least 1 for each of the "
            f"lengths {list(self.lengths)}",
        )
        each = 2 * (self.bindings + 1)
        for length, pairs in zip(self.lengths, self.pairs):
            require(
                each * pairs <= length,
                f"MultiQueryRecall: {pairs} pairs do not fit {length} tokens, {each} * pairs <= length must hold: at "
                f"most {length // each} pairs, or at least {each * pairs} tokens",
            )
        require(
            self.vocab % 2 == 0 and max(self.pairs) < self.vocab // 2,
            f"MultiQueryRecall.vocab = {self.vocab}, but it must be even and have a key for each of {max(self.pairs)} "
            f"pairs in 1..vocab/2-1: at least {2 * (max(self.pairs) + 1)}",
        )
        require(self.power > 0, f"MultiQueryRecall.power = {self.power}, but it must be above 0")


@dataclass(frozen=True, kw_only=True)
class _TwoHalves:
    """Random symbols, a separator, and the symbols again. The separator is the last id.

    Attributes:
      vocab: token ids in use, the separator among them.
      lengths: tokens of a document, even; each example has one of them, in turn.
      examples, held_out: number of examples, and the share of them kept for evaluation.
    """

    vocab: int = 64
    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    examples: int = 100_000
    held_out: float = 0.03

    def __post_init__(self):
        _check_halves(self)


@dataclass(frozen=True, kw_only=True)
class Palindrome(_TwoHalves):
    """The second half in reverse (arXiv 2510.26692, synthetic tests). The lengths are published, the 63 symbols are our
    choice."""


@dataclass(frozen=True, kw_only=True)
class Copy(_TwoHalves):
    """The second half in order."""


@dataclass(frozen=True, kw_only=True)
class StackTracking:
    """Operations on many stacks; at each pop the element that comes off is asked for (arXiv 2510.26692).

    An operation is three tokens: push (id 0) or pop (id 1), the stack, the element. Stack and direction are drawn
    evenly, and a pop from an empty stack becomes a push. 64 stacks and the lengths are published, the number of
    elements is our choice.

    Attributes:
      stacks, elements: how many there are; ids 2 to 1 + stacks are stacks, the following ones elements.
      lengths: tokens of a document; each example has one of them, in turn.
      examples, held_out: number of examples, and the share of them kept for evaluation.
    """

    stacks: int = 64
    elements: int = 64
    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    examples: int = 100_000
    held_out: float = 0.03

    def __post_init__(self):
        _check(self)
        require_positive(self, "stacks", "elements")
        require(
            self.lengths[0] >= 6,
            f"StackTracking.lengths = {list(self.lengths)}, but a push and a pop take 6 tokens: every length must be "
            "at least 6",
        )

    @property
    def vocab(self) -> int:
        """Token ids in use."""
        return 2 + self.stacks + self.elements


@dataclass(frozen=True, kw_only=True)
class PermutationTracking:
    """The word problem of a symmetric group: after each permutation, the product of all so far (arXiv 2404.08819).

    Degree 5 is the hardest case for a state that only decays, degree 2 is parity. The ids are the permutations in
    lexicographic order, in the input and in the answers.

    Attributes:
      degree: how many things are permuted, 2 to 5.
      lengths: tokens of a document; each example has one of them, in turn.
      examples, held_out: number of examples, and the share of them kept for evaluation.
    """

    degree: int = 5
    lengths: tuple[int, ...] = (32, 64, 128, 256)
    examples: int = 100_000
    held_out: float = 0.03

    def __post_init__(self):
        _check(self)
        require(2 <= self.degree <= 5, f"PermutationTracking.degree = {self.degree}, but it must lie in 2..5")

    @property
    def vocab(self) -> int:
        """Token ids in use."""
        return math.factorial(self.degree)


@dataclass(frozen=True, kw_only=True)
class Needle:
    """Needle in a haystack, in bytes: a number hidden between sentences, asked for at the end (after RULER, arXiv
    2404.06654; the sentences and sizes are our choice).

    Attributes:
      lengths: tokens of a document; each example has one pair of a length and a depth, in turn.
      depths: place of the needle as a share of the haystack, 0 at its beginning and 1 at its end.
      digits: of the number.
      keys: needles in the haystack, each with a name of its own; one of them is asked for and has the depth.
      examples, held_out: number of examples, and the share of them kept for evaluation.
    """

    lengths: tuple[int, ...] = (256, 512, 1024)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    digits: int = 6
    keys: int = 1
    examples: int = 100_000
    held_out: float = 0.03

    def __post_init__(self):
        _check(self)
        require_positive(self, "digits", "keys")
        require(self.keys <= 16, f"Needle.keys = {self.keys}, but there are names for 1 to 16 needles")
        require(
            len(self.depths) > 0 and all(0 <= depth <= 1 for depth in self.depths),
            f"Needle.depths = {list(self.depths)}, but it must name at least one share, each in 0..1",
        )
        least = (self.keys + 1) * (NEEDLE_BYTES + self.digits) - 1
        require(
            self.lengths[0] >= least,
            f"Needle.lengths = {list(self.lengths)}, but {self.keys} needles of {self.digits} digits and the question "
            f"take {least} tokens",
        )

    @property
    def vocab(self) -> int:
        """Token ids in use: the bytes and BOS."""
        return 257


NEEDLE_BYTES = 25
"""Bytes of a needle's sentence without its digits."""

Task = MultiQueryRecall | Palindrome | Copy | StackTracking | PermutationTracking | Needle


def check_fits(task: Task, vocab: int) -> None:
    """Raises ConfigError when a model with ``vocab`` embeddings cannot hold every token of the task."""
    name = type(task).__name__
    require(
        task.vocab <= vocab,
        f"{name} uses {task.vocab} tokens, but the model's vocabulary is only {vocab}: give the task fewer, or the "
        "model more",
    )
