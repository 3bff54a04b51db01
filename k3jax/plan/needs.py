"""What a step needs of a device: memory and time, in parts."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device. saved: what layers keep for the backward pass, by shapes; other: what remains of the
    compiled program's peak. hbm: its capacity."""

    parameters: int
    optimizer: int
    gradients: int
    saved: int
    other: int
    hbm: int

    @property
    def largest(self) -> str:
        """The part that takes most."""
        return max(vars(self).keys() - {"hbm"}, key=lambda name: getattr(self, name))

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.gradients + self.saved + self.other

    @property
    def fits(self) -> bool:
        return self.total <= self.hbm


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a step. fused: the compiler's estimated cycles, or operations and bytes of each kernel. kernels: those
    of Pallas and grouped matmuls. communication: all collectives by link bandwidth; exposed: what the schedule does not
    hide behind computation. ideal: model operations at the peak."""

    fused: float
    kernels: float
    communication: float
    exposed: float
    ideal: float

    @property
    def step(self) -> float:
        return self.fused + self.kernels + self.exposed

    @property
    def mfu(self) -> float:
        """Model operations over those of the peak in a step; a bound, because nothing else is lost in this model."""
        return self.ideal / self.step

    @property
    def binding(self) -> str:
        parts = {"fused operations": self.fused, "kernels": self.kernels, "exposed communication": self.exposed}
        return max(parts, key=parts.get)
