"""Text to batches: read a source, split it by file, pack documents into rows, order the rows by seed and step.

A document is one file. Its tokens are BOS followed by its bytes, and its targets are its bytes followed by EOS: BOS is
never predicted, EOS is never read, every position carries a target and no target lies in another document. Documents
are laid end to end and the stream is cut every T positions, so that nothing is dropped and nothing but the end of the
last row is padded; a document longer than the rest of its row goes on in the next row without its past.

Files are split into training and held-out by a hash of their relative path: the split of a file never changes when
others come or go.

Everything here is NumPy and Grain on the host; nothing touches a device.
"""

import dataclasses
import fnmatch
import gzip
import hashlib
import lzma
import os
import pathlib
import sysconfig
from typing import NamedTuple

import grain
import numpy as np

from k3jax.config_data import Source, StdlibCorpus, TextFolder
from k3jax.shapes import PADDING_SEGMENT


class Batch(NamedTuple):
    """Packed rows. Padding has segment -1, weight 0 and an arbitrary valid token."""

    tokens_BT: np.ndarray  # int32
    targets_BT: np.ndarray  # int32
    segments_BT: np.ndarray  # int32, document number within the row
    weights_BT: np.ndarray  # float32


class ByteTokenizer:
    """One token per byte (0..255), then BOS (256) and EOS (257). Round trips any text; `decode` skips BOS and EOS."""

    bos = 256
    eos = 257
    size = 258

    def encode(self, text: str | bytes) -> np.ndarray:
        """UTF-8 bytes of `text` as int32 tokens, without BOS or EOS."""
        data = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, tokens) -> str:
        """Text of `tokens`; bytes that are not UTF-8 become U+FFFD. Raises ValueError for an id outside 0..257."""
        tokens = np.asarray(tokens).reshape(-1)
        unknown = tokens[(tokens < 0) | (tokens >= self.size)]
        if unknown.size:
            raise ValueError(f"token {unknown[0]} is not one of the {self.size} tokens of the byte tokenizer")
        return tokens[tokens < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def check_fits(self, vocabulary: int) -> None:
        """Raises ValueError when a model with `vocabulary` embeddings cannot hold every token."""
        if vocabulary < self.size:
            raise ValueError(f"the tokenizer has {self.size} tokens but the model's vocabulary is only {vocabulary}")


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """Files end to end: document i is data[starts[i] : starts[i + 1]] (uint8), named names[i]."""

    data: np.ndarray
    starts: np.ndarray
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.data[self.starts[index] : self.starts[index + 1]]

    @classmethod
    def join(cls, files: list[tuple[str, bytes]]) -> "Documents":
        """Documents in the order given."""
        starts = np.cumsum([0] + [len(content) for _, content in files], dtype=np.int64)
        data = np.frombuffer(b"".join(content for _, content in files), np.uint8)
        return cls(data=data, starts=starts, names=tuple(name for name, _ in files))


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A source read into memory and split. `fingerprint` names its exact content; `skipped` lists files not UTF-8."""

    train: Documents
    held_out: Documents
    skipped: tuple[str, ...]
    fingerprint: str


def load_corpus(source: Source) -> Corpus:
    """Reads and splits a source. Held-out documents come in hash order, so that a prefix of them is a fair sample.

    Raises FileNotFoundError or NotADirectoryError for a bad folder, ValueError when there is not enough text to split.
    """
    match source:
        case StdlibCorpus():
            where = sysconfig.get_path("stdlib")
            paths = _stdlib_paths(where)
        case TextFolder():
            where = source.path
            paths = _folder_paths(where, source.pattern)
        case _:
            raise TypeError(f"a source is a StdlibCorpus or a TextFolder, got {type(source).__name__}")
    files, skipped = _read_text(where, paths)
    if len(files) < 2:
        raise ValueError(
            f"{where}: a corpus needs two text files, one to train on and one to hold out; found {len(files)} "
            f"(of {len(paths)} files matched, {len(skipped)} were not UTF-8 and the others empty)"
        )
    return _split(files, skipped, source.held_out)


def _split(files: list[tuple[str, bytes]], skipped: list[str], share: float) -> Corpus:
    order = sorted(range(len(files)), key=lambda i: _unit_hash(files[i][0]))
    count = sum(_unit_hash(name) < share for name, _ in files)
    held = order[: min(max(count, 1), len(files) - 1)]
    train = sorted(set(range(len(files))) - set(held))
    digest = hashlib.blake2b(digest_size=8)
    for name, content in files:
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return Corpus(
        train=Documents.join([files[i] for i in train]),
        held_out=Documents.join([files[i] for i in held]),
        skipped=tuple(skipped),
        fingerprint=digest.hexdigest(),
    )


def _unit_hash(name: str) -> float:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") / 2**64


def _walk(root: str, keep_folder, keep_file) -> list[str]:
    """Relative paths with forward slashes, in one order on every file system."""
    found = []
    for folder, children, names in os.walk(root):
        children[:] = [child for child in children if keep_folder(child)]
        found += [os.path.relpath(os.path.join(folder, name), root) for name in names if keep_file(name)]
    return sorted(pathlib.PurePath(path).as_posix() for path in found)


def _stdlib_paths(root: str) -> list[str]:
    foreign = ("site-packages", "dist-packages", "__pycache__")
    return _walk(
        root,
        lambda folder: folder not in foreign and not folder.startswith("config-"),
        lambda name: name.endswith(".py") and not name.startswith(("_sysconfigdata", "sitecustomize", "usercustomize")),
    )


def _folder_paths(root: str, pattern: str) -> list[str]:
    if not os.path.exists(root):
        raise FileNotFoundError(f"text folder {root!r} does not exist")
    if not os.path.isdir(root):
        raise NotADirectoryError(f"text folder {root!r} is not a folder")
    paths = _walk(
        root,
        lambda folder: not folder.startswith("."),
        lambda name: not name.startswith(".") and fnmatch.fnmatch(name, pattern),
    )
    if not paths:
        raise ValueError(f"text folder {root!r} holds no file that matches {pattern!r}")
    return paths


def _read_text(root: str, paths: list[str]) -> tuple[list[tuple[str, bytes]], list[str]]:
    files, skipped = [], []
    for path in paths:
        content = pathlib.Path(root, path).read_bytes()
        try:
            content.decode("utf-8")
        except UnicodeDecodeError:
            skipped.append(path)
            continue
        if content:
            files.append((path, content))
    return files, skipped


class PackedRows:
    """Random access to the rows of length T cut from documents laid end to end; a Grain data source.

    The only copy of the text is the corpus itself: a row is assembled when it is asked for. Document i begins at
    stream position starts[i] + i, because each one adds a BOS.
    """

    def __init__(self, documents: Documents, length: int, tokenizer: ByteTokenizer):
        if length < 1:
            raise ValueError(f"rows need at least one token, got length {length}")
        self._documents = documents
        self._length = length
        self._tokenizer = tokenizer
        self._starts = documents.starts + np.arange(len(documents.starts))

    def __len__(self) -> int:
        return -(-int(self._starts[-1]) // self._length)

    def __repr__(self) -> str:
        return f"PackedRows({len(self)} rows of {self._length})"

    def __getitem__(self, index: int) -> Batch:
        """Row `index` as a Batch without the leading axis."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row, begin = self.padding(), int(index) * self._length
        first = int(np.searchsorted(self._starts, begin, side="right")) - 1
        last = int(np.searchsorted(self._starts[:-1], begin + self._length, side="left"))
        for segment, number in enumerate(range(first, last)):
            self._place(row, segment, number, begin)
        return row

    def padding(self) -> Batch:
        """A row of padding: every position reads BOS, would predict EOS, and counts nothing."""
        return Batch(
            tokens_BT=np.full(self._length, self._tokenizer.bos, np.int32),
            targets_BT=np.full(self._length, self._tokenizer.eos, np.int32),
            segments_BT=np.full(self._length, PADDING_SEGMENT, np.int32),
            weights_BT=np.zeros(self._length, np.float32),
        )

    def _place(self, row: Batch, segment: int, number: int, begin: int) -> None:
        """Writes the part of document `number` that lies in the row that begins at stream position `begin`."""
        text = self._documents[number]
        origin = int(self._starts[number]) - begin
        low, high = max(origin, 0), min(origin + len(text) + 1, self._length)
        inputs = text[max(low - origin - 1, 0) : high - origin - 1]
        targets = text[low - origin : high - origin]
        row.tokens_BT[high - len(inputs) : high] = inputs
        row.targets_BT[low : low + len(targets)] = targets
        row.segments_BT[low:high] = segment
        row.weights_BT[low:high] = 1.0


def train_batches(
    documents: Documents, *, length: int, batch: int, seed: int, tokenizer: ByteTokenizer
) -> grain.MapDataset:
    """An endless random-access data set: `batches[n]` is the batch of step n, a pure function of seed and n.

    Each pass over the rows has its own order. Resuming at step n is starting at index n.

    Raises:
      ValueError: batch or length below 1, or a seed outside 0..2**32-1.
    """
    if batch < 1:
        raise ValueError(f"a batch needs at least one row, got {batch}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"the data seed must lie in 0..2**32-1, got {seed}")
    rows = PackedRows(documents, length, tokenizer)
    return grain.MapDataset.source(rows).shuffle(seed=seed).repeat().batch(batch, batch_fn=_stack)


def _stack(rows) -> Batch:
    return Batch(*(np.stack(field) for field in zip(*rows, strict=True)))


class HeldOutBatches:
    """The held-out text in order, as batches of one shape: every byte and every EOS is a target exactly once.

    `bytes` is the number of bytes predicted, so that bits per byte = (sum of weighted nats) / ln 2 / bytes. Predicting
    EOS is charged as well: the sum is the length of a complete code for these files. With `max_bytes`, only the first
    batches that reach that many bytes are kept, and `bytes` still counts what they predict.
    """

    def __init__(
        self, documents: Documents, *, length: int, batch: int, tokenizer: ByteTokenizer, max_bytes: int | None = None
    ):
        if batch < 1:
            raise ValueError(f"a batch needs at least one row, got {batch}")
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
        self._rows = PackedRows(documents, length, tokenizer)
        self._batch = batch
        self._count, self.bytes = self._measure(documents, batch * length, max_bytes)

    def _measure(self, documents: Documents, step: int, max_bytes: int | None) -> tuple[int, int]:
        """Number of batches of `step` stream positions, and of bytes they predict."""
        total = int(documents.starts[-1])
        count = -(-(total + len(documents)) // step)
        if max_bytes is None or max_bytes >= total:
            return count, total
        ends = documents.starts[1:] + np.arange(len(documents))  # stream position whose target is EOS

        def predicted(batches: int) -> int:
            positions = min(batches * step, total + len(documents))
            return positions - int(np.searchsorted(ends, positions, side="left"))

        batches = max_bytes // step
        while predicted(batches) < max_bytes:
            batches += 1
        return batches, predicted(batches)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < self._count:
            raise IndexError(f"held-out batch {index} of {self._count}")
        first, last = index * self._batch, (index + 1) * self._batch
        rows = [self._rows[number] for number in range(first, min(last, len(self._rows)))]
        return _stack(rows + [self._rows.padding()] * (self._batch - len(rows)))


def compression_baselines(documents: Documents) -> dict[str, dict[str, float]]:
    """Bits per byte of `gzip -9` and `xz -9e` on the same text: {"gzip": {"whole": .., "per_file": ..}, "xz": ..}.

    `whole` compresses all files as one stream; `per_file` compresses each alone and divides all their bits by all
    their bytes.
    """
    compressors = {
        "gzip": lambda data: gzip.compress(data, compresslevel=9, mtime=0),
        "xz": _xz,
    }
    files = [documents[i].tobytes() for i in range(len(documents))]
    scale = 8.0 / len(documents.data)
    return {
        name: {
            "whole": scale * len(compress(documents.data.tobytes())),
            "per_file": scale * sum(len(compress(content)) for content in files),
        }
        for name, compress in compressors.items()
    }


def _xz(data: bytes) -> bytes:
    """As `xz -9e`, with a dictionary no larger than the text: the same size, without clearing 64 MiB for each file."""
    settings = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": max(4096, len(data))}
    return lzma.compress(data, format=lzma.FORMAT_XZ, filters=[settings])
