"""What the accelerators can do, per device as JAX shows them, and how fast a group of devices can exchange bytes."""

import math
import pathlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.experimental import topologies

from k3jax.config import ConfigError
from k3jax.peak import device_peak

GIB = 2**30
TARGETS = pathlib.Path(__file__).with_name("targets")
"""What XLA is told of each GPU."""


@dataclass(frozen=True)
class Chip:
    """One device.

    kind: as ``device.device_kind``. hbm: bytes that a program may use. hbm_bandwidth: bytes/s. clock: Hz of the
    compiler's cycles. link: bytes/s of one link in one direction. torus: dimensions of the network; 0 for a switch, to
    which a device has one ``link``. cores: devices of one chip, which share its links. remote: bytes/s of a device to
    other nodes (GPU) or slices (TPU).
    """

    kind: str
    hbm: float
    hbm_bandwidth: float
    clock: float
    link: float
    torus: int
    cores: int
    remote: float

    @property
    def flops(self) -> float:
        """Dense bfloat16 operations per second."""
        return device_peak(self.kind)


# Memory, bandwidths and links of TPUs: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}; a chip's bidirectional
# bandwidth over two directions and its 4 (2-D torus) or 6 (3-D) links. Clocks: those that the peaks imply, the tpu7x
# one from published times of a kernel. GPUs: NVIDIA's data sheets; one 400 Gb/s network card a GPU, 800 for B200.
CHIPS = {
    "v4": Chip("TPU v4", 32 * GIB, 1.2e12, 1.05e9, 50e9, 3, 1, 3.1e9),
    "v5e": Chip("TPU v5 lite", 16 * GIB, 0.819e12, 1.50e9, 50e9, 2, 1, 3.1e9),
    "v5p": Chip("TPU v5", 95 * GIB, 2.765e12, 1.75e9, 100e9, 3, 1, 6.25e9),
    "v6e": Chip("TPU v6 lite", 32 * GIB, 1.638e12, 1.75e9, 100e9, 2, 1, 12.5e9),
    "tpu7x": Chip("TPU7x", 96 * GIB, 3.69e12, 1.55e9, 100e9, 3, 2, 6.25e9),
    "h100": Chip("NVIDIA H100", 80e9, 3.35e12, 1.98e9, 450e9, 0, 1, 50e9),
    "h200": Chip("NVIDIA H200", 141e9, 4.8e12, 1.98e9, 450e9, 0, 1, 50e9),
    "b200": Chip("NVIDIA B200", 180e9, 7.7e12, 1.98e9, 900e9, 0, 1, 100e9),
}


@dataclass(frozen=True)
class Topology:
    """Devices of one kind: ``v5p:4x4x8`` (chips along the torus) or ``h200:4x8`` (nodes x GPUs; ``h200:8`` is 1x8)."""

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        return self.chips * self.chip.cores

    @property
    def is_tpu(self) -> bool:
        return self.chip.torus > 0


def topology(text: str) -> Topology:
    """Reads the name of a topology.

    Raises:
      ConfigError: an unknown chip, or a shape that is none.
    """
    name, _, shape = text.partition(":")
    if name not in CHIPS:
        raise ConfigError(f"--topology={text}: there is no chip {name!r}; chips: {', '.join(CHIPS)}")
    chip = CHIPS[name]
    sizes = shape.split("x")
    if chip.torus == 0 and len(sizes) == 1 and shape:
        sizes = ["1", shape]
    dims = {0: "2 numbers, nodes x GPUs (or the GPUs of one node)", 2: "2 numbers", 3: "3 numbers"}[chip.torus]
    wanted = chip.torus or 2
    if len(sizes) != wanted or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        example = "4x8" if chip.torus == 0 else "x".join(["4"] * wanted)
        raise ConfigError(f"--topology={text}: {shape!r} is no shape of {name}, which takes {dims}: {name}:{example}")
    return Topology(text, chip, tuple(map(int, sizes)))


