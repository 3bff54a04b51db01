"""Attention Residuals: every sub-layer reads a learned mixture over depth in place of the running sum.

K3 report (arXiv 2607.24653), section 2.2; Attention Residuals (arXiv 2603.15031).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from k3jax import config as c
from k3jax import nn, sharding
from k3jax.roles import Role
from pallas_kernels import depth_mix, target


class Stream(NamedTuple):
    """What flows between sub-layers.

    running: [B, T, D] sum of the sub-layer outputs since the last block was closed (the hidden state when there is no
      depth mixture).
    sources: [S, B, T, D] closed blocks, the embedding first; slots from ``count`` on do not count, whatever they hold.
      A slot is written once, and never inside a layer (:func:`open_block`, :func:`settle`), so that what every layer
      reads is the final buffer with fewer slots in it (:func:`k3jax.model.memory.remembered`).
    count: [] int32.
    closed: [B, T, D], a block closed inside a layer, last in the count and not yet in its slot; None between layers.
    """

    running: Array
    sources: Array
    count: Array
    closed: Array | None = None


def source_slots(residual: c.Residual, layers: int) -> int:
    """How many closed blocks a model of ``layers`` layers stores."""
    match residual:
        case c.PlainResidual():
            return 0
        case c.BlockAttnRes(block=block):
            return -(-layers // block)
        case c.FullAttnRes():
            return 2 * layers


def closes_block(residual: c.Residual, layer: int) -> bool:
    """Whether the running sum is stored and cleared at the attention sub-layer of ``layer`` (counted from 0)."""
    match residual:
        case c.PlainResidual():
            return False
        case c.BlockAttnRes(block=block):
            return layer % block == 0
        case c.FullAttnRes():
            return True


def start(residual: c.Residual, layers: int, x_BTD: Array) -> Stream:
    """The stream before the first layer: the embedding is the running sum."""
    shape = source_slots(residual, layers), *x_BTD.shape
    sources = jnp.zeros(shape, x_BTD.dtype, out_sharding=sharding.out_sharding(sharding.SOURCES))
    return Stream(x_BTD, sources, jnp.zeros((), jnp.int32))


class DepthMix(nnx.Module):
    """One mixing site: a norm gain and a pseudo-query, which starts at zero so that every source weighs the same."""

    def __init__(self, model: c.ModelConfig):
        init = nn.ZEROS if isinstance(model.residual.query, c.ZeroQuery) else nn.Normal(model.residual.query.std)
        if isinstance(model.residual.keys, c.KeyNorm):
            self.norm = nn.norm_weight("norm", model.dim, "width")
        self.query = nn.param("query", (model.dim,), role=Role.VECTOR, axes=("width",), init=init)

    def __call__(self, model: c.ModelConfig, stream: Stream) -> Array:
        """[B, T, D]: what the sub-layer at this site reads. On a mesh an island, for a kernel takes local arrays."""
        with jax.named_scope("depth_mix"):
            eps, u_D = self._scoring(model)
            return sharding.island(partial(mix, eps), sharding.TOKENS)(stream, u_D)

    def weights(self, model: c.ModelConfig, stream: Stream, valid_BT: Array) -> Array:
        """[S + 1] float32: the weight of every source, summed over tokens outside of padding, the running sum last.
        Without a gradient. The sum over sources is the number of tokens. On a mesh it comes in parts
        (:func:`k3jax.sharding.partial`).
        """

        def local(eps, stream, u_D, valid_BT):
            scores_SBT, _ = _scores(eps, stream, u_D)
            return sharding.partial(jnp.where(valid_BT, jax.nn.softmax(scores_SBT, axis=0), 0).sum(axis=(1, 2)))

        with jax.named_scope("depth_weights"):
            eps, u_D = self._scoring(model)
            seen = jax.lax.stop_gradient((stream, u_D))
            return sharding.island(partial(local, eps), sharding.PARTIAL)(*seen, valid_BT)

    def _scoring(self, model):
        """The eps of the sources' norm (None for no norm), and the pseudo-query with the norm's gain folded in."""
        if isinstance(model.residual.keys, c.NoKeyNorm):
            return None, self.query[...]
        return model.eps, self.norm[...] * self.query[...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def mix(eps: float | None, stream: Stream, u_D: Array) -> Array:
    """``sum_i softmax_i(u . RMSNorm(v_i)) v_i`` over the closed blocks and the running sum.

    arXiv 2603.15031, section 3, with the norm's gain folded into the pseudo-query u. Without ``eps`` there is no norm,
    an ablation of the same paper. Scores, softmax and weighted sum are float32; the result has the stream's dtype. The
    values are the sources as they are, without the norm. The backward pass keeps the stream and recomputes the weights,
    so that a site saves no more than a plain residual would.

    A program lowered for TPU takes the kernels of :mod:`pallas_kernels.depth_mix` where they take the shapes.
    """
    return _run(depth_mix.forward, _mix_plain, eps, *_arrays(stream, u_D))


def describe(sources_SBTD, *, platform: str) -> target.Choice:
    """What :func:`mix` runs for these sources (or their jax.ShapeDtypeStruct) on "cpu", "gpu" or "tpu", and why."""
    return target.describe(depth_mix.missing_support(sources_SBTD), platform=platform)


def _arrays(stream, u_D):
    return stream.running, stream.sources, stream.count, u_D


def _run(kernel, plain, eps, *arrays):
    sources = arrays[1]
    missing = depth_mix.missing_support(sources) or ("sources are scored without a norm" if eps is None else "")
    title = f"{kernel.__name__} of the depth mixture of {sources.shape}"
    return target.run(partial(kernel, eps=eps), partial(plain, eps), *arrays, title=title, missing=missing)


def _mix_plain(eps, running_BTD, sources_SBTD, count, u_D):
    stream = Stream(running_BTD, sources_SBTD, count)
    scores_SBT, _ = _scores(eps, stream, u_D)
    weights_SBT = jax.nn.softmax(scores_SBT, axis=0)
    mixed = jnp.sum(weights_SBT[:-1, ..., None] * stream.sources.astype(jnp.float32), axis=0)
    mixed += weights_SBT[-1, ..., None] * stream.running.astype(jnp.float32)
    return mixed.astype(stream.running.dtype)


def _scores(eps: float | None, stream: Stream, u_D: Array) -> tuple[Array, Array]:
    """Scores of the sources, -inf for slots not filled, and the inverse RMS of each, 1 without a norm; the running sum
    comes last."""

    def of(v):
        v = v.astype(jnp.float32)
        inverse = jnp.ones_like(v[..., 0]) if eps is None else jax.lax.rsqrt(jnp.mean(jnp.square(v), axis=-1) + eps)
        return jnp.einsum("...d,d->...", v, u_D, precision=jax.lax.Precision.HIGHEST) * inverse, inverse

    (scores, inverses), (last_score, last_inverse) = of(stream.sources), of(stream.running)
    filled_S = jnp.arange(stream.sources.shape[0]) < stream.count
    scores = jnp.where(filled_S[:, None, None], scores, -jnp.inf)
    return jnp.concatenate([scores, last_score[None]]), jnp.concatenate([inverses, last_inverse[None]])


def _mix_fwd(eps, stream, u_D):
    return mix(eps, stream, u_D), (stream._replace(closed=None), u_D)


def _mix_bwd(eps, saved, dh_BTD):
    drunning, dsources, du = _run(depth_mix.backward, _gradients_plain, eps, *_arrays(*saved), dh_BTD)
    return Stream(drunning, dsources, None), du


def _gradients_plain(eps, running_BTD, sources_SBTD, count, u_D, dh_BTD):
    """With score_i = r_i u.v_i:

    ``dscore_i = w_i (dh.v_i - dh.h)`` and ``dv_i = w_i dh + dscore_i r_i (u - score_i r_i v_i / D)``.
    """
    stream = Stream(running_BTD, sources_SBTD, count)
    dh = dh_BTD.astype(jnp.float32)
    scores, inverses = _scores(eps, stream, u_D)
    weights = jax.nn.softmax(scores, axis=0)

    def against_output(v):
        return jnp.sum(v.astype(jnp.float32) * dh, axis=-1)

    projected = jnp.concatenate([against_output(stream.sources), against_output(stream.running)[None]])
    dscores = weights * (projected - jnp.sum(weights * projected, axis=0))
    along_u = dscores * inverses
    along_v = 0 * along_u if eps is None else along_u * jnp.where(weights > 0, scores, 0) * inverses / u_D.shape[0]

    def of(v, weight, along_u, along_v):
        v32 = v.astype(jnp.float32)
        dv = weight[..., None] * dh + along_u[..., None] * u_D - along_v[..., None] * v32
        du = jnp.einsum("...,...d->d", along_u, v32, precision=jax.lax.Precision.HIGHEST)
        return dv.astype(v.dtype), du

    dsources, du = of(stream.sources, weights[:-1], along_u[:-1], along_v[:-1])
    drunning, du_last = of(stream.running, weights[-1], along_u[-1], along_v[-1])
    return drunning, dsources, du + du_last


mix.defvjp(_mix_fwd, _mix_bwd)


def open_block(stream: Stream, starts: bool | Array) -> Stream:
    """Before a layer: copies the running sum into the next slot if the layer starts a depth block. It counts from
    :func:`add` on.

    The update is a slice under a condition: a broadcast ``where`` would save a mask of the whole buffer.
    """
    if starts is False:
        return stream

    def store(sources):
        return jax.lax.dynamic_update_index_in_dim(sources, stream.running, stream.count, axis=0)

    if starts is True:
        return stream._replace(sources=store(stream.sources))
    return stream._replace(sources=jax.lax.cond(starts, store, lambda sources: sources, stream.sources))


def add(stream: Stream, out_BTD: Array, *, close: bool | Array = False) -> Stream:
    """Adds a sub-layer's output; with ``close``, counts the running sum as a source and restarts from ``out``."""
    if close is False:
        return stream._replace(running=stream.running + out_BTD)
    if close is True:
        return Stream(out_BTD, stream.sources, stream.count + 1, closed=stream.running)
    keep = jnp.where(close, 0, 1).astype(stream.running.dtype)
    count = stream.count + close.astype(jnp.int32)
    return stream._replace(running=keep * stream.running + out_BTD, count=count)


def settle(stream: Stream) -> Stream:
    """After a layer: writes the block that was closed inside it into its slot."""
    if stream.closed is None:
        return stream
    sources = jax.lax.dynamic_update_index_in_dim(stream.sources, stream.closed, stream.count - 1, axis=0)
    return Stream(stream.running, sources, stream.count)
