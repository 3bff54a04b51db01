"""Seconds that a compiled program computes: the compiler's own estimates, and what is known of kernels."""

import math
import re

import jax

from k3jax.plan.chips import Chip
from k3jax.plan.hlo import Instruction, Program

KDA_CYCLES = {
    "TPU v5 lite": (7.45, 11.04),
    "TPU v5": (7.45, 11.04),
    "TPU v6 lite": (5.50, 8.32),
    "TPU7x": (5.34, 8.44),
}
"""Cycles per token and head of the fused KDA kernels at K = V = 128, forward and backward by device kind, as counted in
the compiler's schedule (pallas_kernels/README.md; those of v5e are v5p's). The compiler gives no estimate of a kernel.
"""

SOURCE = "the compiler's estimated cycles over the clock"

MATMULS_REACH = 0.95
"""Share of the peak at which the compiler's default level estimates large products of matrices: 0.963 for
[8192, 7168] x [7168, 3072] on v5p, and 0.95 for a whole gated feed-forward layer of them."""

_OPERANDS = re.compile(r"operand_layout_constraints=\{(.*?\})\}")


def fused_seconds(program: Program, chip: Chip, *, quick: bool | None = None) -> float:
    """Everything but kernels: the compiler's estimated cycles over the clock.

    quick: the program was compiled at level O1 (by default what JAX_OPTIMIZATION_LEVEL says), which leaves out the
      search for good tiles: its matrix products are estimated at 3 to 5 times what they take at the default level. They
      then count no more than their operations need at :data:`MATMULS_REACH` of the peak. Other operations, 1.3 to 1.5
      times slower at O1, count as estimated.
    """
    quick = jax.config.jax_optimization_level in ("O0", "O1") if quick is None else quick
    total = 0.0
    for one, where, times in program.executed():
        seconds = one.cycles / chip.clock
        operations = program.matmul_operations(where, one) if quick and seconds else 0
        if operations:
            seconds = min(seconds, operations / (chip.flops * MATMULS_REACH))
        total += seconds * times
    return total


def kernel_seconds(program: Program, chip: Chip) -> float:
    """Pallas kernels and grouped matmuls; those in :func:`unknown_kernels` are not in it."""
    return sum(_kernel(one, chip) * times for one, _, times in program.executed())


def unknown_kernels(program: Program, chip: Chip) -> list[str]:
    """Names of the kernels of which no time is known."""
    kernels = (one for one, _, _ in program.executed() if one.opcode == "custom-call")
    names = {
        re.sub(r"\.\d.*", "", one.name)
        for one in kernels
        if '"tpu_custom_call"' in one.attributes and not _kernel(one, chip)
    }
    return sorted(names - {"ragged-dot-metadata"})


def _kernel(one: Instruction, chip: Chip) -> float:
    """Seconds of one kernel; 0 for every other instruction, and for unknown kernels."""
    if one.opcode != "custom-call":
        return 0.0
    if "kda_forward" in one.name or "kda_backward" in one.name:
        B, T, H, K = next(dims for _, dims in _operands(one) if len(dims) == 4)
        forward, backward = KDA_CYCLES[chip.kind]
        return (backward if "backward" in one.name else forward) * B * T * H * (K / 128) ** 2 / chip.clock
    if one.name.startswith("ragged-dot-none") or "gmm" in one.name:
        # [rows, inner] and [rows, outer], in whichever order, and one matrix for each group.
        arrays = [dims for dtype, dims in (*_operands(one), *one.shapes) if dtype != "s32"]
        _, inner, outer = next(dims for dims in arrays if len(dims) == 3)
        flat = [math.prod(dims) for dims in arrays if len(dims) == 2]
        return 2 * math.sqrt(math.prod(flat) * inner * outer) / chip.flops
    return 0.0


def _operands(one: Instruction) -> list[tuple[str, tuple[int, ...]]]:
    found = _OPERANDS.search(one.attributes)
    arrays = re.findall(r"([a-z]\w*)\[([\d,]*)\]", found[1]) if found else []
    return [(dtype, tuple(map(int, filter(None, dims.split(","))))) for dtype, dims in arrays]
