"""Logits and loss of released weights on given tokens.

python -m k3jax.score --hf DIR --ids FILE.npy --out logits.npy
"""

import os
import pathlib
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from k3jax import config as c
from k3jax import runtime
from k3jax.hf import load_hf
from k3jax.model import weights
from k3jax.model.weights import Weights
from k3jax.token_file import read_ids

BLOCK = 1024


def score(model: c.ModelConfig, weights_: Weights, ids_BT: np.ndarray, out: np.ndarray | None = None) -> float | None:
    """Mean next-token cross-entropy in nats over all rows, every row from an empty state.

    Rows are computed one by one, and their logits ``BLOCK`` tokens at a time.

    Args:
      model, weights_: the model.
      ids_BT: integers in [0, vocab).
      out: [B, T, W] float32 array that receives the logits, a memory map for example.

    Returns:
      the loss, or None when T = 1 leaves no token to predict.

    Raises:
      ValueError: ids that are no integers, of another rank, empty, or outside the vocabulary.
    """
    _check(model, ids_BT)
    total = 0.0
    for row, ids_T in enumerate(ids_BT.astype(np.int32)):
        for start, logits_TW, nats in _blocks(model, weights_, ids_T):
            total += nats
            if out is not None:
                out[row, start : start + len(logits_TW)] = logits_TW
    rows, time = ids_BT.shape
    return total / (rows * (time - 1)) if time > 1 else None


def _blocks(model, weights_, ids_T: np.ndarray) -> Iterator[tuple[int, jax.Array, float]]:
    """First position, logits, and summed cross-entropy of each block of a row; its last token has no target."""
    hidden_TD = _hidden(model, weights_, ids_T[None])[0]
    targets_T = np.append(ids_T[1:], -1)
    for start in range(0, len(ids_T), BLOCK):
        block = slice(start, start + BLOCK)
        logits_TW, nats = _logits(model, weights_, hidden_TD[block], targets_T[block])
        yield start, logits_TW, float(nats)


@partial(jax.jit, static_argnums=0)
def _hidden(model, weights_, ids_BT):
    return weights.bind(model, weights_)(model, ids_BT)[0]


@partial(jax.jit, static_argnums=0)
def _logits(model, weights_, hidden_TD, targets_T):
    """Float32 logits, and the cross-entropy summed over positions with a target; -1 is none."""
    logits_TW = weights.bind(model, weights_).logits(hidden_TD)
    chosen_T = jnp.take_along_axis(logits_TW, jnp.maximum(targets_T, 0)[:, None], axis=1)[:, 0]
    nats_T = jax.nn.logsumexp(logits_TW, axis=1) - chosen_T
    return logits_TW, jnp.sum(jnp.where(targets_T >= 0, nats_T, 0))


def _check(model: c.ModelConfig, ids_BT: np.ndarray) -> None:
    if ids_BT.ndim != 2 or not np.issubdtype(ids_BT.dtype, np.integer) or not ids_BT.size:
        raise ValueError(f"ids must be integers [B, T], at least one, but are {ids_BT.dtype} {list(ids_BT.shape)}")
    low, high = ids_BT.min(), ids_BT.max()
    if low < 0 or high >= model.vocab:
        raise ValueError(f"ids go from {low} to {high}, but the vocabulary is 0 to {model.vocab - 1}")


def score_to_file(model: c.ModelConfig, weights_: Weights, ids_BT: np.ndarray, path: pathlib.Path) -> float | None:
    """As :func:`score`; the logits go to a ``.npy`` file, which appears under its name when it is complete.

    Raises:
      ValueError: as :func:`score`. OSError: there cannot be a file at ``path``.
    """
    _check(model, ids_BT)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, but the logits go to a file")
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        shape = (*ids_BT.shape, model.vocab)
        out = np.lib.format.open_memmap(unfinished, mode="w+", dtype=np.float32, shape=shape)
        loss = score(model, weights_, ids_BT, out)
        out.flush()
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return loss


def main(argv: list[str]) -> None:
    runtime.refuse_stray(argv)
    runtime.start()
    args = flags.FLAGS
    try:
        ids = read_ids(args.ids)
        model, params, router = load_hf(args.hf, dtype=args.dtype)
        run = partial(score_to_file, path=pathlib.Path(args.out)) if args.out else score
        loss = run(model, Weights(params, router), ids)
    except (ValueError, OSError) as error:
        raise SystemExit(f"k3jax.score: {error}") from error
    print("one token a row: nothing to predict" if loss is None else f"loss {loss:.8f} nats per token")


if __name__ == "__main__":
    flags.DEFINE_string("hf", None, "a folder in the released Hugging Face format", required=True)
    flags.DEFINE_string("ids", None, "a .npy file of token ids [B, T]", required=True)
    flags.DEFINE_string("out", None, "a .npy file to write the logits to, [B, T, vocab] float32")
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of the computation")
    app.run(main)
