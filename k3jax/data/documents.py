"""What a source is to everything behind it: a numbered list of documents whose lengths are known without reading them.

A document is what the model may read as one context: ``inputs`` and the ``targets`` of the same positions, so that no
target ever lies in another document. Text begins with BOS, which is never predicted, and ends with EOS, which is never
read. A generated task sets its own weights: 0 where there is nothing to predict.
"""

from typing import NamedTuple, Protocol

import numpy as np


class DataError(ValueError):
    """Data that cannot be read or used: the message names the file or document, what is wrong, and what would do."""


class Document(NamedTuple):
    """One document, or a part of one."""

    inputs: np.ndarray  # int32 [n]
    targets: np.ndarray  # int32 [n]
    weights: np.ndarray  # float32 [n], of each target in the loss
    bytes: int  # bytes of text that the targets stand for; 0 for what is no text


class Documents(Protocol):
    """Random access to documents; the same index gives the same document in every process.

    ``part``, where a class has it, reads positions ``start`` to ``stop`` of one document without the rest; see
    :func:`part`. Objects travel to worker processes by pickling, so they hold arrays and paths, never open files.
    """

    name: str  # of the source, for messages
    lengths: np.ndarray  # int64 [N], positions of each document
    bytes: np.ndarray  # int64 [N], bytes of text of each document; 0 for what is no text

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document: ...

    def title(self, index: int) -> str:
        """What a message calls document ``index``: its file, or file and line."""
        ...


def part(documents: Documents, index: int, start: int, stop: int) -> Document:
    """Positions ``start`` to ``stop`` of document ``index``."""
    read = getattr(documents, "part", None)
    if read is not None:
        return read(index, start, stop)
    whole = documents[index]
    if start == 0 and stop == len(whole.inputs):
        return whole
    count = part_bytes(len(whole.inputs), whole.bytes, start, stop)
    return Document(whole.inputs[start:stop], whole.targets[start:stop], whole.weights[start:stop], int(count))


def part_bytes(length, size, start, stop):
    """Bytes of text that positions ``start`` to ``stop`` of a document stand for.

    The last target is EOS and stands for none; the bytes are spread evenly over the others, which is exact for byte
    tokens, and adds up to ``size`` over any cut for every tokenizer. Works on arrays.
    """
    text = np.maximum(length - 1, 1)
    return size * np.minimum(stop, length - 1) // text - size * np.minimum(start, length - 1) // text


def read_text_part(read, length: int, size: int, start: int, stop: int, bos: int, eos: int) -> Document:
    """Positions ``start`` to ``stop`` of a text document of ``length`` positions and ``size`` bytes.

    ``read(low, high)`` gives its tokens from ``low`` to ``high``, without BOS and EOS.
    """
    framed = np.empty(stop - start + 1, np.int32)  # BOS, the tokens, EOS: from start to stop, the latter included
    low, high = max(start, 1), min(stop + 1, length)
    if low < high:
        framed[low - start : high - start] = read(low - 1, high - 1)
    if start == 0:
        framed[0] = bos
    if stop == length:
        framed[-1] = eos
    if (start, stop) != (0, length):
        size = int(part_bytes(length, size, start, stop))
    return Document(framed[:-1], framed[1:], np.ones(stop - start, np.float32), size)


class TokenDocuments:
    """Text documents in memory: document i is tokens[starts[i] : starts[i + 1]] between BOS and EOS."""

    def __init__(self, name: str, tokens: np.ndarray, starts: np.ndarray, sizes, titles, *, bos: int, eos: int):
        self.name = name
        self.lengths = np.diff(starts) + 1
        self.bytes = np.asarray(sizes, np.int64)
        self.bos, self.eos = bos, eos
        self._tokens, self._starts, self._titles = tokens, starts, titles

    def __len__(self) -> int:
        return len(self.lengths)

    def title(self, index: int) -> str:
        return self._titles[index]

    def __getitem__(self, index: int) -> Document:
        return self.part(index, 0, int(self.lengths[index]))

    def part(self, index: int, start: int, stop: int) -> Document:
        origin = int(self._starts[index])

        def read(low: int, high: int) -> np.ndarray:
            return self._tokens[origin + low : origin + high]

        size = int(self.bytes[index])
        return read_text_part(read, int(self.lengths[index]), size, start, stop, self.bos, self.eos)
