"""What a compiled program does, read from its text: instructions, how often each is executed, and what it sends.

The text of a TPU program is scheduled: instructions stand in the order in which they are issued. A loop's trip count is
the constant of its condition. Of a conditional all branches are counted.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from pallas_kernels.schedule import ITEM_BYTES

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-<>]+) \(")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-<>]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_CALLS = re.compile(r"(?:calls|to_apply|true_computation|false_computation|called_computations)=\{?%?([\w.\-<>]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 2**31 - 1  # what the compiler writes, or more, where it has no estimate: work of a SparseCore
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CONSTANT = re.compile(r"^\s+.*= s32\[\]\S* constant\((\d+)\)", re.MULTILINE)
_EXPLICIT = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[[\d,]*\]\))? \{([^}]*)\}")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_DILATED = re.compile(r"lhs_dilate=([\dx]+)")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")


class Instruction(NamedTuple):
    """One line of a computation. shapes: of its result, ``(dtype, dimensions)`` each. attributes: what follows the
    operands. cycles: the compiler's own estimate, 0 where it gives none."""

    name: str
    opcode: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    operands: str
    attributes: str

    @property
    def bytes(self) -> int:
        return int(sum(math.prod(dims) * ITEM_BYTES.get(dtype, 0) for dtype, dims in self.shapes))

    @property
    def cycles(self) -> int:
        found = _CYCLES.search(self.attributes)
        return int(found[1]) if found and int(found[1]) < _UNKNOWN_CYCLES else 0

    @property
    def op_name(self) -> str:
        """The path of the JAX operation that it comes from."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass
class Program:
    """Computations by name, and the one that is the program."""

    computations: dict[str, list[Instruction]]
    entry: str
    _by_name: dict[str, dict[str, Instruction]] = dataclasses.field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, text: str) -> "Program":
        """Reads ``compiled.as_text()``.

        Raises:
          ValueError: there is no program in it.
        """
        computations: dict[str, list[Instruction]] = {}
        entry, here = "", None
        for line in text.splitlines():
            if line.startswith("}"):
                here = None
            elif here is None and line.rstrip().endswith("{") and (head := _HEAD.match(line)):
                here = computations.setdefault(head[2], [])
                entry = head[2] if head[1] else entry
            elif here is not None and (instruction := _instruction(line)):
                here.append(instruction)
        if not entry:
            raise ValueError("this text holds no compiled program: there is no line that begins with ENTRY")
        return cls(computations, entry)

    def executed(self) -> Iterator[tuple[Instruction, str, int]]:
        """Every instruction that is issued, the computation it is in and how often, loops and calls followed."""
        yield from self._executed(self.entry, 1)

    def _executed(self, name: str, times: int) -> Iterator[tuple[Instruction, str, int]]:
        for instruction in self.computations.get(name, ()):
            yield instruction, name, times
            for callee in self.callees(instruction):
                yield from self._executed(callee, times * self.trips(instruction))

    def operands(self, where: str, instruction: Instruction) -> list[Instruction]:
        """What an instruction of the computation ``where`` takes."""
        if where not in self._by_name:
            self._by_name[where] = {one.name: one for one in self.computations[where]}
        found = (self._by_name[where].get(name) for name in re.findall(r"%([\w.\-<>]+)", instruction.operands))
        return [one for one in found if one is not None]

    def matmul_operations(self, where: str, instruction: Instruction) -> float:
        """Of the matrix products in an instruction of the computation ``where``, those in a fusion included.

        A product of [b, m, k] and [b, k, n] has 2 b m k n operations, which the sizes of the three arrays and b give,
        in whichever order the compiler has put the dimensions. It writes b as a dilated window of a convolution.
        """
        if instruction.opcode == "fusion":
            inside = [(name, one) for name in self.callees(instruction) for one in self.computations[name]]
            return sum(self.matmul_operations(name, one) for name, one in inside)
        if instruction.opcode != "convolution":
            return 0.0
        arrays = [math.prod(one.shapes[0][1]) for one in (instruction, *self.operands(where, instruction))]
        window = _WINDOW.search(instruction.attributes)
        dilated = _DILATED.search(window[1]) if window else None
        batch = math.prod(n for n in map(int, dilated[1].split("x")) if n > 1) if dilated else 1
        return 2 * math.sqrt(math.prod(arrays) / batch)

    def callees(self, instruction: Instruction) -> list[str]:
        """Computations that an instruction runs; not those that combine two numbers of a reduction."""
        if instruction.opcode == "while":
            return re.findall(r"body=%?([\w.\-<>]+)", instruction.attributes)
        if instruction.opcode not in ("fusion", "call", "conditional") and not instruction.opcode.endswith("-start"):
            return []
        branches = _BRANCHES.search(instruction.attributes)
        named = branches[1].replace("%", "").split(", ") if branches else []
        return named + _CALLS.findall(instruction.attributes)

    def trips(self, instruction: Instruction) -> int:
        """How often a loop runs; 1 for everything else, and for a loop that does not say."""
        if instruction.opcode != "while":
            return 1
        if known := _TRIPS.search(instruction.attributes):
            return int(known[1])
        condition = re.search(r"condition=%?([\w.\-<>]+)", instruction.attributes)
        constants = self._constants(condition[1]) if condition else []
        return max(constants, default=1)

    def _constants(self, name: str) -> list[int]:
        found = []
        for one in self.computations.get(name, ()):
            if one.opcode == "constant" and one.shapes == (("s32", ()),) and one.operands.isdecimal():
                found.append(int(one.operands))
            found += [n for callee in self.callees(one) for n in self._constants(callee)]
        return found


def _instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if head is None:
        return None
    start = head.end()
    end = _closing(line, start) + 1 if line[start] == "(" else line.find(" ", start)
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        return None
    shapes = tuple((t, tuple(map(int, filter(None, d.split(","))))) for t, d in _ARRAY.findall(line[start:end]))
    close = _closing(line, opcode.end() - 1)
    return Instruction(head[1], opcode[1], shapes, line[opcode.end() : close], line[close + 1 :])


def _closing(line: str, start: int) -> int:
    """Where the parenthesis that opens at ``start`` closes."""
    depth = 0
    for position in range(start, len(line)):
        depth += (line[position] == "(") - (line[position] == ")")
        if depth == 0:
            return position
    return len(line)


class Collective(NamedTuple):
    """One instruction that sends. axes: the mesh axes along which its groups lie. size: devices of a group. groups:
    [number, size] positions on the mesh, or [pairs, 2] of a permutation. payload: bytes of the whole that a group
    shares: what a gather gives, what a reduction takes, what is permuted. times: how often a step runs it.
    asynchronous: it is started and awaited apart. between: cycles that the compiler estimates for what stands between.
    """

    kind: str
    axes: tuple[str, ...]
    size: int
    groups: np.ndarray
    payload: int
    times: int
    asynchronous: bool
    between: int
    op_name: str

    @property
    def sent(self) -> float:
        """Bytes that one device sends each time, in the best algorithm."""
        share = (self.size - 1) / self.size
        match self.kind:
            case "all-reduce":
                return 2 * share * self.payload
            case "collective-permute":
                return self.payload
            case _:
                return share * self.payload


def collectives(program: Program, mesh: Mapping[str, int]) -> list[Collective]:
    """Everything that a program sends over a mesh of these axis sizes, in the order of issue."""
    between = _cycles_between(program)
    found = []
    for one, where, times in program.executed():
        kind = one.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        groups = replica_groups(one.attributes, math.prod(mesh.values()))
        if groups.shape[1] < 2:
            continue
        if kind == "all-reduce" and where.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        size, axes = groups.shape[1], axes_of(groups, mesh)
        waited = [between[name] for name in (where, one.name) if name in between]
        asynchronous = bool(waited) or one.opcode.endswith("-start")
        overlap = max(waited, default=0)
        payload = _payload(one, size)
        found.append(Collective(kind, axes, size, groups, payload, times, asynchronous, overlap, one.op_name))
    return found


def _payload(one: Instruction, size: int) -> int:
    """Bytes of the whole that a group shares. What a start returns holds its operand beside its result."""
    sizes = [int(math.prod(dims) * ITEM_BYTES.get(dtype, 0)) for dtype, dims in one.shapes]
    if one.opcode in ("all-gather-start", "collective-permute-start"):
        return max(sizes)
    return sum(sizes) * (size if one.opcode.startswith("reduce-scatter") else 1)


def _cycles_between(program: Program) -> dict[str, int]:
    """Estimated cycles of what stands between a start and its end, by the start's name or by what it calls."""
    found: dict[str, int] = {}
    for instructions in program.computations.values():
        clock, started = 0, {}
        for one in instructions:
            before = one.operands.split(",")[0].strip().lstrip("%")
            if one.opcode.endswith("-start"):
                started[one.name] = clock, (program.callees(one) or [one.name])[0]
            elif one.opcode.endswith("-update") and before in started:
                started[one.name] = started[before]
            elif one.opcode.endswith("-done"):
                if begun := started.get(before):
                    found[begun[1]] = clock - begun[0]
            else:
                clock += one.cycles + sum(_cycles_of(program, name) for name in program.callees(one)) * program.trips(
                    one
                )
    return found


