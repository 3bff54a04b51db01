"""Gated activations and the dense feed-forward layer."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from k3jax import config as c
from k3jax import nn, sharding
from k3jax.roles import Role


def gated(activation: c.SiTU | c.SwiGLU | c.ClampedSwiGLU, gate: Array, up: Array) -> Array:
    """The gated activation of two branches, float32 inside, in the dtype of ``gate``.

    SiTU: ``[b1 tanh(g/b1) sigmoid(g)] [b2 tanh(u/b2)]`` (K3 report, eq. 12): bounded by ``b1 b2``, and SwiGLU to first
    order at zero. The sigmoid sees the gate before the cap.
    """
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    match activation:
        case c.SiTU(beta, linear_beta):
            value = beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g) * linear_beta * jnp.tanh(u / linear_beta)
        case c.SwiGLU():
            value = jax.nn.silu(g) * u
        case c.ClampedSwiGLU(limit):
            value = jax.nn.silu(jnp.minimum(g, limit)) * jnp.clip(u, -limit, limit)
    return value.astype(gate.dtype)


class GatedFFN(nnx.Module):
    """``down(gated(gate x, up x))``: the dense layers, and the shared experts as one of their summed width."""

    def __init__(self, model: c.ModelConfig, width: int):
        shape, normal = (model.dim, width), nn.Normal(model.init_std)
        for name in ("gate", "up", "down"):
            setattr(self, name, nn.param(name, shape, role=Role.MATRIX, axes=("embed", "ff"), init=normal))

    def __call__(self, model: c.ModelConfig, x_BTD: Array) -> Array:
        """[B, T, D] to [B, T, D]."""
        local = partial(GatedFFN._local, model=model)
        return nn.on_shards(local, self, x_BTD, dtype=x_BTD.dtype, out=sharding.TOKENS)

    def _local(self, x_BTD, *, model):
        """On a mesh a device has its part of the width F, for all tokens of its context shard."""
        x_BTD = sharding.gather(x_BTD, "tensor", dim=1)
        with jax.named_scope("gated_ffn"):
            gate = nn.einsum("btd,df->btf", x_BTD, self.gate[...])
            up = nn.einsum("btd,df->btf", x_BTD, self.up[...])
            y = nn.einsum("btf,df->btd", gated(model.activation, gate, up), self.down[...])
        return sharding.scatter(y, "tensor", dim=1)
