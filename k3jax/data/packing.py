"""Documents into rows of one length, planned from lengths alone: which part of which document lies where.

The tokens are read when a row is asked for; a plan for a million documents needs no more than their lengths.
"""

import bisect
from typing import NamedTuple, Protocol

import numpy as np

from k3jax.config_data import BestFit, Packing, Stream
from k3jax.data.documents import DataError, Documents, part, part_bytes
from k3jax.shapes import PADDING_SEGMENT


class Batch(NamedTuple):
    """Packed rows. Padding has segment -1, weight 0 and an arbitrary valid token."""

    tokens_BT: np.ndarray  # int32
    targets_BT: np.ndarray  # int32
    segments_BT: np.ndarray  # int32, document number within the row
    weights_BT: np.ndarray  # float32


class PackingReport(NamedTuple):
    """What packing did to a source: ``rows`` of the row length hold ``positions`` of ``documents``.

    padding: share of all positions that are padding. split: documents that lie in more than one row. truncated,
    dropped: documents cut to the row, and the positions lost by that.
    """

    rows: int
    documents: int
    positions: int
    padding: float
    split: int
    truncated: int
    dropped: int


class Plan(Protocol):
    report: PackingReport

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Document, first position and position after the last of every part in a row."""
        ...

    def row_bytes(self) -> np.ndarray:
        """int64 [rows], bytes of text that the targets of each row stand for."""
        ...


def make_plan(documents: Documents, length: int, packing: Packing) -> Plan:
    """The rows of ``length`` positions that a source makes.

    Raises:
      DataError: no documents, or one that is longer than the row where that is refused.
    """
    if length < 1:
        raise ValueError(f"rows need at least one token, got length {length}")
    if len(documents) == 0:
        raise DataError(f"{documents.name} holds no documents")
    match packing:
        case Stream():
            return StreamPlan(documents, length)
        case BestFit():
            return BestFitPlan(documents, length, packing)
    raise TypeError(f"packing is a Stream or a BestFit, got {type(packing).__name__}")


class StreamPlan:
    """Documents end to end; row i holds stream positions i * length to (i + 1) * length."""

    def __init__(self, documents: Documents, length: int):
        self._starts = np.concatenate([[0], np.cumsum(documents.lengths, dtype=np.int64)])
        self._bytes = documents.bytes
        self._length = length
        total = int(self._starts[-1])
        rows = -(-total // length)
        first, last = self._starts[:-1] // length, (self._starts[1:] - 1) // length
        self.report = PackingReport(
            rows=rows,
            documents=len(documents),
            positions=total,
            padding=1 - total / (rows * length),
            split=int(np.count_nonzero(first != last)),
            truncated=0,
            dropped=0,
        )

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        begin = index * self._length
        first = np.searchsorted(self._starts, begin, side="right") - 1
        last = np.searchsorted(self._starts[:-1], begin + self._length, side="left")
        origins = self._starts[first:last]
        low = np.maximum(begin - origins, 0)
        high = np.minimum(self._starts[first + 1 : last + 1], begin + self._length) - origins
        return np.arange(first, last), low, high

    def row_bytes(self) -> np.ndarray:
        ends = np.minimum(np.arange(self.report.rows + 1) * self._length, self._starts[-1])
        number = np.minimum(np.searchsorted(self._starts, ends, side="right") - 1, len(self._bytes) - 1)
        origins = self._starts[number]
        before = np.concatenate([[0], np.cumsum(self._bytes, dtype=np.int64)])[number]
        lengths = self._starts[number + 1] - origins
        return np.diff(before + part_bytes(lengths, self._bytes[number], 0, ends - origins))


class BestFitPlan:
    """Best-fit decreasing: the longest part first, each into the open row with the least room that still holds it.

    Within a row the parts are in the order of the documents.
    """

    def __init__(self, documents: Documents, length: int, packing: BestFit):
        lengths = np.asarray(documents.lengths, np.int64)
        long = np.flatnonzero(lengths > length)
        if packing.long == "refuse" and long.size:
            raise DataError(
                f"{documents.name}: {documents.title(int(long[0]))} has {lengths[long[0]]} tokens, longer than the row "
                f"of {length}; {long.size} documents are too long: longer rows, BestFit(long='split') or "
                "BestFit(long='truncate') would take them"
            )
        kept = np.minimum(lengths, length) if packing.long == "truncate" else lengths
        parts = -(-kept // length)
        document = np.repeat(np.arange(len(lengths)), parts)
        number = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
        begin = number * length
        end = np.minimum(begin + length, kept[document])
        row, rows = best_fit(end - begin, length)
        order = np.lexsort((begin, document, row))
        self._document, self._begin, self._end = document[order], begin[order], end[order]
        self._first = np.searchsorted(row[order], np.arange(rows + 1))
        self._text = lengths, np.asarray(documents.bytes)
        positions = int(kept.sum())
        self.report = PackingReport(
            rows=rows,
            documents=len(lengths),
            positions=positions,
            padding=1 - positions / (rows * length),
            split=int(np.count_nonzero(parts > 1)),
            truncated=long.size if packing.long == "truncate" else 0,
            dropped=int((lengths - kept).sum()),
        )

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        where = slice(self._first[index], self._first[index + 1])
        return self._document[where], self._begin[where], self._end[where]

    def row_bytes(self) -> np.ndarray:
        lengths, sizes = self._text
        counts = part_bytes(lengths[self._document], sizes[self._document], self._begin, self._end)
        return np.add.reduceat(counts, self._first[:-1])


def best_fit(lengths: np.ndarray, room: int) -> tuple[np.ndarray, int]:
    """The row of each item, and the number of rows, by best-fit decreasing; every length lies in 1..room.

    Rows with the same room left and items of the same length are placed together, which makes the same rows as one by
    one would (as histogram packing does, arXiv 2107.02027): the time depends on the number of different lengths.
    """
    order = np.argsort(-lengths, kind="stable")
    row = np.empty(len(lengths), np.int64)
    open_rows: dict[int, list[np.ndarray]] = {}  # room left -> rows
    rooms: list[int] = []  # the keys, rising
    rows = 0
    ends = np.flatnonzero(np.diff(lengths[order])) + 1
    for items in np.split(order, ends):
        need = int(lengths[items[0]])
        while items.size:
            at = bisect.bisect_left(rooms, need)
            left = rooms[at] if at < len(rooms) else room
            each = min(left // need, items.size)  # rows are filled one after the other, the last perhaps partly
            wanted = items.size // each
            if at < len(rooms):
                chosen = _take(open_rows, rooms, left, wanted)
            else:
                chosen, rows = np.arange(rows, rows + wanted), rows + wanted
            placed = chosen.size * each
            row[items[:placed]] = np.repeat(chosen, each)
            items, left = items[placed:], left - each * need
            if left:
                if left not in open_rows:
                    bisect.insort(rooms, left)
                open_rows.setdefault(left, []).append(chosen)
    return row, rows


def _take(open_rows: dict[int, list[np.ndarray]], rooms: list[int], left: int, wanted: int) -> np.ndarray:
    """Up to ``wanted`` of the rows with ``left`` room, which are then no longer among them."""
    groups, taken, count = open_rows[left], [], 0
    while groups and count < wanted:
        group = groups.pop()
        use = group[: wanted - count]
        if use.size < group.size:
            groups.append(group[use.size :])
        taken.append(use)
        count += use.size
    if not groups:
        del open_rows[left]
        rooms.remove(left)
    return np.concatenate(taken)


class PackedRows:
    """Random access to the rows of a plan; a Grain data source. A row is assembled when it is asked for."""

    def __init__(self, documents: Documents, length: int, packing: Packing):
        self.plan = make_plan(documents, length, packing)
        self.length = length
        self._documents = documents

    def __len__(self) -> int:
        return self.plan.report.rows

    def __repr__(self) -> str:
        return f"PackedRows({self._documents.name}, {len(self)} rows of {self.length})"

    def __getitem__(self, index: int) -> Batch:
        """Row `index` as a Batch without the leading axis."""
        index = int(index)
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row, at = padding(self.length), 0
        for segment, (number, start, stop) in enumerate(zip(*(column.tolist() for column in self.plan.row(index)))):
            document = part(self._documents, number, start, stop)
            where = slice(at, at + stop - start)
            row.tokens_BT[where] = document.inputs
            row.targets_BT[where] = document.targets
            row.segments_BT[where] = segment
            row.weights_BT[where] = document.weights
            at += stop - start
        return row


def padding(length: int) -> Batch:
    """A row of padding: token 0 everywhere, which counts nothing."""
    return Batch(
        tokens_BT=np.zeros(length, np.int32),
        targets_BT=np.zeros(length, np.int32),
        segments_BT=np.full(length, PADDING_SEGMENT, np.int32),
        weights_BT=np.zeros(length, np.float32),
    )


def stack(rows: list[Batch]) -> Batch:
    """Rows of one length as one batch."""
    return Batch(*(np.stack(field) for field in zip(*rows, strict=True)))


def local_rows(rows: range, index: int, count: int) -> range:
    """The rows of process `index` of `count`: an equal run of the rows of a global batch."""
    if not 0 <= index < count or len(rows) % count:
        raise ValueError(f"process {index} of {count} cannot have an equal part of {len(rows)} rows")
    share = len(rows) // count
    return rows[index * share : (index + 1) * share]
