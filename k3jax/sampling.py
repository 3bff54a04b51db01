"""Sampling from a model: several prompts of different lengths at once, each as if it were alone.

A KDA layer's memory is constant in the length of the text; an MLA layer keeps a compressed latent and a shared key.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from k3jax import config as c
from k3jax.model import weights
from k3jax.model.transformer import DecodeState, init_decode_state
from k3jax.model.weights import Weights


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. ``temperature=0`` is greedy; ``top_p`` keeps the smallest set of that mass."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be a number from 0 on, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")


def generate(
    model: c.ModelConfig,
    weights_: Weights,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int,
    sampling: Sampling = Sampling(),
    stop: int | None = None,
) -> list[list[int]]:
    """Continues every prompt; each continuation is what the prompt would get alone, up to the rounding of the logits.

    Args:
      model, weights_: the model.
      prompts: token ids, at least one each, of any lengths.
      max_new: tokens to add at the most.
      sampling: how tokens are drawn. The noise of a row depends on the seed, the prompt, and how many equal prompts
        stand before it, and not on its place in the batch.
      stop: a token that ends its row; it is not part of the continuation.

    Returns:
      the new tokens of each prompt.

    Raises:
      ValueError: no prompts, an empty prompt, ids outside the vocabulary, or a negative ``max_new``.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    done = np.zeros(len(prompts), bool)
    for tokens, _ in stream(model, weights_, prompts, max_new=max_new, sampling=sampling):
        done |= (tokens == stop) if stop is not None else False
        for row, token, ended in zip(rows, tokens, done):
            if not ended:
                row.append(int(token))
        if done.all():
            break
    return rows


def stream(
    model, weights_, prompts, *, max_new: int, sampling: Sampling, pad_to: int = 1
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The new tokens [B] and the float32 logits [B, W] that chose them, step by step; arguments as for generate.

    Rows are padded to a multiple of ``pad_to`` tokens: a larger one means fewer shapes to compile for.
    """
    _check(model, prompts, max_new)
    if max_new == 0:
        return
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    width = -(-int(lengths.max()) // pad_to) * pad_to
    padded = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(padded, prompts):
        row[: len(prompt)] = prompt
    keys = _row_keys(prompts, sampling.seed)
    state = init_decode_state(model, len(prompts), width + max_new)
    logits, state = _extend(model, weights_, padded, state, lengths)
    for step in range(max_new):
        tokens = _draw(sampling.temperature, sampling.top_p, logits, keys, step)
        yield np.asarray(tokens), np.asarray(logits)
        if step + 1 < max_new:
            logits, state = _extend(model, weights_, tokens[:, None], state, np.ones_like(lengths))


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def _extend(model, weights_, tokens_BT, state: DecodeState, lengths_B) -> tuple[Array, DecodeState]:
    """Logits after the last real token of each row, [B, W], and the state."""
    net = weights.bind(model, weights_)
    hidden, state = net.extend(model, tokens_BT, state, lengths_B)
    last = jnp.take_along_axis(hidden, (lengths_B - 1)[:, None, None], axis=1)[:, 0]
    return net.logits(last), state


@partial(jax.jit, static_argnums=(0, 1))
def _draw(temperature: float, top_p: float, logits_BW: Array, keys_B: Array, step: Array) -> Array:
    """One token per row, [B] int32."""
    if temperature == 0:
        return jnp.argmax(logits_BW, axis=-1).astype(jnp.int32)

    def one(logits_W, key):
        logits_W = logits_W / temperature
        if top_p < 1:
            ordered = jnp.sort(logits_W, descending=True)
            mass_before = jnp.cumsum(jax.nn.softmax(ordered)) - jax.nn.softmax(ordered)
            floor = jnp.min(jnp.where(mass_before < top_p, ordered, jnp.inf))
            logits_W = jnp.where(logits_W >= floor, logits_W, -jnp.inf)
        return jax.random.categorical(jax.random.fold_in(key, step), logits_W).astype(jnp.int32)

    return jax.vmap(one)(logits_BW, keys_B)


def _row_keys(prompts: Sequence[Sequence[int]], seed: int) -> Array:
    """One key per row, from the seed, the prompt, and the number of equal prompts before it."""
    seen: dict[bytes, int] = {}
    keys = []
    for prompt in prompts:
        content = np.asarray(prompt, np.int32).tobytes()
        copy = seen.setdefault(content, 0)
        seen[content] += 1
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(content))
        keys.append(jax.random.fold_in(key, copy))
    return jnp.stack(keys)


def _check(model: c.ModelConfig, prompts, max_new: int) -> None:
    if max_new < 0:
        raise ValueError(f"max_new must not be negative, got {max_new}")
    if not len(prompts):
        raise ValueError("there is no prompt to continue")
    for number, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if not ids.size:
            raise ValueError(f"prompt {number} is empty; give at least one token")
        if ids.min() < 0 or ids.max() >= model.vocab:
            raise ValueError(
                f"prompt {number} has ids from {ids.min()} to {ids.max()}; the vocabulary is 0..{model.vocab - 1}"
            )