def coordinates(topology: Topology, devices: list | None = None) -> np.ndarray:
    """[devices, dimensions] places on the torus in the order of JAX's devices, or (node, GPU).

    Of devices that are not given it is the order in which libtpu describes a topology: host by host, 2 x 2 chips each,
    and among hosts as inside of them the first dimension fastest.
    """
    if devices is not None and topology.is_tpu:
        return np.array([device.coords[: topology.chip.torus] for device in devices])
    if topology.is_tpu:
        host = [2 if size % 2 == 0 else 1 for size in topology.shape[:2]] + [1] * (len(topology.shape) - 2)
        hosts = _grid([size // part for size, part in zip(topology.shape, host)])
        places = (hosts[:, None] * host + _grid(host)).reshape(-1, len(host))
        return np.repeat(places, topology.chip.cores, axis=0)
    return np.stack(np.unravel_index(np.arange(topology.devices), topology.shape), 1)


def _grid(shape: list[int]) -> np.ndarray:
    """[places, dimensions], the first dimension fastest."""
    return np.stack(np.unravel_index(np.arange(math.prod(shape)), shape[::-1]), 1)[:, ::-1]


def group_bandwidth(topology: Topology, places: np.ndarray, groups: np.ndarray) -> float:
    """Bytes/s at which one device of the groups can send and receive, all groups at it at once.

    places: [devices, dimensions]. groups: [groups, size] devices.

    On a torus each dimension along which a group extends gives two links where it closes a ring, one otherwise; groups
    that lie interleaved in a dimension share its links, and so do the devices of one chip. Behind a switch a device has
    its own link to it, and beyond the node its network card.
    """
    chip = topology.chip
    group = places[groups[0]]
    if not topology.is_tpu:
        return chip.link if np.ptp(group[:, 0]) == 0 else chip.remote
    total = 0.0
    for dimension, size in enumerate(topology.shape):
        taken = np.unique(group[:, dimension])
        if len(taken) > 1:
            stride = int(np.diff(taken).min())
            closed = len(taken) * stride == size and size >= 4
            total += chip.link * (2 if closed else 1) / stride
    if total == 0:
        # The two devices of one chip talk to each other: at least six times as fast as over a link of the torus.
        return 6 * chip.link
    return total / chip.cores


def seconds(topology: Topology, places: np.ndarray, kind: str, groups: np.ndarray, sent: float) -> float:
    """Seconds for one collective by bandwidth alone: no latency, nothing else on the links.

    An all-to-all on a torus is bound by the middle of its longest ring: a byte travels a quarter of the ring on
    average, and a ring of n devices carries n / 8 of what each sends, over two links.
    """
    bandwidth = group_bandwidth(topology, places, groups)
    if topology.is_tpu and kind in ("all-to-all", "ragged-all-to-all"):
        group = places[groups[0]]
        longest = max(len(np.unique(group[:, d])) for d in range(group.shape[1]))
        return sent / bandwidth * max(longest / 4, 1)
    return sent / bandwidth


def devices_of(topology: Topology) -> list[Any]:
    """The devices of a described topology.

    Raises:
      ConfigError: there is no compiler for it here, or it refuses the topology.
    """
    describe, compiler = (_tpus, "A TPU's compiler comes with: pip install -r requirements-tpu.txt")
    if not topology.is_tpu:
        describe, compiler = (_gpus, "A GPU's compiler comes with: pip install -r requirements-cuda13.txt")
    try:
        found = describe(topology)
    except Exception as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        refused = "INVALID_ARGUMENT" in reason  # a compiler is there, and knows no such topology
        raise ConfigError(f"--topology={topology.name}: {reason}{'' if refused else f'. {compiler}'}") from error
    if len(found) != topology.devices:
        raise ConfigError(f"{topology.name} has {len(found)} devices, not {topology.devices}")
    return found


def _tpus(topology: Topology) -> list[Any]:
    return topologies.get_topology_desc(platform="tpu", topology_name=topology.name).devices


def _gpus(topology: Topology) -> list[Any]:
    """Of one domain of nodes; XLA's shape is domains x nodes x GPUs."""
    target = (TARGETS / f"{topology.name.partition(':')[0]}.txtpb").read_text(encoding="utf-8")
    shape = "x".join(map(str, (1, *topology.shape)))
    return topologies.get_topology_desc(platform="cuda", target_config=target, topology=shape).devices
