"""The machines behind a topology, what each engine calls them, and which of them an engine can give."""

import math
from dataclasses import dataclass

from k3jax.config import ConfigError, require
from k3jax.plan import chips
from launch import values


@dataclass(frozen=True)
class Tpu:
    """Names of a TPU: GKE's node label, xpk's prefix of device types, SkyPilot's prefix of accelerators (empty: none)
    with what it counts per chip. most: chips of the largest slice."""

    gke: str
    xpk: str
    skypilot: str
    counted: int
    most: int


@dataclass(frozen=True)
class Gpu:
    """Names of a GPU, and how many of them a virtual machine can have."""

    gke: str
    skypilot: str
    per_host: tuple[int, ...] = (8,)


# Labels, device types and sizes as in xpk 1.16.0; accelerators as in SkyPilot 0.14.1.
TPUS = {
    "v4": Tpu("tpu-v4-podslice", "v4", "tpu-v4", 2, 4096),
    "v5e": Tpu("tpu-v5-lite-podslice", "v5litepod", "tpu-v5litepod", 1, 256),
    "v5p": Tpu("tpu-v5p-slice", "v5p", "tpu-v5p", 2, 8960),
    "v6e": Tpu("tpu-v6e-slice", "v6e", "tpu-v6e", 1, 256),
    "tpu7x": Tpu("tpu7x", "tpu7x", "", 2, 9216),
}
GPUS = {
    "h100": Gpu("nvidia-h100-80gb", "H100", (1, 2, 4, 8)),
    "h200": Gpu("nvidia-h200-141gb", "H200"),
    "b200": Gpu("nvidia-b200", "B200"),
}

FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
SMALL = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))


@dataclass(frozen=True)
class Machines:
    """A topology with what stands behind it. kind: of the device; shape: of one slice, or hosts x devices."""

    text: str
    kind: str
    shape: tuple[int, ...]
    cores: int

    @property
    def is_tpu(self) -> bool:
        return self.kind in TPUS

    @property
    def is_gpu(self) -> bool:
        return self.kind in GPUS

    @property
    def chips(self) -> int:
        """Of one slice, or of all hosts."""
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        return self.chips * self.cores

    @property
    def size(self) -> str:
        """``4x4x8``."""
        return "x".join(map(str, self.shape))

    def check_hosts(self, hosts: int, devices_per_host: int, slices: int) -> None:
        """Raises ConfigError where no machine has so many of these devices."""
        if not self.is_tpu:
            require(
                (hosts, devices_per_host) == self.shape,
                f"{self.text} is {self.shape[0]} hosts with {self.shape[1]} devices each, but the spec has {hosts} "
                f"with {devices_per_host}",
            )
            return
        # All chips of a small slice are on one host; two kinds have hosts of eight, for the 2x4 slice only.
        usual = min(self.chips, 4)
        valid = [usual, 8] if self.shape == (2, 4) else [usual]
        require(
            hosts % slices == 0 and devices_per_host in [chips * self.cores for chips in valid],
            f"{hosts} hosts with {devices_per_host} devices each, but a host of {self.text} has "
            f"{' or '.join(str(chips * self.cores) for chips in valid)}",
        )


def machines(text: str) -> Machines:
    """Reads the name of a topology: one of `k3jax.plan.chips`, or ``cpu:HOSTSxDEVICES`` of simulated devices.

    Raises:
      ConfigError: an unknown chip, or a shape that is none.
    """
    kind, _, shape = text.partition(":")
    if kind == "cpu":
        sizes = shape.split("x")
        if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
            raise ConfigError(f"topology = {text!r}, but simulated devices are cpu:HOSTSxDEVICES, such as cpu:2x4")
        return Machines(text, kind, (int(sizes[0]), int(sizes[1])), 1)
    with values.field_for_flag("topology", "topology", text):
        found = chips.topology(text)
    return Machines(text, kind, found.shape, found.chip.cores)


def check_slice(there: Machines) -> None:
    """Raises ConfigError for a TPU slice of a shape or size that Google Cloud does not make."""
    kind, shape, most = TPUS[there.kind], there.shape, TPUS[there.kind].most
    if len(shape) == 2:
        require(shape in FLAT, f"there is no slice {there.text}; {there.kind} has {', '.join(map(_size, FLAT))}")
        return
    whole = all(size % 4 == 0 for size in shape) and tuple(sorted(shape)) == shape
    require(
        shape in SMALL or whole or (there.kind == "tpu7x" and shape == (1, 1, 1)),
        f"there is no slice {there.text}: the shapes of {there.kind} are {', '.join(map(_size, SMALL))} and those of "
        "multiples of 4, the smallest first, such as 4x4x8",
    )
    require(
        there.chips <= kind.most,
        f"{there.text} has {there.chips:,} chips, but a slice of {there.kind} has {most:,} at most",
    )


def tpu_or_gpu(there: Machines, engine: str) -> Tpu | Gpu:
    """The names of what the topology is made of.

    Raises:
      ConfigError: the engine cannot give it.
    """
    if there.is_tpu:
        check_slice(there)
        return TPUS[there.kind]
    if not there.is_gpu:
        raise ConfigError(f"{engine} has no {there.text}: simulated devices are for local and slurm")
    names, count = GPUS[there.kind], there.shape[1]
    valid = names.per_host if engine != "xpk" else (8,)
    require(
        count in valid,
        f"{there.text}: {engine} has {there.kind} machines with {' or '.join(map(str, valid))} GPUs, not {count}",
    )
    return names


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
