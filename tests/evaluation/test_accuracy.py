"""Accuracy tables of predictors whose accuracy is known: an oracle, a constant, an oracle with mixed answers."""

from functools import partial

import jax
import numpy as np
import pytest

from k3jax import config_tasks as ct
from k3jax.data.documents import DataError
from k3jax.data.tasks import TaskDocuments
from k3jax.evaluation import bits_per_byte, chance, measure, predictor
from k3jax.evaluation.figure import figure_png
from k3jax.loss import TokenScores, cross_entropy, token_scores
from k3jax.model import weights

RECALL = ct.MultiQueryRecall(vocab=32, lengths=(20, 40), pairs=(2, 8))


def predict_with(rule):
    """A predictor from a rule: the tokens of one document -> the best next tokens. It sees no targets."""

    def predict(batch):
        best = np.zeros_like(batch.tokens_BT)
        for row, (tokens, segments) in enumerate(zip(batch.tokens_BT, batch.segments_BT)):
            for segment in set(segments.tolist()) - {-1}:
                best[row, segments == segment] = rule(tokens[segments == segment])
        return TokenScores(np.where(best == batch.targets_BT, 0.5, 2.0).astype(np.float32), best)

    return predict


def induction(tokens):
    """What followed the last earlier occurrence of each token."""
    last, best = {}, []
    for i, token in enumerate(tokens):
        best.append(tokens[last[token] + 1] if token in last else 0)
        last[token] = i
    return best


def reversal(tokens):
    return [tokens[max(len(tokens) - i - 1, 0)] for i in range(len(tokens))]


