"""Seconds of a program for GPUs, of which the compiler estimates none: what each kernel multiplies, reads and writes.

A kernel takes as long as its matrix products need at a share of the bfloat16 peak, or its bytes through HBM, whichever
is longer. What a fusion takes a slice of counts as the slice, and what it updates in place as the update.
"""

import functools
import math
import re

from k3jax.plan.chips import Chip
from k3jax.plan.cost import MATMULS_REACH
from k3jax.plan.hlo import KINDS, Instruction, Program

SOURCE = f"kernel by kernel the longer of products at {MATMULS_REACH:.0%} of the peak and bytes over HBM bandwidth"

_FUSIONS = ("fusion", "fusion-start")
_MOVE_NOTHING = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "while", "call", "conditional", "opt-barrier", "add-dependency",
}  # fmt: skip
_VIEWS = {"bitcast", "reshape", "get-tuple-element"}
_SLICES = {"dynamic-slice", "slice", "gather"}
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_LIBRARIES = ("__cublas$", "__cudnn$", "__cub$", "cub_sort", "__triton_gemm")


class Roofline:
    """Of one program on one kind of GPU."""

    def __init__(self, program: Program, chip: Chip):
        self._program, self._chip = program, chip
        self._bytes_of = functools.cache(self._of_fusion)
        everything = [one for instructions in program.computations.values() for one in instructions]
        self._fused = {name for one in everything if one.opcode in _FUSIONS for name in program.callees(one)}

    def cycles(self, where: str, one: Instruction) -> float:
        """As `hlo.Work`: of one instruction by itself; none inside of a fusion, and none of what sends."""
        return self.seconds(where, one) * self._chip.clock

    def seconds(self, where: str, one: Instruction) -> float:
        if where in self._fused or _moves_nothing(one):
            return 0.0
        operations = self._program.matmul_operations(where, one)
        return max(operations / (self._chip.flops * MATMULS_REACH), self.bytes(where, one) / self._chip.hbm_bandwidth)

    def total(self) -> float:
        """Of the whole program, loops multiplied."""
        return sum(self.seconds(where, one) * times for one, where, times in self._program.executed())

    def bytes(self, where: str, one: Instruction) -> int:
        """What one instruction reads and writes."""
        if one.opcode in _FUSIONS:
            return sum(self._bytes_of(name) for name in self._program.callees(one))
        operands = self._program.operands(where, one)
        if one.opcode in _SLICES:
            return 2 * one.bytes
        if one.opcode == "dynamic-update-slice":
            return 2 * operands[1].bytes
        scratch = sum(math.prod(dims) for dtype, dims in one.shapes if dtype == "s8" and one.opcode == "custom-call")
        return one.bytes - scratch + sum({operand.name: operand.bytes for operand in operands}.values())

    def unknown(self) -> list[str]:
        """Targets of custom calls whose operations are not known: only their bytes count."""
        calls = (one for one, _, _ in self._program.executed() if one.opcode == "custom-call")
        targets = {found[1] for one in calls if (found := _TARGET.search(one.attributes))}
        return sorted(target for target in targets if not target.startswith(_LIBRARIES))

    def _of_fusion(self, name: str) -> int:
        inside = self._program.computations[name]
        users: dict[str, list[Instruction]] = {}
        for one in inside:
            for operand in self._program.operands(name, one):
                users.setdefault(operand.name, []).append(one)
        read = sum(self._read(name, one, users) for one in inside if one.opcode == "parameter")
        return read + self._written(name, inside[-1])

    def _read(self, where: str, one: Instruction, users: dict[str, list[Instruction]]) -> int:
        """Bytes of an array of a fusion that its users ask for."""
        total = 0
        for user in users.get(one.name, ()):
            first = self._program.operands(where, user)[0].name == one.name
            if user.opcode in _SLICES and first:
                total += user.bytes
            elif user.opcode in _VIEWS:
                total += self._read(where, user, users)
            elif not (user.opcode == "dynamic-update-slice" and first):
                return one.bytes
        return min(total, one.bytes)

    def _written(self, where: str, one: Instruction) -> int:
        operands = self._program.operands(where, one)
        if one.opcode == "tuple":
            return sum(self._written(where, operand) for operand in operands)
        if one.opcode in _VIEWS and operands:
            return self._written(where, operands[0])
        return operands[1].bytes if one.opcode == "dynamic-update-slice" else one.bytes


def _moves_nothing(one: Instruction) -> bool:
    sends = one.opcode.removesuffix("-start") in KINDS
    waits = one.opcode.endswith(("-done", "-update")) or one.opcode in ("call-start", "async-start")
    return one.opcode in _MOVE_NOTHING or sends or waits
