"""Generated tasks: every answer is in the document, every example is a function of its number, and bad sizes raise."""

import math
import pickle
import re
from itertools import permutations

import numpy as np
import pytest

from k3jax import config_tasks as ct
from k3jax.config import ConfigError, replace
from k3jax.config_data import Stream
from k3jax.data import Batch, DataError
from k3jax.data.load import load_data
from k3jax.data.packing import PackedRows
from k3jax.data.tasks import TaskDocuments, cells

TASKS = [
    ct.MultiQueryRecall(vocab=64, lengths=(17, 64, 513), pairs=(4, 16, 31)),
    ct.MultiQueryRecall(),
    ct.MultiQueryRecall(vocab=32, lengths=(16, 60), pairs=(2, 5), bindings=3),
    ct.Palindrome(lengths=(2, 8, 250)),
    ct.Copy(vocab=3, lengths=(2, 8, 250)),
    ct.StackTracking(stacks=3, elements=5, lengths=(6, 50, 211)),
    ct.StackTracking(),
    ct.PermutationTracking(degree=2, lengths=(1, 7)),
    ct.PermutationTracking(lengths=(33, 100)),
    ct.Needle(),
    ct.Needle(lengths=(247, 400), depths=(0.0, 0.4, 1.0), keys=7),
]


def name(task) -> str:
    return type(task).__name__


@pytest.mark.parametrize("task", TASKS, ids=name)
def test_answers_stand_where_the_sources_say(task):
    documents = TaskDocuments(task, "train", seed=3)
    answers = 0
    for number in range(3 * len(documents.cells)):
        (inputs, targets, weights, size), cell, sources = documents.example(number)
        assert len(inputs) == len(targets) == len(weights) == cell["length"] == documents.lengths[number]
        assert (inputs.dtype, targets.dtype, weights.dtype, size) == (np.int32, np.int32, np.float32, 0)
        assert min(inputs.min(), targets.min()) >= 0 and max(inputs.max(), targets.max()) < task.vocab
        asked = np.flatnonzero(weights)
        answers += len(asked)
        if not isinstance(task, ct.PermutationTracking):
            assert np.all(sources[asked] <= asked)
            np.testing.assert_array_equal(inputs[sources[asked]], targets[asked])
        assert np.all(sources[weights == 0] == -1)
    assert answers > 0


@pytest.mark.parametrize("task", TASKS, ids=name)
def test_an_example_is_a_function_of_its_number(task):
    documents = TaskDocuments(task, "train", seed=5)
    again = pickle.loads(pickle.dumps(documents))
    more = TaskDocuments(replace(task, examples=200_000), "train", seed=5)
    for number in (2, 999, 1):
        for field in range(3):
            np.testing.assert_array_equal(documents[number][field], again[number][field])
            np.testing.assert_array_equal(documents[number][field], more[number][field])
    inputs = [
        TaskDocuments(task, split, seed=seed)[11][0] for split, seed in (("train", 5), ("train", 6), ("held_out", 5))
    ]
    if len(inputs[0]) > 16:
        assert not np.array_equal(inputs[0], inputs[1]) and not np.array_equal(inputs[0], inputs[2])
    assert len(more) == 194_000 and len(TaskDocuments(task, "held_out")) == 3000


