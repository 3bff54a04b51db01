"""Next-token cross-entropy that never holds the logits of a whole row.

The row is cut along time into chunks; the logits of one chunk exist at a time, in the forward and in the backward pass.
The cut is along time and not over flattened tokens so that the batch axis keeps its sharding.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax import sharding


class LossStats(NamedTuple):
    """Sums over tokens, float32 scalars without gradient."""

    nats: jax.Array  # sum of weight * cross-entropy
    weight: jax.Array  # sum of weight
    correct: jax.Array  # sum of weight where the target has the largest logit
    z_square: jax.Array  # sum of weight * logsumexp ** 2


class TokenScores(NamedTuple):
    """What the model makes of each token, [B, T]."""

    nats: jax.Array  # float32 cross-entropy of the target
    best: jax.Array  # int32, the token with the largest logit


def cross_entropy(hidden_BTD, head_DW, targets_BT, weights_BT, *, z_loss: float = 0.0):
    """The readable twin of `chunked_cross_entropy`: all logits at once, in float32."""
    logits_BTW = jnp.einsum("btd,dw->btw", hidden_BTD, head_DW, preferred_element_type=jnp.float32)
    lse_BT = jax.nn.logsumexp(logits_BTW, axis=-1)
    nats_BT = lse_BT - jnp.take_along_axis(logits_BTW, targets_BT[..., None], axis=-1)[..., 0]
    loss = jnp.sum(weights_BT * (nats_BT + z_loss * lse_BT**2))
    stats = LossStats(
        nats=jnp.sum(weights_BT * nats_BT),
        weight=jnp.sum(weights_BT),
        correct=jnp.sum(weights_BT * (jnp.argmax(logits_BTW, axis=-1) == targets_BT)),
        z_square=jnp.sum(weights_BT * lse_BT**2),
    )
    return loss, jax.lax.stop_gradient(stats)


def chunked_cross_entropy(
    hidden_BTD: jax.Array,
    head_DW: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    chunk: int,
    z_loss: float = 0.0,
) -> tuple[jax.Array, LossStats]:
    """Weighted sum of next-token cross-entropy, plus `z_loss` times the sum of squared log-partitions.

    The z-loss is the auxiliary loss of PaLM (arXiv 2204.02311, section 5): it keeps the softmax normalizer near 1.

    Args:
      hidden_BTD: output of the last norm, bfloat16 or float32. Matrix products run in this dtype and accumulate in
        float32; the softmax is float32.
      head_DW: the output projection, any float dtype. Pass the float32 master weights to get a gradient accumulated and
        returned in float32.
      targets_BT: int32 in [0, W).
      weights_BT: float32; 0 leaves a position out.
      chunk: positions of each row whose logits exist at a time; memory is about 3 * B * chunk * W * 4 bytes. T need not
        be a multiple of it.
      z_loss: coefficient of the squared log-partition.

    Returns:
      The float32 sum to differentiate (divide it by the number of tokens), and sums for reporting. Under
      differentiation the gradients are made in the forward pass, where the logits of the chunk are at hand, so they
      are never computed twice.

    On a mesh a device has its part of the vocabulary for the tokens of its context shard. It gathers the rows of the
    head once, adds up the gradient of what it gathered over all chunks, and reduce-scatters that once.

    Raises:
      ValueError: shapes that disagree, a chunk below 1, or a negative z_loss.
    """
    _check(hidden_BTD, head_DW, targets_BT, weights_BT, chunk, z_loss)
    spread = sharding.spread_of(head_DW, 0)

    def local(hidden, head, targets, weights):
        hidden = sharding.gather(hidden, "tensor", dim=1)
        targets, weights = sharding.part((targets, weights), "context", dim=1)
        positions = min(chunk, max(targets.shape[1], 1))
        sums = _loss(positions, z_loss, spread, hidden, head, targets, weights.astype(jnp.float32))
        return sharding.total(sums, (*sharding.BATCH_AXES, "context"))

    loss, stats = sharding.island(local, sharding.EVERYWHERE)(hidden_BTD, head_DW, targets_BT, weights_BT)
    return loss, jax.lax.stop_gradient(stats)


def token_scores(hidden_BTD, head_DW, targets_BT, *, chunk: int) -> TokenScores:
    """As `chunked_cross_entropy`, but token by token and without a gradient."""
    _check(hidden_BTD, head_DW, targets_BT, targets_BT, chunk, 0.0)
    head, (batch, length) = head_DW.astype(hidden_BTD.dtype), targets_BT.shape
    chunk = min(chunk, max(length, 1))

    def one(piece):
        logits, _, _, nats, _ = _piece_loss(head, piece, 0.0)
        return TokenScores(nats, _best(logits))

    pieces = _split(chunk, hidden_BTD, targets_BT, jnp.ones((batch, length), jnp.float32))
    return jax.tree.map(lambda x: _join(x, length), jax.lax.map(one, pieces))


def _check(hidden_BTD, head_DW, targets_BT, weights_BT, chunk, z_loss):
    shapes = f"hidden {hidden_BTD.shape}, head {head_DW.shape}, targets {targets_BT.shape}, weights {weights_BT.shape}"
    if hidden_BTD.ndim != 3 or head_DW.ndim != 2 or hidden_BTD.shape[2] != head_DW.shape[0]:
        raise ValueError(f"expected hidden [B, T, D] and head [D, W], got {shapes}")
    if targets_BT.shape != hidden_BTD.shape[:2] or weights_BT.shape != hidden_BTD.shape[:2]:
        raise ValueError(f"expected targets and weights of shape {hidden_BTD.shape[:2]}, got {shapes}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    if z_loss < 0:
        raise ValueError(f"z_loss must not be negative, got {z_loss}")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _loss(chunk, z_loss, spread, hidden_BTD, head_DW, targets_BT, weights_BT):
    """The sums over this device's tokens. spread: the mesh axes that the rows of the head are spread over at rest."""
    head = sharding.gather(head_DW.astype(hidden_BTD.dtype), spread, dim=0)

    def step(sums, piece):
        _, _, _, _, add = _piece_loss(head, piece, z_loss)
        return jax.tree.map(jnp.add, sums, add), None

    sums, _ = jax.lax.scan(step, _zero_sums(), _split(chunk, hidden_BTD, targets_BT, weights_BT))
    return sums