def _cycles_of(program: Program, name: str) -> int:
    return sum(
        one.cycles + program.trips(one) * sum(_cycles_of(program, callee) for callee in program.callees(one))
        for one in program.computations.get(name, ())
    )


def replica_groups(attributes: str, devices: int) -> np.ndarray:
    """[groups, size] device positions, from any of the forms in which XLA writes them; [pairs, 2] of a permutation."""
    if found := _PAIRS.search(attributes):
        return _lists(found[1])
    if found := _IOTA.search(attributes):
        shape, dims = _numbers(found[1]), _numbers(found[2])
        ids = np.arange(math.prod(dims)).reshape(dims)
        return ids.transpose(_numbers(found[3]) if found[3] else range(len(dims))).reshape(shape)
    if found := _MESH.search(attributes):
        sizes = {name.strip("'\""): int(size) for name, size in re.findall(r"('[^']*'|\"[^\"]*\")=(\d+)", found[1])}
        inside = re.findall(r"['\"]([^'\"]*)['\"]", found[2])
        names = list(sizes)
        order = [names.index(n) for n in names if n not in inside] + [names.index(n) for n in inside]
        ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values())).transpose(order)
        return ids.reshape(-1, math.prod(sizes[n] for n in inside))
    if (found := _EXPLICIT.search(attributes)) and found[1] != "{}":
        return _lists(found[1])
    return np.arange(devices)[None]


def _lists(text: str) -> np.ndarray:
    return np.array([_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text)])


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def axes_of(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ."""
    places = np.stack(np.unravel_index(groups, tuple(mesh.values())))
    varies = (places != places[:, :, :1]).any(axis=(1, 2))
    return tuple(name for name, moves in zip(mesh, varies) if moves)


def summary(found: list[Collective]) -> dict[tuple[str, tuple[str, ...]], dict[str, float]]:
    """By kind and axes: instructions, executions a step, payload and sent bytes a step, and the asynchronous share of
    the payload."""
    rows: dict = collections.defaultdict(lambda: dict(static=0, executed=0, payload=0, sent=0.0, asynchronous=0))
    for one in found:
        row = rows[one.kind, one.axes]
        row["static"] += 1
        row["executed"] += one.times
        row["payload"] += one.payload * one.times
        row["sent"] += one.sent * one.times
        row["asynchronous"] += one.payload * one.times * one.asynchronous
    return dict(sorted(rows.items(), key=lambda item: -item[1]["sent"]))
