"""Log-likelihoods against the logits of `k3jax.score`, and continuations against `k3jax.sampling.generate`."""

import numpy as np
import pytest

from k3jax.data import ByteTokenizer
from k3jax.evaluation import predictor, text
from k3jax.loss import TokenScores
from k3jax.model import weights
from k3jax.sampling import Sampling, generate
from k3jax.score import score

TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def made(model):
    return weights.init(model, 0)


def test_log_likelihoods_are_those_of_the_logits(model, made):
    predict = predictor(model, made, chunk=32)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 258, (3, 24))
    logits = np.zeros((3, 24, model.vocab), np.float32)
    score(model, made, ids, logits)
    chances = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=2, keepdims=True))
    best = logits.argmax(axis=2)
    greedy = [*ids[2, :20].tolist(), int(best[2, 19])]
    pairs = [(ids[0, :20], ids[0, 20:]), (ids[1, :1], ids[1, 1:3]), (greedy[:20], greedy[20:]), (ids[0, :9], [])]
    found = text.log_likelihoods(predict, pairs, batch=2, max_length=64)
    expected = [
        sum(chances[0, i, ids[0, i + 1]] for i in range(19, 23)),
        sum(chances[1, i, ids[1, i + 1]] for i in range(2)),
        chances[2, 19].max(),
        0.0,
    ]
    np.testing.assert_allclose([nats for nats, _ in found], expected, rtol=1e-5)
    assert [flag for _, flag in found] == [False, False, True, True]


def test_of_a_long_context_the_end_counts():
    seen = []

    def predict(batch):
        seen.append(batch)
        return TokenScores(np.ones(batch.tokens_BT.shape), batch.targets_BT)

    found = text.log_likelihoods(predict, [(range(100, 130), [1, 2, 3]), ([7], [8])], batch=4, max_length=10)
    assert found == [(-3.0, True), (-1.0, True)]
    (batch,) = seen
    assert batch.tokens_BT.shape == (4, 10)
    np.testing.assert_array_equal(batch.tokens_BT[0], [*range(122, 130), 1, 2])
    np.testing.assert_array_equal(batch.targets_BT[0], [*range(123, 130), 1, 2, 3])
    np.testing.assert_array_equal(batch.segments_BT[:3, 1], [0, -1, -1])
    np.testing.assert_array_equal(batch.weights_BT.sum(axis=1), [3, 1, 0, 0])


@pytest.mark.parametrize(
    "pair, words",
    [(([], [1]), "request 0 has no context"), (([1], range(11)), "request 0 continues for 11 tokens; at most 10 fit")],
)
def test_requests_that_cannot_be_answered_are_named(pair, words):
    with pytest.raises(ValueError, match=words):
        text.log_likelihoods(None, [pair], batch=1, max_length=10)


def test_continuations_are_those_of_generate(model, made):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 258, size).tolist() for size in (5, 20, 9)]
    new = generate(model, made, [*prompts, [0] * 64], max_new=5, sampling=Sampling(temperature=0.0), stop=TOKENIZER.eos)
    expected = [TOKENIZER.decode(tokens) for tokens in new[:3]]
    assert any(expected)
    found = text.continue_until(model, made, TOKENIZER, prompts, until=[], max_new=5, batch=4)
    assert found == expected


@pytest.mark.parametrize(
    "until, expected, steps",
    [
        ([], ["one. two", "a"], 8),
        (["."], ["one", "a"], 4),
        (["tw", ". "], ["one", "a"], 5),
        (["", "never"], ["one. two", "a"], 8),
        (["ö"], ["one. two", "a"], 8),
    ],
)
def test_a_stop_string_or_eos_ends_a_text_and_both_end_the_batch(monkeypatch, until, expected, steps):
    rows = [[*b"one. two"], [*b"a", TOKENIZER.eos, *b"xxxxxx"], [0] * 8]
    asked = []

    def stream(model, weights, prompts, *, max_new, sampling, pad_to):
        asked.append(prompts)
        for step in range(max_new):
            asked.append(step)
            yield np.array([row[step] for row in rows]), None

    monkeypatch.setattr(text, "stream", stream)
    found = text.continue_until(None, None, TOKENIZER, [[1, 2], [3]], until=until, max_new=8, batch=3)
    assert found == expected
    assert asked[0] == [[1, 2], [3], [TOKENIZER.bos]] and asked[-1] == steps - 1