def test_recall_asks_for_every_key_once_and_soon():
    task = ct.MultiQueryRecall(vocab=128, lengths=(256,), pairs=(16,))
    documents, gaps = TaskDocuments(task, "train"), []
    for number in range(200):
        inputs, _, weights, _ = documents[number]
        keys = inputs[:32:2]
        assert len(set(keys)) == 16 and keys.min() >= 1 and keys.max() < 64
        assert sorted(inputs[weights > 0]) == sorted(keys)
        filler = inputs[32:][weights[32:] == 0]
        assert filler.min() >= 64, "a filler is never a key"
        gaps += list((np.flatnonzero(weights) - 32) // 2)
    chance = np.arange(1, 113) ** -0.99
    rng = np.random.default_rng(0)
    expected = [rng.choice(112, 16, replace=False, p=chance / chance.sum()) for _ in range(200)]
    edges = [0, 1, 2, 4, 8, 16, 32, 64, 112]
    ours, numpys = (np.histogram(g, edges)[0] / 200 for g in (gaps, np.concatenate(expected)))
    np.testing.assert_allclose(ours, numpys, atol=0.35)
    even = np.histogram(rng.integers(0, 112, 3200), edges)[0] / 200
    assert np.abs(ours - even).max() > 2, "negative control: even gaps are another distribution"


def test_recall_asks_for_the_last_binding():
    task, earlier = ct.MultiQueryRecall(vocab=64, lengths=(80,), pairs=(8,), bindings=3), 0
    for number in range(20):
        inputs, targets, weights, _ = TaskDocuments(task, "train")[number]
        pairs = list(zip(inputs[:48:2], inputs[1:48:2]))
        assert sorted(key for key, _ in pairs) == sorted(3 * list(dict(pairs))) and len(dict(pairs)) == 8
        asked = np.flatnonzero(weights)
        assert [dict(pairs)[key] for key in inputs[asked]] == list(targets[asked])
        earlier += sum(dict(reversed(pairs))[key] != value for key, value in zip(inputs[asked], targets[asked]))
    assert earlier > 100, "negative control: the first binding is another answer"


def test_stacks_by_a_machine_with_stacks():
    task = ct.StackTracking(stacks=4, elements=9, lengths=(600,))
    for number in range(20):
        inputs, targets, weights, _ = TaskDocuments(task, "held_out")[number]
        tokens, stacks, asked = np.append(inputs, targets[-1]), {}, []
        for i in range(0, 600, 3):
            operation, which, element = tokens[i : i + 3]
            stack = stacks.setdefault(which, [])
            if operation == 0:
                stack.append(element)
            else:
                assert stack.pop() == element
                asked.append(i + 1)
        np.testing.assert_array_equal(np.flatnonzero(weights), asked)
        assert len(asked) > 60


@pytest.mark.parametrize("degree", [2, 3, 5])
def test_permutations_by_composing_them(degree):
    documents = TaskDocuments(ct.PermutationTracking(degree=degree, lengths=(50,)), "train")
    all_ = list(permutations(range(degree)))
    state = tuple(range(degree))
    inputs, targets, *_ = documents[4]
    for step, product in zip(inputs, targets):
        state = tuple(all_[step][i] for i in state)
        assert all_.index(state) == product
    if degree == 2:
        np.testing.assert_array_equal(targets, np.cumsum(inputs) % 2)


def test_needle_is_text_with_the_number_at_its_depth():
    task = ct.Needle(lengths=(600,), depths=(0.0, 0.3, 1.0), keys=3, digits=4)
    documents = TaskDocuments(task, "train")
    for number in range(30):
        (inputs, targets, weights, _), cell, sources = documents.example(number)
        text = bytes([*inputs[1:].astype(np.uint8), targets[-1]]).decode("ascii")
        *needles, (key, answer) = re.findall(r" The number of (\w+) is (\d{4})", text)
        assert inputs[0] == 256 and weights.sum() == 4 and len(needles) == 3 and (key, answer) in needles
        assert text.endswith(f"{key} is {answer}") and bytes(targets[weights > 0].astype(np.uint8)).decode() == answer
        hay = 600 - 4 * 29 + 1
        before = text[: sources[weights > 0][0] - 1]
        place = len(before) - 24 - sum(29 for other, _ in needles if other != key and f" {other} " in before)
        assert abs(place / hay - cell["depth"]) < 0.04


def test_depths_and_lengths_are_met_equally_often():
    documents = TaskDocuments(ct.Needle(examples=300, held_out=0.5), "held_out")
    assert len(documents) == 150
    met = [documents.example(number).cell for number in range(150)]
    assert [met.count(cell) for cell in cells(ct.Needle())] == [10] * 15


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ct.MultiQueryRecall(lengths=(64,), pairs=(17,)), r"17 pairs do not fit 64 tokens.*at least 68"),
        (lambda: ct.MultiQueryRecall(lengths=(64,), pairs=(8,), bindings=4), r"10 \* pairs <= length.*at most 6 pairs"),
        (lambda: ct.MultiQueryRecall(bindings=0), "bindings = 0"),
        (lambda: ct.MultiQueryRecall(lengths=(64, 128)), r"pairs = \[4, 8, 16, 64\].*lengths \[64, 128\]"),
        (lambda: ct.MultiQueryRecall(vocab=128), r"vocab = 128.*at least 130"),
        (lambda: ct.MultiQueryRecall(vocab=8193), "vocab = 8193.*even"),
        (lambda: ct.MultiQueryRecall(power=0.0), r"power = 0.0"),
        (lambda: ct.Palindrome(lengths=(8, 15)), r"\[15\] are odd"),
        (lambda: ct.Copy(lengths=(16, 8)), r"lengths = \[16, 8\].*rising"),
        (lambda: ct.Copy(lengths=()), r"at least one length"),
        (lambda: ct.Copy(vocab=2), "vocab = 2.*at least 3"),
        (lambda: ct.StackTracking(lengths=(5,)), "at least 6"),
        (lambda: ct.PermutationTracking(degree=6), "degree = 6.*2..5"),
        (lambda: ct.Needle(lengths=(60,)), r"lengths = \[60\].*61 tokens"),
        (lambda: ct.Needle(depths=(0.5, 1.5)), r"depths = \[0.5, 1.5\]"),
        (lambda: ct.Needle(keys=17), "keys = 17"),
        (lambda: ct.Copy(held_out=1.0), "held_out = 1.0"),
        (lambda: ct.Copy(examples=0), "examples = 0"),
        (lambda: ct.check_fits(ct.MultiQueryRecall(), 258), r"8192 tokens, .* only 258"),
    ],
)
def test_bad_sizes_are_named(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_the_smallest_sizes_work():
    ct.check_fits(ct.Needle(), 257)
    smallest = [
        ct.MultiQueryRecall(vocab=4, lengths=(4,), pairs=(1,)),
        ct.Needle(lengths=(61,)),
        ct.PermutationTracking(lengths=(1,)),
    ]
    for task in smallest:
        assert TaskDocuments(task, "held_out")[0].weights.sum() >= 1
    with pytest.raises(IndexError, match="example 3000 of 3000"):
        TaskDocuments(smallest[0], "held_out")[3000]
    assert math.factorial(5) == ct.PermutationTracking().vocab


def test_a_run_reads_whole_examples_whatever_the_packing_of_its_text():
    """Negative control: a stream of the same documents cuts examples off from their answers."""
    task = ct.Copy(vocab=9, lengths=(6, 10), examples=50)
    batch = load_data(task, vocab=9).batches(length=19, batch=8, seed=0, packing=Stream())[0]

    def whole(row):
        """Whether the second half of each document asks for its first half."""
        parts = [row.segments_BT == segment for segment in set(row.segments_BT.tolist()) - {-1}]
        halves = [(row.tokens_BT[part], row.targets_BT[part]) for part in parts]
        return all(np.array_equal(x[: len(x) // 2], y[len(y) // 2 :]) for x, y in halves)

    rows = [Batch(*(field[i] for field in batch)) for i in range(8)]
    assert all(whole(row) for row in rows)
    cut = PackedRows(TaskDocuments(task, "train"), 19, Stream())
    assert not all(whole(cut[i]) for i in range(8))
    with pytest.raises(DataError, match=r"Copy: the longest example has 10 tokens, longer than the row of 8"):
        load_data(task, vocab=9).batches(length=8, batch=8, seed=0)
