"""Sampling: a prompt's continuation does not depend on its company, and bad requests are refused."""

import jax
import numpy as np
import pytest

from k3jax.model import weights
from k3jax.sampling import Sampling, generate, stream

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5], [200, 3, 3], [5]]


@pytest.fixture(scope="module")
def model(micro):
    return micro.model


@pytest.fixture(scope="module")
def trained(model):
    """Weights far from uniform predictions, so that greedy choices are clear."""
    fresh = weights.init(model, 1)
    return fresh._replace(params=jax.tree.map(lambda x: 2 * x if x.ndim > 1 else x, fresh.params))


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=0.9, top_p=0.8, seed=3)], ids=repr)
def test_each_prompt_goes_on_as_if_alone(model, trained, sampling):
    together = generate(model, trained, PROMPTS, max_new=6, sampling=sampling)
    for prompt, new in zip(PROMPTS[:3], together):
        assert generate(model, trained, [prompt], max_new=6, sampling=sampling) == [new]
    assert (together[1] == together[3]) == (sampling.temperature == 0)


def test_decoding_follows_the_whole_forward_pass(model, trained):
    steps = list(stream(model, trained, PROMPTS[:1], max_new=5, sampling=Sampling(temperature=0)))
    tokens = [int(tokens[0]) for tokens, _ in steps]
    net = weights.bind(model, trained)
    hidden, _ = net(model, np.array([PROMPTS[0] + tokens[:-1]], np.int32))
    expected = net.logits(hidden)[0, len(PROMPTS[0]) - 1 :]
    np.testing.assert_allclose(np.stack([logits[0] for _, logits in steps]), expected, atol=2e-4)


def test_top_p_keeps_the_most_likely_tokens(model, trained):
    narrow = Sampling(temperature=1.0, top_p=1e-6, seed=5)
    greedy = Sampling(temperature=0)
    assert generate(model, trained, PROMPTS[:1], max_new=4, sampling=narrow) == generate(
        model, trained, PROMPTS[:1], max_new=4, sampling=greedy
    )


def test_stop_ends_its_row_only(model, trained):
    sampling = Sampling(temperature=0)
    free = generate(model, trained, PROMPTS[:3], max_new=6, sampling=sampling)
    stop = free[0][2]
    stopped = generate(model, trained, PROMPTS[:3], max_new=6, sampling=sampling, stop=stop)
    for row, whole in zip(stopped, free):
        assert row == (whole[: whole.index(stop)] if stop in whole else whole)


def test_seeds_differ_and_repeat(model, trained):
    draw = [generate(model, trained, PROMPTS[:1], max_new=6, sampling=Sampling(seed=seed)) for seed in (0, 0, 1)]
    assert draw[0] == draw[1] != draw[2]


@pytest.mark.parametrize(
    ("prompts", "max_new", "match"),
    [([], 1, "no prompt"), ([[1], []], 1, "prompt 1 is empty"), ([[999]], 1, "0..257"), ([[1]], -1, "max_new")],
)
def test_bad_requests_are_refused(model, trained, prompts, max_new, match):
    with pytest.raises(ValueError, match=match):
        generate(model, trained, prompts, max_new=max_new)


@pytest.mark.parametrize(
    "fields", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_bad_sampling_is_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Sampling(**fields)
