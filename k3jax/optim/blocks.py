"""Cutting parameters into the matrices that Muon orthogonalizes, and putting them back."""

import dataclasses
import math

import jax

from k3jax.config_optim import Heads
from k3jax.roles import ParamMeta, Role


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """How one array is a stack of `count` matrices of shape [short, long].

    A block is the first axis that is not a batch axis against all the others merged, turned so that it has no more rows
    than columns: the Gram matrix of Newton-Schulz is then the smaller one.
    """

    permutation: tuple[int, ...]
    permuted_shape: tuple[int, ...]
    batch: int  # how many leading axes, once permuted, are batch axes
    count: int
    short: int
    long: int

    def split(self, x: jax.Array) -> jax.Array:
        """[...] -> [count, short, long]."""
        return x.transpose(self.permutation).reshape(self.count, self.short, self.long)

    def merge(self, blocks: jax.Array) -> jax.Array:
        """[count, short, long] -> [...], the inverse of `split`."""
        inverse = sorted(range(len(self.permutation)), key=self.permutation.__getitem__)
        return blocks.reshape(self.permuted_shape).transpose(inverse)


def block_layout(meta: ParamMeta, shape: tuple[int, ...], *, heads: Heads = "split") -> BlockLayout:
    """The blocks of an array: leading layer axes are batch axes, and the axis named by its role.

    Args:
      meta: role and axes, one of the roles of matrices.
      shape: of the array, with the leading layer axes that `meta.axes` leaves out.
      heads: 'merged' does not treat the heads of a HEADS parameter as a batch.
    """
    lead = len(shape) - len(meta.axes)
    batch_axis = None if meta.role is Role.HEADS and heads == "merged" else meta.role.batch_axis
    named = [(lead + i, name) for i, name in enumerate(meta.axes)]
    batch = (*range(lead), *(i for i, name in named if name == batch_axis))
    first, *others = (i for i, name in named if name != batch_axis)
    rows, cols = shape[first], math.prod(shape[i] for i in others)
    permutation = (*batch, first, *others) if rows <= cols else (*batch, *others, first)
    return BlockLayout(
        permutation=permutation,
        permuted_shape=tuple(shape[i] for i in permutation),
        batch=len(batch),
        count=math.prod(shape[i] for i in batch),
        short=min(rows, cols),
        long=max(rows, cols),
    )
