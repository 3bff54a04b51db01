"""What a compiled program does, read from its text: instructions, how often each is executed, and what it sends.

The text of a program for TPU or GPU is scheduled: instructions stand in the order in which they are issued. A loop's
trip count is the one that it states, or the constant of its condition. Of a conditional all branches are counted.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
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
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')  # of a dot; of a product by cuBLAS
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

        A product of [b, m, k] and [b, k, n] has 2 b m k n operations. A dot, and a call of cuBLAS, names the dimensions
        k. Of the convolution that a TPU makes of it the sizes of the three arrays and b give them, in whichever order
        the compiler has put the dimensions; b is a dilated window.
        """
        if instruction.opcode in ("dot", "custom-call"):
            k, arrays = _CONTRACTED.search(instruction.attributes), self.operands(where, instruction)
            if k is None or not arrays:
                return 0.0
            inner = math.prod(arrays[0].shapes[0][1][int(n)] for n in re.findall(r"\d+", k[1]))
            return 2.0 * math.prod(instruction.shapes[0][1]) * inner
        if instruction.opcode in ("fusion", "fusion-start"):
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
    asynchronous: it is started and awaited apart. between: cycles of what stands between.
    """

    kind: str
    axes: tuple[str, ...]
    size: int
    groups: np.ndarray
    payload: int
    times: int
    asynchronous: bool
    between: float
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


def estimated(where: str, one: Instruction) -> float:
    """The compiler's own estimate, in cycles."""
    return one.cycles


Work = Callable[[str, Instruction], float]
"""Cycles of an instruction by itself, without what it calls, given the computation that it is in."""


def collectives(program: Program, mesh: Mapping[str, int], work: Work = estimated) -> list[Collective]:
    """Everything that a program sends over a mesh of these axis sizes, in the order of issue."""
    between = _cycles_between(program, work)
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
        asynchronous = (bool(waited) or one.opcode.endswith("-start")) and '"is_sync":true' not in one.attributes
        overlap = max(waited, default=0)
        payload = _payload(one, size)
        found.append(Collective(kind, axes, size, groups, payload, times, asynchronous, overlap, one.op_name))
    return found


def _payload(one: Instruction, size: int) -> int:
    """Bytes of the whole that a group shares. What a start returns holds its operands before its results, but for an
    all-reduce."""
    sizes = [int(math.prod(dims) * ITEM_BYTES.get(dtype, 0)) for dtype, dims in one.shapes]
    if one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
        given = one.operands.count("%")
        sizes = sizes[given : 2 * given]
    return sum(sizes) * (size if one.opcode.startswith("reduce-scatter") else 1)


def _cycles_between(program: Program, work: Work) -> dict[str, float]:
    """Cycles of what stands between a start and its end, by the start's name or by what it calls."""
    inside = _inside(program, work)
    found: dict[str, float] = {}
    for where, instructions in program.computations.items():
        clock, started = 0.0, {}
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
                clock += work(where, one) + inside(one)
    return found


def _inside(program: Program, work: Work) -> Callable[[Instruction], float]:
    """Cycles of everything that an instruction calls."""

    @functools.cache
    def of(name: str) -> float:
        return sum(work(name, one) + calls(one) for one in program.computations.get(name, ()))

    def calls(one: Instruction) -> float:
        return program.trips(one) * sum(of(name) for name in program.callees(one))

    return calls


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
