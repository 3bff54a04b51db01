"""A sequence cut into shards equals the whole one, values and gradients, through the summaries that shards exchange."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_cases import ARRAYS, FLOAT64, INTERPRETED, cotangents, make_inputs, values, values_and_gradients

from pallas_kernels import testing
from pallas_kernels.kda import kda
from pallas_kernels.kda.context import Summary, entering_state, leaving_cotangent, segment_summary

TOKENS, T, B = ARRAYS[:5], 96, 2
BARS = {"default": 5e-5, "A_log": 5e-4}
# The first row is one document with padding behind; in the second, documents cross the cuts, meet at one of them, and
# one lies inside a shard.
IDS = np.stack([np.r_[[0] * 90, [-1] * 6], np.r_[[0] * 30, [1] * 18, [2] * 40, [3] * 5, [4] * 3]]).astype(np.int32)


def summarize(inputs, ids):
    rest = dict(A_log=inputs["A_log"], dt_bias=inputs["dt_bias"], segment_ids=ids)
    return segment_summary(*(inputs[n] for n in TOKENS[1:]), **rest)


@functools.partial(jax.jit, static_argnames="shards")
def sharded(inputs, cot, ids, shards, keep=(1.0, 1.0)):
    """Values and gradients from shards, as rows of a batch, that see each other's summaries only.

    keep: factors of M and S; zero drops one.
    """
    cut = lambda x: x.reshape(B, shards, T // shards, *x.shape[2:]).swapaxes(0, 1).reshape(shards * B, -1, *x.shape[2:])  # noqa: E731
    join = lambda x: x.reshape(shards, B, *x.shape[1:]).swapaxes(0, 1).reshape(B, T, *x.shape[2:])  # noqa: E731
    rows = lambda x: x.reshape(shards * B, *x.shape[2:])  # noqa: E731
    ranks = lambda x: x.reshape(shards, B, *x.shape[1:])  # noqa: E731
    parts = {name: cut(x) if name in TOKENS else x for name, x in inputs.items()}
    parts_ids, do, continues = None, cut(cot[0]), None
    if ids is not None:
        parts_ids = cut(ids)
        first, last = ranks(parts_ids[:, 0]), ranks(jnp.max(parts_ids, axis=1))
        continues = jnp.concatenate([first[:1] >= 0, (first[1:] == last[:-1]) | (first[1:] < 0)])
    M, S = (ranks(x) * k for x, k in zip(summarize(parts, parts_ids), keep))
    fold = lambda r: entering_state(Summary(M, S), inputs["initial_state"], r, continues)  # noqa: E731
    entering = jax.vmap(fold)(jnp.arange(shards))

    def run(parts):
        return kda(*(parts[n] for n in TOKENS), **{n: parts[n] for n in ARRAYS[5:]}, segment_ids=parts_ids)

    (o, state), pull = jax.vjp(run, parts | {"initial_state": rows(entering)})
    dstate = jnp.zeros_like(entering).at[-1].set(cot[1])
    own = ranks(pull((do, rows(dstate)))[0]["initial_state"])
    later = jax.vmap(lambda r: leaving_cotangent(M, own, r, continues))(jnp.arange(shards))
    gradients = pull((do, rows(dstate + later)))[0]
    result = {n: join(x) for n, x in ({"o": o} | {n: gradients[n] for n in TOKENS}).items()}
    result |= {n: gradients[n] for n in ("A_log", "dt_bias")}
    return result | {"state": ranks(state)[-1], "initial_state": ranks(gradients["initial_state"])[0]}


def case(ids):
    inputs = make_inputs(0, B=B, T=T, H=2, K=16, V=8, gates="weak")
    cot = cotangents(inputs)
    return inputs, cot, values_and_gradients(inputs, cot, implementation=FLOAT64, segment_ids=ids)


@pytest.mark.parametrize("shards, ids", ((2, None), (4, None), (2, IDS), (4, IDS)))
def test_t17_t18_shards_equal_the_whole(shards, ids):
    inputs, cot, expected = case(ids)
    testing.assert_close(sharded(inputs, cot, ids, shards), expected, BARS)


@pytest.mark.parametrize("keep", ((0.0, 1.0), (1.0, 0.0)), ids=("M", "S"))
def test_a_dropped_part_of_the_summary_is_seen(keep):
    inputs, cot, expected = case(None)
    result = sharded(inputs, cot, None, 4, keep)
    assert testing.relative_error(result["o"], expected["o"]) > 1e-2
    if not keep[0]:
        assert testing.relative_error(result["initial_state"], expected["initial_state"]) > 1e-2


def test_summary_of_the_interpreted_tpu_kernel():
    """From bfloat16 inputs: the map is that of float64 to the accuracy of a final state."""
    inputs = make_inputs(1, B=1, T=100, H=2, K=64, V=128, gates="weak", dtype=jnp.bfloat16)
    eye = jnp.broadcast_to(jnp.eye(64), (1, 2, 64, 64))
    found = {
        name: values(inputs | changes, implementation=INTERPRETED, exact=True)["state"]
        for name, changes in {
            "M": {"v": 0 * inputs["k"], "initial_state": eye},
            "S": {"initial_state": 0 * inputs["initial_state"]},
        }.items()
    }
    with jax.enable_x64(True):
        exact = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in inputs.items()}
        expected = summarize(exact, None)
    testing.assert_close(found, Summary(*expected)._asdict(), 5e-3)
