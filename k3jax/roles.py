"""What each parameter is: its role and logical axes decide how it is optimized, quantized and sharded."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, Literal

import jax

Group = Literal["matrices", "router", "rest"]


class Role(enum.Enum):
    """The part a parameter plays. The rank of an array never decides anything; its role does.

    | role        | parameters                                                 | group    | block      | decay |
    | ----------- | ---------------------------------------------------------- | -------- | ---------- | ----- |
    | MATRIX      | down-projections, out, gates, latent, shared and dense FFN | matrices | whole      | yes   |
    | HEADS       | KDA q, k, v; MLA q, q_up, k_up, v_up                       | matrices | per head   | yes   |
    | EXPERTS     | routed gate, up, down                                      | matrices | per expert | yes   |
    | ROUTER      | router weight                                              | router   | whole      | yes   |
    | EMBEDDING   | token embedding                                            | rest     | -          | yes   |
    | UNEMBEDDING | output head                                                | rest     | -          | yes   |
    | CONV        | depthwise short-convolution taps                           | rest     | -          | yes   |
    | NORM        | RMSNorm gains                                              | rest     | -          | no    |
    | VECTOR      | A_log, dt_bias, AttnRes pseudo-queries, other vectors      | rest     | -          | no    |

    A block is what Muon orthogonalizes on its own. Kimi K3 (arXiv 2607.24653, 3.3) names per-head blocks for Q, K and V
    only, so the output projection and the gates stay whole. Embedding and head go to AdamW, as in Moonlight
    (arXiv 2502.16982): their rows are looked up or scored one token at a time, so one rotation of the whole table has
    no meaning, and rare rows would get full-size updates. They are decayed, because K3 decays by 0.1 throughout and
    nothing else bounds an untied embedding. Gains and vectors are not: pulling a gain, a decay rate (A_log, dt_bias) or
    a depth query towards zero changes what the layer computes rather than how large its weights are.
    """

    EMBEDDING = "embedding"
    UNEMBEDDING = "unembedding"
    NORM = "norm"
    VECTOR = "vector"
    CONV = "conv"
    ROUTER = "router"
    MATRIX = "matrix"
    HEADS = "heads"
    EXPERTS = "experts"

    @property
    def group(self) -> Group:
        """The optimizer group: `Optimizer.matrices`, `Optimizer.router` or `Optimizer.rest`."""
        if self in (Role.MATRIX, Role.HEADS, Role.EXPERTS):
            return "matrices"
        return "router" if self is Role.ROUTER else "rest"

    @property
    def decayed(self) -> bool:
        """Whether weight decay applies."""
        return self not in (Role.NORM, Role.VECTOR)

    @property
    def batch_axis(self) -> str | None:
        """The logical axis along which an array of this role is a stack of separate matrices."""
        return {Role.HEADS: "heads", Role.EXPERTS: "experts"}.get(self)


@dataclasses.dataclass(frozen=True)
class ParamMeta:
    """Role and logical axis names of one parameter; a pytree leaf.

    `axes` leaves out the leading layer axes that stacked parameters carry, so an array has `ndim - len(axes)` of them.

    Raises:
      TypeError: role is not a Role, or axes is not a tuple of names.
      ValueError: the role is one of matrices, and the axes leave fewer than two to form one, or lack its batch axis.
    """

    role: Role
    axes: tuple[str, ...]

    def __post_init__(self):
        if not isinstance(self.role, Role):
            raise TypeError(f"role must be a Role, got {self.role!r}")
        if not isinstance(self.axes, tuple) or not all(isinstance(name, str) for name in self.axes):
            raise TypeError(f"axes must be a tuple of axis names, got {self.axes!r}")
        batch_axis = self.role.batch_axis
        if batch_axis is not None and self.axes.count(batch_axis) != 1:
            raise ValueError(f"{self.role} needs exactly one axis named {batch_axis!r}, got axes {self.axes}")
        matrix_axes = [name for name in self.axes if name != batch_axis]
        if self.role.group != "rest" and len(matrix_axes) < 2:
            raise ValueError(f"{self.role} needs two axes that form a matrix, got axes {self.axes}")


def path_name(path: tuple) -> str:
    """A tree path as text, for example 'kda/q'."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def meta_by_path(meta: Any) -> dict[str, ParamMeta]:
    """Flattens a tree of ParamMeta to {path: ParamMeta}.

    Raises:
      ValueError: leaves are not ParamMeta; the message names their paths.
    """
    leaves = jax.tree_util.tree_leaves_with_path(meta, is_leaf=lambda node: node is None)
    metas = {path_name(path): leaf for path, leaf in leaves}
    missing = [name for name, leaf in metas.items() if not isinstance(leaf, ParamMeta)]
    if missing:
        raise ValueError(f"parameters without a role (a ParamMeta): {missing}")
    return metas


def meta_of(metas: Mapping[str, ParamMeta], path: tuple, ndim: int) -> ParamMeta:
    """The ParamMeta of the array at `path`.

    Raises:
      ValueError: the path is not in `metas`, or the array has fewer dimensions than its meta names.
    """
    name = path_name(path)
    if name not in metas:
        raise ValueError(f"parameters without a role: [{name!r}], not in the metadata")
    if ndim < len(metas[name].axes):
        raise ValueError(f"parameter {name!r} has {ndim} dimensions but its axes are {metas[name].axes}")
    return metas[name]
