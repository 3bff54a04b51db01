"""What a layer keeps for its backward pass: which tensors, where they lie, and in how many bits.

A layer's tensors are marked by name where they are made (:func:`mark`). The policy says which of them are kept, and the
rest is computed again. What is kept passes through :func:`remembered`, the only place where it is moved or quantized:
the forward pass never sees it.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from k3jax import config as c

BLOCK = 128
FP8_MAX = 448.0
# Below this a scale would underflow; a block that small, or all zero, is stored as zeros.
_SMALLEST = 1e-30


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=["dtype"])
@dataclass(frozen=True)
class Quantized:
    """An array in blocks of 128 along its last axis, the last one possibly shorter.

    values: float8_e4m3fn, in the array's shape. scale: [..., blocks] float32. dtype: the array's own.
    """

    values: Array
    scale: Array
    dtype: jnp.dtype


def quantize(x: Array) -> Quantized:
    """Block-wise FP8 (K3 report, section 5.2.2): the largest magnitude of a block becomes 448, the largest e4m3fn.

    Ratios are float32 and clipped before the cast, which makes NaN of anything larger than 448. A block with a value
    that is not finite comes back as NaN.
    """
    width = x.shape[-1]
    blocks = -(-width // BLOCK)
    x32 = x.astype(jnp.float32)
    padded = jnp.pad(jnp.abs(x32), [(0, 0)] * (x.ndim - 1) + [(0, blocks * BLOCK - width)])
    largest = padded.reshape(*x.shape[:-1], blocks, BLOCK).max(axis=-1)
    scale = jnp.maximum(largest, _SMALLEST) / FP8_MAX
    ratio = jnp.clip(x32 / _spread(scale, width), -FP8_MAX, FP8_MAX)
    return Quantized(ratio.astype(jnp.float8_e4m3fn), scale, x.dtype)


def dequantize(x: Quantized) -> Array:
    """The array that :func:`quantize` stored: each value to within 1/16 of itself or 2^-10 of its block's scale."""
    return (x.values.astype(jnp.float32) * _spread(x.scale, x.values.shape[-1])).astype(x.dtype)


def _spread(scale: Array, width: int) -> Array:
    return jnp.repeat(scale, BLOCK, axis=-1)[..., :width]


def mark[X](x: X, name: c.Activation) -> X:
    """The array or arrays ``x``, under a name that a policy can keep."""
    return checkpoint_name(x, name)


def checkpointed(policy: c.RematPolicy, fn):
    """``fn`` with what ``jax.checkpoint`` has to know of a policy: what is kept. ``none`` keeps all that autodiff asks
    for, ``dots`` the products with weights, ``full`` nothing but the arguments."""
    match policy:
        case "none":
            return fn
        case "dots":
            return jax.checkpoint(fn, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        case "full":
            return jax.checkpoint(fn)
        case c.Save(names):
            return jax.checkpoint(fn, policy=jax.checkpoint_policies.save_only_these_names(*names))


def remembered(policy: c.RematPolicy, layer_fn):
    """``layer_fn(running, sources, rest) -> out`` as ``f(running, sources, rest, final) -> (out, final)``, which keeps
    for its backward pass what the policy says, and never ``sources``.

    Autodiff would save the buffer of depth sources once per layer. But slots are written once, so every layer can read
    the final buffer and count fewer of its slots. It arrives through ``final``: on the way forward any array like
    ``sources``, on the way back, where its cotangent would be, the final buffer (:func:`end` puts it there). So
    ``final`` has to pass from layer to layer, and nothing else may use it.
    """
    fn = checkpointed(policy, layer_fn)

    @jax.custom_vjp
    def call(running, sources, rest, final):
        return fn(running, sources, rest), final

    def forward(running, sources, rest, final):
        out, pull = jax.vjp(fn, running, sources, rest)
        given = {id(x) for x in jax.tree.leaves(rest)}
        if not _moves_input(policy):
            given.add(id(running))

        def keep(x):
            if x is sources:
                return None
            constant = not isinstance(x, jax.core.Tracer)
            return x if constant or id(x) in given else _store(policy, x)

        return (out, final), jax.tree.map(keep, pull)

    def backward(kept, cotangents):
        dout, sources = cotangents

        def bring(x):
            return sources if x is None else _load(x)

        pull = jax.tree.map(bring, kept, is_leaf=lambda x: x is None or isinstance(x, Quantized))
        return *pull(dout), sources

    call.defvjp(forward, backward)
    return call


@jax.custom_vjp
def end(sources: Array, final: Array) -> Array:
    """``sources`` after the last layer; its value goes back through ``final`` (see :func:`remembered`)."""
    return sources


end.defvjp(lambda sources, final: (sources, sources), lambda sources, cotangent: (cotangent, sources))


def _moves_input(policy: c.RematPolicy) -> bool:
    return isinstance(policy, c.Save) and "layer_input" in policy.names


def _store(policy: c.RematPolicy, x: Array) -> Array | Quantized:
    """A kept array where and how the policy wants it; integers, which are few, stay as they are."""
    if not isinstance(policy, c.Save) or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    stored = quantize(x) if policy.storage in ("fp8", "fp8_host") else x
    return jax.device_put(stored, jax.memory.Space.Host) if policy.storage in ("host", "fp8_host") else stored


def _load(x: Array | Quantized) -> Array:
    """A stored array in device memory and in its own dtype."""
    if jax.typeof(jax.tree.leaves(x)[0]).memory_space == jax.memory.Space.Host:
        x = jax.device_put(x, jax.memory.Space.Device)
    return dequantize(x) if isinstance(x, Quantized) else x
