"""Rows of the token embedding, for tokens on devices that hold neither all rows nor all of a row."""

import jax.numpy as jnp
from jax import Array

from k3jax import sharding


def lookup(table_WD: Array, tokens_BT: Array, dtype) -> Array:
    """[B, T, D] in ``dtype``: the row of every token.

    On a mesh the table stays where it is. Tokens, which are small, go to the devices that hold other columns of the
    same rows; one all-to-all brings the columns back, and one reduce-scatter adds up the parts of the vocabulary.
    """
    if not sharding.active():
        return jnp.take(table_WD, tokens_BT, axis=0).astype(dtype)
    spread = sharding.spread_of(table_WD, 1)

    def local(table, tokens):
        tokens = sharding.part(sharding.gather(tokens, spread, dim=0), "context", dim=1)
        rows = tokens - sharding.index("tensor") * len(table)
        rows = jnp.where((rows >= 0) & (rows < len(table)), rows, len(table))
        x = jnp.take(table, rows, axis=0, mode="fill", fill_value=0).astype(dtype)
        return sharding.scatter(sharding.exchange(x, spread, cut=0, join=2), "tensor", dim=1)

    return sharding.island(local, sharding.TOKENS)(table_WD, tokens_BT)
