"""Mixture of experts: router, dropless expert computation, and the Stable LatentMoE around them.

K3 report (arXiv 2607.24653), section 2.3, eq. 11; LatentMoE is arXiv 2601.18089.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from k3jax import config as c
from k3jax import grouped, nn, sharding
from k3jax.config_layout import ALONE
from k3jax.model import balancing
from k3jax.model.ffn import GatedFFN, gated
from k3jax.model.memory import mark
from k3jax.parallel import experts
from k3jax.parallel.transport import Transport
from k3jax.roles import Role


class Routing(NamedTuple):
    """Where each token goes.

    experts: [N, A] int32. weights: [N, A] float32, with a gradient. scores: [N, E] float32 without bias.
    top: [N, A + 1] float32 biased scores, largest first.
    """

    experts: Array
    weights: Array
    scores: Array
    top: Array


def route(x_ND: Array, router_DE: Array, bias_E: Array, active: int, scale: float) -> Routing:
    """Sigmoid scores; the ``active`` largest with the bias; weights are the chosen scores, normalized, without it.

    All float32 at the highest matmul precision: lower precision flips experts that are nearly tied.
    """
    logits = jnp.einsum(
        "nd,de->ne", x_ND.astype(jnp.float32), router_DE.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    scores = jax.nn.sigmoid(logits)
    top, experts = jax.lax.top_k(jax.lax.stop_gradient(scores) + bias_E, active + 1)
    experts = mark(experts[:, :active], "routing")
    chosen = jnp.take_along_axis(scores, experts, axis=1)
    weights = scale * chosen / (chosen.sum(axis=-1, keepdims=True) + 1e-20)
    return Routing(experts, weights, scores, top)


def expert_mix(z_NL: Array, routing: Routing, gate_ELF, up_ELF, down_ELF, activation) -> Array:
    """``sum_a p_a E_a(z)`` for every token, dropless: [N, L] in z's dtype, products and sum in float32.

    Tokens are sorted by expert and go through grouped matmuls (:mod:`k3jax.grouped`), on CPU in blocks of rows that
    belong to one expert each.
    """
    gate, up, down = (w.astype(z_NL.dtype) for w in (gate_ELF, up_ELF, down_ELF))
    args = (z_NL, routing.experts, gate, up, down)
    y_NAL = jax.lax.platform_dependent(
        *args,
        cpu=lambda *a: grouped.blocked(*a, activation=activation),
        default=lambda *a: grouped.ragged(*a, activation=activation),
    )
    mixed = jnp.einsum("nal,na->nl", y_NAL.astype(jnp.float32), routing.weights, precision=jax.lax.Precision.HIGHEST)
    return mixed.astype(z_NL.dtype)


def dense_expert_mix(z_NL: Array, routing: Routing, gate_ELF, up_ELF, down_ELF, activation) -> Array:
    """The reference: every expert computes every token, and unchosen outputs count zero."""
    combine_NE = (jax.nn.one_hot(routing.experts, gate_ELF.shape[0]) * routing.weights[..., None]).sum(axis=1)
    g = jnp.einsum("nl,elf->nef", z_NL, gate_ELF)
    u = jnp.einsum("nl,elf->nef", z_NL, up_ELF)
    return jnp.einsum("nef,elf,ne->nl", gated(activation, g, u), down_ELF, combine_NE)


class MoELayer(nnx.Module):
    """Router, routed experts (in a latent or at full width) and shared experts."""

    def __init__(self, model: c.ModelConfig):
        spec, normal = model.moe, nn.Normal(model.init_std)
        D, E, F = model.dim, spec.experts, spec.width
        L = spec.latent.dim if spec.latent else D
        self.router = nn.param("router", (D, E), role=Role.ROUTER, axes=("embed", "router"), init=nn.Uniform(D**-0.5))
        self.bias = nn.State(jnp.zeros((E,), jnp.float32))
        if spec.latent:
            latent = ("embed", "latent")
            self.latent_down = nn.param("latent_down", (D, L), role=Role.MATRIX, axes=latent, init=normal)
            self.latent_up = nn.param("latent_up", (D, L), role=Role.MATRIX, axes=latent, init=normal)
            if spec.latent.norm:
                self.latent_norm = nn.norm_weight("latent_norm", L, "width")
        experts = ("experts", "expert_in", "expert_ff")
        for name in ("gate", "up", "down"):
            setattr(self, name, nn.param(name, (E, L, F), role=Role.EXPERTS, axes=experts, init=normal))
        if spec.shared:
            self.shared = GatedFFN(model, spec.shared * F)

    def __call__(
        self,
        model: c.ModelConfig,
        x_BTD: Array,
        valid_BT: Array,
        *,
        observe: bool,
        transport: Transport = ALONE.transport,
    ) -> tuple[Array, balancing.Observation | None]:
        """[B, T, D] to [B, T, D]; with ``observe``, what the balancer needs to know of the batch, on a mesh as parts
        of sums (:func:`k3jax.sharding.partial`). ``transport``: how tokens come to experts on other devices."""
        weights = {name: value for name, value in vars(self).items() if isinstance(value, nnx.Variable)}
        local = partial(_experts, model=model, observe=observe, transport=transport)
        out = sharding.TOKENS, balancing.observation_specs(model.moe.balancer) if observe else None
        shared = self.shared(model, x_BTD) if model.moe.shared else None
        return nn.on_shards(local, weights, x_BTD, valid_BT, shared, dtype=x_BTD.dtype, out=out)


def _experts(w, x_BTD, valid_BT, shared_BTD, *, model, observe, transport):
    """The routed experts and what the shared ones gave, and what the balancer needs. On a mesh a device has its own
    tokens and its own experts."""
    spec = model.moe
    with jax.named_scope("moe_route"):
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        routing = route(x_ND, w["router"][...], w["bias"][...], spec.active, spec.scale)
    with jax.named_scope("moe_experts"):
        z = nn.einsum("nd,dl->nl", x_ND, w["latent_down"][...]) if spec.latent else x_ND
        args = mark(z, "dispatch"), routing, *(w[name][...] for name in ("gate", "up", "down")), model.activation
        if sharding.size("expert") > 1:
            u, shared_BTD = experts.expert_mix(*args, axis="expert", transport=transport, beside=shared_BTD)
        else:
            u = expert_mix(*args)
        if spec.latent:
            u = nn.rms_norm(u, w["latent_norm"][...], model.eps) if spec.latent.norm else u
            u = nn.einsum("nl,dl->nd", u, w["latent_up"][...])
    y = u.reshape(x_BTD.shape)
    y = y if shared_BTD is None else y + shared_BTD
    if not observe:
        return y, None
    with jax.named_scope("moe_balance"):
        seen = balancing.observe(
            spec.balancer, routing.scores, w["bias"][...], routing.experts, routing.top, valid_BT.reshape(-1)
        )
    return y, seen
