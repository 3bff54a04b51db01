"""Attention Residuals: every sub-layer reads a learned mixture over depth in place of the running sum.

K3 report (arXiv 2607.24653), section 2.2; Attention Residuals (arXiv 2603.15031).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from k3jax import config as c
from k3jax import nn
from k3jax.roles import Role


class Stream(NamedTuple):
    """What flows between sub-layers.

    running: [B, T, D] sum of the sub-layer outputs since the last block was closed (the hidden state when there is no
      depth mixture).
    sources: [S, B, T, D] closed blocks, the embedding first; slots from ``count`` on are not filled yet.
    count: [] int32.
    """

    running: Array
    sources: Array
    count: Array


def source_slots(residual: c.Residual, layers: int) -> int:
    """How many closed blocks a model of ``layers`` layers stores."""
    match residual:
        case c.PlainResidual():
            return 0
        case c.BlockAttnRes(block):
            return -(-layers // block)
        case c.FullAttnRes():
            return 2 * layers


def closes_block(residual: c.Residual, layer: int) -> bool:
    """Whether the running sum is stored and cleared at the attention sub-layer of ``layer`` (counted from 0)."""
    match residual:
        case c.PlainResidual():
            return False
        case c.BlockAttnRes(block):
            return layer % block == 0
        case c.FullAttnRes():
            return True


def start(residual: c.Residual, layers: int, x_BTD: Array) -> Stream:
    """The stream before the first layer: the embedding is the running sum."""
    sources = jnp.zeros((source_slots(residual, layers), *x_BTD.shape), x_BTD.dtype)
    return Stream(x_BTD, sources, jnp.zeros((), jnp.int32))


class DepthMix(nnx.Module):
    """One mixing site: a norm gain and a pseudo-query, which starts at zero so that every source weighs the same."""

    def __init__(self, model: c.ModelConfig):
        self.norm = nn.norm_weight("norm", model.dim, "embed")
        self.query = nn.param("query", (model.dim,), role=Role.VECTOR, axes=("embed",), init=nn.ZEROS)

    def __call__(self, model: c.ModelConfig, stream: Stream) -> Array:
        """[B, T, D]: what the sub-layer at this site reads."""
        with jax.named_scope("depth_mix"):
            return jax.checkpoint(mix, static_argnums=(3,))(stream, self.norm[...], self.query[...], model.eps)


def mix(stream: Stream, norm_D: Array, query_D: Array, eps: float) -> Array:
    """``sum_i softmax_i(query . RMSNorm(v_i)) v_i`` over the closed blocks and the running sum.

    arXiv 2603.15031, section 3. Scores, softmax and weighted sum are float32; the result has the stream's dtype. The
    values are the sources as they are, without the norm. Callers rematerialize it, so that a site saves no more than
    a plain residual would.
    """
    u_D = norm_D * query_D

    def score(v):
        v = v.astype(jnp.float32)
        return jnp.sum(v * u_D, axis=-1) * jax.lax.rsqrt(jnp.mean(jnp.square(v), axis=-1) + eps)

    filled_S = jnp.arange(stream.sources.shape[0]) < stream.count
    scores_SBT = jnp.where(filled_S[:, None, None], score(stream.sources), -jnp.inf)
    weights_SBT = jax.nn.softmax(jnp.concatenate([scores_SBT, score(stream.running)[None]]), axis=0)
    mixed = jnp.sum(weights_SBT[:-1, ..., None] * stream.sources.astype(jnp.float32), axis=0)
    mixed += weights_SBT[-1][..., None] * stream.running.astype(jnp.float32)
    return mixed.astype(stream.running.dtype)


def add(stream: Stream, out_BTD: Array, *, close: bool | Array = False) -> Stream:
    """Adds a sub-layer's output; with ``close``, stores the running sum as a source first and restarts from ``out``.

    The update is a slice under a condition: a broadcast ``where`` would save a mask of the whole buffer.
    """
    if close is False:
        return stream._replace(running=stream.running + out_BTD)

    def store(sources):
        return jax.lax.dynamic_update_index_in_dim(sources, stream.running, stream.count, axis=0)

    if close is True:
        return Stream(out_BTD, store(stream.sources), stream.count + 1)
    sources = jax.lax.cond(close, store, lambda sources: sources, stream.sources)
    keep = jnp.where(close, 0, 1).astype(stream.running.dtype)
    return Stream(keep * stream.running + out_BTD, sources, stream.count + close.astype(jnp.int32))