def repetition(tokens):
    return [tokens[max(i - len(tokens) // 2, 0)] for i in range(len(tokens))]


def machine(tokens):
    stacks, best = {}, np.zeros(len(tokens), int)
    for i in range(0, len(tokens), 3):
        operation, which, *element = tokens[i : i + 3]
        if operation == 1:
            best[i + 1] = stacks[which].pop()
        elif element:
            stacks.setdefault(which, []).append(element[0])
    return best


def parity(tokens):
    return np.cumsum(tokens) % 2


ORACLES = [
    (RECALL, induction),
    (ct.Palindrome(vocab=9, lengths=(10, 30)), reversal),
    (ct.Copy(vocab=9, lengths=(10, 30)), repetition),
    (ct.StackTracking(stacks=2, elements=6, lengths=(26, 38)), machine),
    (ct.PermutationTracking(degree=2, lengths=(9, 40)), parity),
]


def name(value):
    return type(value).__name__ if not callable(value) else ""


@pytest.mark.parametrize("task, oracle", ORACLES, ids=name)
def test_an_oracle_is_always_right_and_mixed_answers_are_not(task, oracle):
    sizes = dict(length=43, batch=3, examples=40)
    record = measure(task, predict_with(oracle), **sizes)
    assert [cell["length"] for cell in record["cells"]] == list(task.lengths)
    for cell in record["cells"]:
        assert cell["answers"] > 0 and cell["examples"] == 40
        assert (cell["accuracy"], cell["exact"], cell["stderr"], cell["nats"]) == (1.0, 1.0, 0.0, 0.5)
    assert {entry["accuracy"] for entry in record["distances"]} == {1.0}
    assert sum(e["answers"] for e in record["distances"]) == sum(c["answers"] for c in record["cells"])

    rng = np.random.default_rng(1)
    mixed = measure(task, predict_with(lambda tokens: rng.permutation(oracle(tokens))), **sizes)
    for cell in mixed["cells"]:
        assert cell["accuracy"] < 0.75 and cell["exact"] < 0.3
        assert cell["nats"] == pytest.approx(2.0 - 1.5 * cell["accuracy"])


@pytest.mark.parametrize("task", [task for task, _ in ORACLES] + [ct.Needle(lengths=(90,), depths=(0.5,))], ids=name)
def test_a_constant_has_the_accuracy_of_chance(task):
    answer = {"StackTracking": 4, "MultiQueryRecall": 20, "Needle": ord("7")}.get(type(task).__name__, 1)
    record = measure(task, predict_with(lambda tokens: answer), length=90, batch=4, examples=200)
    for cell in record["cells"]:
        wide = 4 * np.sqrt(chance(task) / cell["answers"])
        assert cell["accuracy"] == pytest.approx(chance(task), abs=wide)
        assert 0 < cell["stderr"] < wide


def test_an_answer_out_of_reach_shows_by_distance():
    """An induction that forgets what is more than 15 tokens back."""

    def forgetful(tokens):
        best = []
        for i in range(len(tokens)):
            near = [j for j in range(max(i - 14, 0), i) if tokens[j] == tokens[i]]
            best.append(tokens[near[-1] + 1] if near else -1)
        return best

    record = measure(RECALL, predict_with(forgetful), length=40, batch=8)
    assert {e["from"]: e["accuracy"] for e in record["distances"]} == {2: 1.0, 4: 1.0, 8: 1.0, 16: 0.0, 32: 0.0}
    accuracy = [cell["accuracy"] for cell in record["cells"]]
    assert 0 < accuracy[1] < accuracy[0] < 1


def test_the_record_is_the_same_for_rows_of_any_shape_and_grows_by_examples():
    whole = measure(RECALL, predict_with(induction), length=40, batch=1, examples=6)
    assert whole == measure(RECALL, predict_with(induction), length=173, batch=5, examples=6)
    assert whole != measure(RECALL, predict_with(lambda tokens: 20), length=40, batch=1, examples=6)


def test_a_row_that_is_too_short_is_named():
    with pytest.raises(DataError, match=r"MultiQueryRecall, example 1 has 40 tokens.*row of 39"):
        measure(RECALL, predict_with(induction), length=39, batch=1)


def test_figure_of_curves_and_grids():
    needle = ct.Needle(lengths=(90, 120), depths=(0.0, 1.0))
    records = [measure(task, predict_with(induction), length=120, batch=4, examples=2) for task in (RECALL, needle)]
    assert figure_png(records).startswith(b"\x89PNG") and len(figure_png(records[:1])) > 5000


def test_token_scores_are_the_loss_token_by_token():
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(2, 11, 5)).astype(np.float32) * 10, rng.normal(size=(5, 7)).astype(np.float32)
    targets, chosen = rng.integers(0, 7, (2, 11)), rng.random((2, 11)).astype(np.float32)
    scores = jax.device_get(jax.jit(partial(token_scores, chunk=4))(hidden, head, targets))
    _, stats = jax.jit(cross_entropy)(hidden, head, targets, chosen)
    np.testing.assert_allclose(np.sum(scores.nats * chosen), stats.nats, rtol=1e-6)
    np.testing.assert_allclose(np.sum((scores.best == targets) * chosen), stats.correct, rtol=1e-6)


def test_a_model_scores_a_packed_example_as_it_scores_it_alone(model):
    """Rows of 10 hold one example each, rows of 26 two to four."""
    predict = predictor(model, weights.init(model, 0), chunk=8)
    task = ct.Copy(lengths=(6, 10))
    alone = measure(task, predict, length=10, batch=8, examples=4)
    packed = measure(task, predict, length=26, batch=3, examples=4)
    for one, other in zip(alone["cells"], packed["cells"]):
        assert one["nats"] == pytest.approx(other["nats"], rel=1e-5)
        assert one["accuracy"] == other["accuracy"] and one["answers"] == 4 * one["length"] / 2


def test_bits_per_byte_without_and_with_bytes():
    batch = TaskDocuments(ct.Copy(lengths=(6,)), "train")[0]
    rows = type("Rows", (), dict(tokens_BT=None, targets_BT=batch.targets[None], weights_BT=batch.weights[None]))
    scores = TokenScores(np.full((1, 6), np.log(2), np.float32), batch.targets[None])
    assert bits_per_byte(lambda _: scores, [rows, rows], 3)["bits_per_byte"] == pytest.approx(6 / 3)
    found = bits_per_byte(lambda _: scores, [rows], 0)
    assert found == {"nats": pytest.approx(np.log(2)), "accuracy": 1.0, "tokens": 3}
