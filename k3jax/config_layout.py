"""How a run lies on its devices: frozen dataclasses, where a variant is a type and not a flag.

None of it changes what is trained: every layout gives the loss and the gradients of one device.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from k3jax.config import require, require_positive
from k3jax.parallel.context import Contiguous, QueryOrder
from k3jax.parallel.transport import AllGather, Transport

_TRANSPORT, _ORDER = AllGather(), Contiguous()
MeshAxis = Literal["data", "fsdp", "expert", "context", "tensor", "pipeline"]


@dataclass(frozen=True)
class Layout:
    """The sizes of the mesh axes, and what travels between devices.

    Attributes:
      data: rows; parameters are the same on all of them.
      fsdp: rows; parameters are spread over them at rest, and gathered layer by layer.
      expert: rows, and the experts; the other parameters are spread over it too.
      context: time, in contiguous shards.
      tensor: heads, feed-forward widths and vocabulary; time between sub-layers.
      pipeline: reserved, 1.
      transport: how tokens come to their experts.
      mla: which device attends from which tokens.
      dense: the axes that the width of parameters outside of experts is spread over at rest, of 'fsdp' and 'expert'.
        With fewer of them more is kept and less is gathered from afar.
      optimizer: axes that the optimizer's state is spread over beyond the parameter it is of (ZeRO-1).
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    transport: Transport = _TRANSPORT
    mla: QueryOrder = _ORDER
    dense: tuple[MeshAxis, ...] = ("fsdp", "expert")
    optimizer: tuple[MeshAxis, ...] = ()

    def __post_init__(self):
        require_positive(self, "data", "fsdp", "expert", "context", "tensor", "pipeline")
        require(self.pipeline == 1, f"Layout.pipeline = {self.pipeline}, but that axis is reserved: it must be 1")
        self._check_axes("dense", ("fsdp", "expert"))
        self._check_axes("optimizer", ("data", "fsdp", "expert", "context"))

    def _check_axes(self, name: str, valid: tuple[MeshAxis, ...]) -> None:
        axes = getattr(self, name)
        wrong = [axis for axis in axes if axis not in valid or axes.count(axis) > 1]
        require(not wrong, f"Layout.{name} has {wrong}, but it may name each of {', '.join(valid)} once")

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along every mesh axis."""
        names = ("data", "fsdp", "expert", "context", "tensor", "pipeline")
        return {name: getattr(self, name) for name in names}

    @property
    def devices(self) -> int:
        product = 1
        for size in self.sizes.values():
            product *= size
        return product


ALONE = Layout()
"""The layout of one device."""

replace = dataclasses.replace
