"""Sampling from a model, and the command for it.

    python -m k3jax.generate --checkpoint runs/nano --prompt "def main(" --max-new 200
    python -m k3jax.generate --hf DIR --ids prompts.npy --greedy --max-new 32 --out continued.npy

A KDA layer's memory is constant in the length of the text; an MLA layer keeps its compressed latent and shared key only.
"""

import pathlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import Array

from k3jax import config as c
from k3jax import runtime
from k3jax.data import ByteTokenizer
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
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")


def generate(
    model: c.ModelConfig, weights_: Weights, prompts: Sequence[Sequence[int]], *, max_new: int,
    sampling: Sampling = Sampling(), stop: int | None = None,
) -> list[list[int]]:
    """Continues every prompt; each continuation is what the prompt would get alone.

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


def stream(model, weights_, prompts, *, max_new: int, sampling: Sampling) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The new tokens [B] and the float32 logits [B, W] that chose them, step by step; arguments as for generate."""
    _check(model, prompts, max_new)
    if max_new == 0:
        return
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    padded = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(padded, prompts):
        row[: len(prompt)] = prompt
    keys = _row_keys(prompts, sampling.seed)
    state = init_decode_state(model, len(prompts), int(lengths.max()) + max_new)
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
            raise ValueError(f"prompt {number} has ids from {ids.min()} to {ids.max()}; the vocabulary is 0..{model.vocab - 1}")


_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "a run folder written by k3jax.train")
_HF = flags.DEFINE_string("hf", None, "a folder in the released Hugging Face format")
_PROMPT = flags.DEFINE_multi_string("prompt", None, "text to continue; repeat the flag for a batch (with --checkpoint)")
_IDS = flags.DEFINE_string("ids", None, "a .npy file of token ids [T] or [B, T] to continue (with --hf)")
_OUT = flags.DEFINE_string("out", None, "a .npy file to write the new ids to, [B, max_new] (with --ids)")
_MAX_NEW = flags.DEFINE_integer("max-new", 200, "tokens to add at the most", lower_bound=0)
_GREEDY = flags.DEFINE_bool("greedy", False, "take the most likely token each time")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "divides the logits", lower_bound=0.0)
_TOP_P = flags.DEFINE_float("top-p", 1.0, "keep the most likely tokens up to this probability mass")
_SEED = flags.DEFINE_integer("seed", 0, "of the sampling noise")


def _text(sampling: Sampling) -> None:
    """Continues ``--prompt`` with a trained checkpoint, and prints each with its continuation."""
    from k3jax.checkpoint import Checkpoints

    with Checkpoints(pathlib.Path(_CHECKPOINT.value)) as checkpoints:
        config, state = checkpoints.load()
    tokenizer = ByteTokenizer()
    prompts = [[tokenizer.bos, *tokenizer.encode(text)] for text in _PROMPT.value]
    new = generate(
        config.model, state.weights, prompts, max_new=_MAX_NEW.value, sampling=sampling, stop=tokenizer.eos
    )
    for text, tokens in zip(_PROMPT.value, new):
        print(text + tokenizer.decode([token for token in tokens if token < tokenizer.size]))


def _ids(sampling: Sampling) -> None:
    """Continues ``--ids`` with released weights, and prints or writes the new ids."""
    from k3jax.hf import load_hf

    ids = np.load(_IDS.value, allow_pickle=False)
    if ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{_IDS.value} must hold integers [T] or [B, T], got {ids.dtype} {list(ids.shape)}")
    model, params, router = load_hf(_HF.value)
    new = generate(
        model, Weights(params, router), np.atleast_2d(ids), max_new=_MAX_NEW.value, sampling=sampling
    )
    if _OUT.value:
        np.save(_OUT.value, np.array(new, np.int32))
    else:
        for row in new:
            print(*row)


def main(_) -> None:
    runtime.start()
    if bool(_CHECKPOINT.value) == bool(_HF.value):
        raise app.UsageError("give one of --checkpoint RUN and --hf DIR")
    if _CHECKPOINT.value and not _PROMPT.value:
        raise app.UsageError("--checkpoint needs --prompt TEXT")
    if _HF.value and not _IDS.value:
        raise app.UsageError("--hf needs --ids FILE.npy")
    sampling = Sampling(0.0 if _GREEDY.value else _TEMPERATURE.value, _TOP_P.value, _SEED.value)
    (_text if _CHECKPOINT.value else _ids)(sampling)


if __name__ == "__main__":
    app.run(main)
