"""Programs whose schedules are held to a budget: every KDA kernel, at shapes small enough to compile in seconds."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.kda.mosaic_tpu import kda_mosaic_tpu

T, H, WIDTH = 128, 2, 128


def kda_small():
    """Forward, and forward with backward, for both gates and with packed documents."""
    wide = jax.ShapeDtypeStruct((1, T, H, WIDTH), jnp.bfloat16)
    tokens = (wide, wide, wide, wide, jax.ShapeDtypeStruct((1, T, H), jnp.bfloat16))
    parameters = (jax.ShapeDtypeStruct((H,), jnp.float32), jax.ShapeDtypeStruct((H, WIDTH), jnp.float32))
    arguments = (*tokens, *parameters)
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
    return [
        ("forward", functools.partial(_forward, lower_bound=-5.0), arguments),
        ("gradients", functools.partial(_gradients, lower_bound=-5.0), (wide, *arguments)),
        ("gradients, unbounded", functools.partial(_gradients, lower_bound=None), (wide, *arguments)),
        ("gradients, packed", lambda ids, *x: _gradients(*x, lower_bound=-5.0, ids=ids), (ids, wide, *arguments)),
    ]


def _forward(*arguments, lower_bound, ids=None):
    static = dict(lower_bound=lower_bound, num_segments=None, chunk_size=64)
    return kda_mosaic_tpu(*arguments, None, ids, **static)[0]


def _gradients(do, *arguments, lower_bound, ids=None):
    o, pull = jax.vjp(functools.partial(_forward, lower_bound=lower_bound, ids=ids), *arguments)
    return o, pull(do)