def _forward(chunk, z_loss, spread, hidden_BTD, head_DW, targets_BT, weights_BT):
    """As `_loss`, and keeps the gradients of the sum: d_hidden, d_head (float32) and the loss of each token."""
    head = sharding.gather(head_DW.astype(hidden_BTD.dtype), spread, dim=0)

    def step(carry, piece):
        sums, d_head_DW = carry
        logits, lse, onehot, token_loss, add = _piece_loss(head, piece, z_loss)
        hidden, _, weights = piece
        d_lse = (weights * (1.0 + 2.0 * z_loss * lse))[..., None]
        d_logits = jnp.exp(logits - lse[..., None]) * d_lse - jnp.where(onehot, weights[..., None], 0.0)
        d_logits = d_logits.astype(hidden.dtype)
        d_hidden = jnp.einsum("bcw,dw->bcd", d_logits, head, preferred_element_type=jnp.float32)
        d_head_DW += jnp.einsum("bcd,bcw->dw", hidden, d_logits, preferred_element_type=jnp.float32)
        return (jax.tree.map(jnp.add, sums, add), d_head_DW), (d_hidden.astype(hidden.dtype), token_loss)

    carry = (_zero_sums(), jnp.zeros(head.shape, jnp.float32))
    pieces = _split(chunk, hidden_BTD, targets_BT, weights_BT)
    (sums, d_head_DW), (d_hidden, token_loss) = jax.lax.scan(step, carry, pieces)
    length, d_head_DW = targets_BT.shape[1], sharding.scatter(d_head_DW, spread, dim=0)
    # Nothing wants the head's gradient before the optimizer does, but until it is scattered all of it is kept: so it is
    # scattered before the layers' backward pass begins.
    d_hidden, d_head_DW = jax.lax.optimization_barrier((_join(d_hidden, length), d_head_DW.astype(head_DW.dtype)))
    return sums, (d_hidden, d_head_DW, _join(token_loss, length))


