"""A model as a function from packed rows to what it makes of each token, and held-out text under it."""

import math
from collections.abc import Callable, Iterable
from functools import partial

import jax
import numpy as np

from k3jax import config as c
from k3jax.data import Batch
from k3jax.loss import TokenScores, token_scores
from k3jax.model import weights
from k3jax.model.weights import Weights

Predict = Callable[[Batch], TokenScores]
"""NumPy scores [B, T] of a batch; the model reads its tokens and segments, and its targets only to score them."""


@partial(jax.jit, static_argnames=("model", "chunk"))
def _score(model: c.ModelConfig, weights_: Weights, batch: Batch, *, chunk: int) -> TokenScores:
    net = weights.bind(model, weights_)
    hidden, _ = net(model, batch.tokens_BT, batch.segments_BT)
    return token_scores(hidden, net.head[...], batch.targets_BT, chunk=chunk)


def predictor(model: c.ModelConfig, weights_: Weights, *, chunk: int) -> Predict:
    """The teacher-forced model. It is compiled once for each shape of a batch.

    Args:
      chunk: positions of a row whose logits exist at a time.
    """

    def predict(batch: Batch) -> TokenScores:
        return jax.device_get(_score(model, weights_, batch, chunk=chunk))

    return predict


def bits_per_byte(predict: Predict, batches: Iterable[Batch], size: int) -> dict[str, float]:
    """Held-out text of ``size`` bytes: {"bits_per_byte", "bytes", "nats" per token, "accuracy", "tokens"}.

    Sums are taken in float64 on the host. Without any bytes (a generated task) there is no "bits_per_byte".
    """
    nats = correct = tokens = 0.0
    for batch in batches:
        scores = predict(batch)
        weights_BT = batch.weights_BT.astype(np.float64)
        nats += float((weights_BT * scores.nats).sum())
        correct += float(weights_BT[scores.best == batch.targets_BT].sum())
        tokens += float(weights_BT.sum())
    per_token = {"nats": nats / max(tokens, 1), "accuracy": correct / max(tokens, 1), "tokens": round(tokens)}
    return {"bits_per_byte": nats / math.log(2) / size, "bytes": size, **per_token} if size else per_token
