"""What the layers of a model keep for the backward pass; :mod:`k3jax.config` has these names too."""

from dataclasses import dataclass
from typing import Literal, get_args

from k3jax.config_checks import require, require_choice

Activation = Literal["layer_input", "projected", "states", "attended", "mixer_out", "routing", "dispatch"]
Storage = Literal["device", "host", "fp8", "fp8_host"]


@dataclass(frozen=True)
class Save:
    """Rematerialization that keeps the named tensors of a layer, in the named storage, and computes the rest again.

    names:
      layer_input: the running sum, which every policy keeps; naming it says where.
      projected: what the projections of a mixer give to its convolutions (KDA) or its attention (MLA).
      states: what the chunks of KDA start from, and their inverses.
      attended: the output of recurrence or attention, before gate and projection.
      mixer_out: the output of the mixer.
      routing: the chosen experts.
      dispatch: the input of the routed experts.
    storage: where and how. "host" is pinned memory of the host. "fp8" is block-wise FP8 (e4m3, 128 values a scale), for
      storage only and only of floating-point tensors. Integers stay in device memory as they are.
    """

    names: tuple[Activation, ...] = ("attended", "mixer_out", "routing", "dispatch")
    storage: Storage = "device"

    def __post_init__(self):
        require_choice(self, "storage", Storage)
        valid = ", ".join(get_args(Activation))
        wrong = [name for name in self.names if name not in get_args(Activation)]
        require(not wrong, f"Save.names has {wrong}, but they must be among {valid}")
        distinct = len(set(self.names)) == len(self.names) > 0
        require(distinct, f"Save.names = {self.names}, but it must be one or more of {valid}, each once")
        moved = self.storage == "host" or "layer_input" not in self.names
        require(
            moved,
            f"Save.names has 'layer_input' with storage {self.storage!r}, but it can only move to 'host': it stays on "
            "the device anyway, and a layer computed again from a rounded input has other gradients",
        )
        rounded = {"projected", "states"}.intersection(self.names) if self.storage.startswith("fp8") else ()
        require(
            not rounded,
            f"Save.names has {sorted(rounded)} with storage {self.storage!r}, but the recurrence amplifies rounding: "
            "gradients would be off by a tenth",
        )


Remat = Literal["none", "dots", "full"]
RematPolicy = Remat | Save