def _backward(chunk, z_loss, spread, saved, cotangent):
    # The loss of a token is a sum over the parts of the vocabulary: each part's cotangent is all of them together.
    d_loss = sharding.total(cotangent[0], "tensor")
    d_hidden_BTD, d_head_DW, token_loss_BT = saved

    def scale(x):
        return (d_loss * x).astype(x.dtype)

    return scale(d_hidden_BTD), scale(d_head_DW), None, scale(token_loss_BT)


_loss.defvjp(_forward, _backward)


def _piece_loss(head_DW, piece, z_loss):
    """Float32 logits of one chunk, their logsumexp, the one-hot target, the loss of each token, and the sums."""
    hidden_BCD, targets_BC, weights_BC = piece
    logits_BCW = jnp.einsum("bcd,dw->bcw", hidden_BCD, head_DW, preferred_element_type=jnp.float32)
    lse_BC = _logsumexp(logits_BCW)
    onehot_BCW = _first(logits_BCW) + jnp.arange(head_DW.shape[1]) == targets_BC[..., None]
    target_logit_BC = sharding.total(jnp.sum(jnp.where(onehot_BCW, logits_BCW, 0.0), axis=-1), "tensor")
    nats_BC = lse_BC - target_logit_BC
    token_loss_BC = nats_BC + z_loss * lse_BC**2
    stats = LossStats(
        nats=jnp.sum(weights_BC * nats_BC),
        weight=jnp.sum(weights_BC),
        correct=jnp.sum(weights_BC * (_best(logits_BCW) == targets_BC)),
        z_square=jnp.sum(weights_BC * lse_BC**2),
    )
    return logits_BCW, lse_BC, onehot_BCW, token_loss_BC, (jnp.sum(weights_BC * token_loss_BC), stats)


def _first(logits_BCW):
    """The number of the first token of this device's part of the vocabulary."""
    return sharding.index("tensor") * logits_BCW.shape[-1]


def _logsumexp(logits_BCW):
    """Over the whole vocabulary."""
    if sharding.size("tensor") == 1:
        return jax.nn.logsumexp(logits_BCW, axis=-1)
    peak_BC = sharding.largest(logits_BCW.max(axis=-1), "tensor")
    return peak_BC + jnp.log(sharding.total(jnp.exp(logits_BCW - peak_BC[..., None]).sum(axis=-1), "tensor"))


def _best(logits_BCW):
    """The first token of the whole vocabulary with the largest logit."""
    if sharding.size("tensor") == 1:
        return jnp.argmax(logits_BCW, axis=-1).astype(jnp.int32)
    best_BC = (_first(logits_BCW) + jnp.argmax(logits_BCW, axis=-1)).astype(jnp.int32)
    peak_BC = logits_BCW.max(axis=-1)
    is_best = peak_BC == sharding.largest(peak_BC, "tensor")
    return sharding.smallest(jnp.where(is_best, best_BC, jnp.iinfo(jnp.int32).max), "tensor")


def _zero_sums():
    zero = jnp.zeros((), jnp.float32)
    return zero, LossStats(zero, zero, zero, zero)


def _split(chunk, *arrays):
    """[B, T, ...] to [T / chunk, B, chunk, ...]; the end is padded with zeros, which for weights means left out."""

    def cut(x):
        batch, length = x.shape[:2]
        count = -(-length // chunk)
        x = jnp.pad(x, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, count, chunk, *x.shape[2:]), 1, 0)

    return tuple(cut(x) for x in arrays)


def _join(pieces, length):
    """Inverse of `_split`."""
    count, batch, chunk = pieces.shape[:3]
    return jnp.moveaxis(pieces, 0, 1).reshape(batch, count * chunk, *pieces.shape[3:])[:, :length]
