"""The text behind a source: folders, JSON lines and Parquet files to named documents, split into training and held-out.

Files are split by a hash of their relative path, lines and rows by a hash of their text: the side of a document never
changes when others come or go, and equal lines are on the same side.
"""

import dataclasses
import fnmatch
import glob
import gzip
import hashlib
import json
import os
import pathlib
import sysconfig
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from k3jax.config_data import JsonLines, Parquet, StdlibCorpus, TextFolder, TextSource
from k3jax.data.documents import DataError


class Text(NamedTuple):
    """One document. `key` is a 64-bit hash, evenly spread, that decides the side and the order of held-out text."""

    name: str
    content: bytes
    key: int


@dataclasses.dataclass(frozen=True, eq=False)
class Texts:
    """Documents end to end: document i is data[starts[i] : starts[i + 1]] (uint8, UTF-8), named names[i]."""

    data: np.ndarray
    starts: np.ndarray
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> bytes:
        return self.data[self.starts[index] : self.starts[index + 1]].tobytes()

    @classmethod
    def join(cls, files: list[tuple[str, bytes]]) -> "Texts":
        """Documents in the order given."""
        starts = np.cumsum([0] + [len(content) for _, content in files], dtype=np.int64)
        data = np.frombuffer(b"".join(content for _, content in files), np.uint8)
        return cls(data=data, starts=starts, names=tuple(name for name, _ in files))


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A text source read into memory and split. `fingerprint` names its exact content; `skipped` lists documents that
    are not UTF-8."""

    train: Texts
    held_out: Texts
    skipped: tuple[str, ...]
    fingerprint: str


def load_corpus(source: TextSource) -> Corpus:
    """Reads and splits a source. Held-out documents come in hash order, so that a prefix of them is a fair sample.

    Raises DataError as :func:`read_texts`, and when there are fewer than two documents.
    """
    skipped: list[str] = []
    texts = list(read_texts(source, skipped))
    held = held_out_order(source, [text.key for text in texts], skipped)
    train = sorted(set(range(len(texts))) - set(held))
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(f"{text.name}\0{len(text.content)}\0".encode())
        digest.update(text.content)
    return Corpus(
        train=Texts.join([texts[i][:2] for i in train]),
        held_out=Texts.join([texts[i][:2] for i in held]),
        skipped=tuple(skipped),
        fingerprint=digest.hexdigest(),
    )


def held_out_order(source: TextSource, keys: list[int], skipped: list[str]) -> list[int]:
    """Indices of the held-out documents, by rising key: those below the share, but at least one and never all.

    Raises DataError for fewer than two documents.
    """
    if len(keys) < 2:
        where = sysconfig.get_path("stdlib") if isinstance(source, StdlibCorpus) else source.path
        raise DataError(
            f"{where}: a corpus needs two text documents, one to train on and one to hold out; found {len(keys)} "
            f"({len(skipped)} were not UTF-8, empty ones do not count)"
        )
    order = sorted(range(len(keys)), key=keys.__getitem__)
    count = sum(key < source.held_out * 2.0**64 for key in keys)
    return order[: min(max(count, 1), len(keys) - 1)]


def read_texts(source: TextSource, skipped: list[str]) -> Iterator[Text]:
    """The documents of a source, in one order on every file system; names of what is not UTF-8 go to `skipped`.

    Raises:
      DataError: no such folder or file, one that cannot be listed or read, nothing that matches, a line that is no JSON
        object with the field, a Parquet file without the column or with a string that is not UTF-8.
    """
    match source:
        case StdlibCorpus():
            root = sysconfig.get_path("stdlib")
            found = _read_files(root, _stdlib_paths(root))
        case TextFolder():
            found = _read_files(source.path, _folder_paths(source.path, source.pattern))
        case JsonLines():
            found = _read_lines(source)
        case Parquet():
            found = _read_parquet(source)
        case _:
            raise TypeError(f"a text source is a folder, JSON lines or Parquet, got {type(source).__name__}")
    for text in found:
        try:
            text.content.decode("utf-8")
        except UnicodeDecodeError:
            skipped.append(text.name)
            continue
        if text.content:
            yield text


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def _shown(path: str) -> str:
    """A path as messages and names write it: bytes that are not UTF-8, which no output could take, as escapes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _read_files(root: str, paths: list[str]) -> Iterator[Text]:
    for path in paths:
        try:
            content = pathlib.Path(root, path).read_bytes()
        except OSError as error:
            raise DataError(f"{_shown(os.path.join(root, path))}: {error.strerror or error}") from error
        yield Text(_shown(path), content, _hash(os.fsencode(path)))


def _walk(root: str, keep_folder, keep_file) -> list[str]:
    """Relative paths with forward slashes."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{_shown(error.filename or root)}: {error.strerror or error}") from error

    found = []
    for folder, children, names in os.walk(root, onerror=refuse):
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
        raise DataError(f"text folder {root!r} does not exist")
    if not os.path.isdir(root):
        raise DataError(f"text folder {root!r} is not a folder")
    paths = _walk(
        root,
        lambda folder: not folder.startswith("."),
        lambda name: not name.startswith(".") and fnmatch.fnmatch(name, pattern),
    )
    if not paths:
        raise DataError(f"text folder {root!r} holds no file that matches {pattern!r}")
    return paths


def _files(pattern: str) -> list[str]:
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
    if not paths:
        raise DataError(f"no file matches {pattern!r}")
    return paths


def _read_lines(source: JsonLines) -> Iterator[Text]:
    for path in _files(source.path):
        number = 0
        try:
            with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if not line.isspace():
                        name = f"{_shown(path)}:{number}"
                        content = _field(line, source.field, name).encode("utf-8", "surrogatepass")
                        yield Text(name, content, _hash(content))
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{_shown(path)}: cannot be read after line {number}: {error}") from error


def _field(line: bytes, field: str, name: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{name}: not JSON: {error}") from error
    except RecursionError:
        raise DataError(f"{name}: JSON that is nested too deeply to be read") from None
    if not isinstance(record, dict):
        raise DataError(f"{name}: {type(record).__name__}, but every line must be a JSON object")
    if field not in record:
        raise DataError(f"{name}: no field {field!r}; the fields are: {', '.join(record) or 'none'}")
    if not isinstance(record[field], str):
        raise DataError(f"{name}: field {field!r} holds {type(record[field]).__name__}, but it must hold a string")
    return record[field]


def _read_parquet(source: Parquet) -> Iterator[Text]:
    from pyarrow import ArrowException, parquet  # a quarter of a second that only this source needs

    for path in _files(source.path):
        shown, row = _shown(path), 0
        try:
            with parquet.ParquetFile(path) as file:
                _check_column(file.schema_arrow, source.column, shown)
                for batch in file.iter_batches(columns=[source.column], batch_size=1024):
                    for value in _strings(batch.column(0), shown, row):
                        content = (value or "").encode("utf-8", "surrogatepass")
                        yield Text(f"{shown}:row {row}", content, _hash(content))
                        row += 1
        except (ArrowException, OSError) as error:
            raise DataError(f"{shown}: cannot be read from row {row} on: {error}") from error


def _check_column(schema, column: str, path: str) -> None:
    from pyarrow import types

    count = schema.names.count(column)
    if count != 1:
        found = f"{count} columns" if count else "no column"
        raise DataError(f"{path}: {found} {column!r}; the columns are: {', '.join(schema.names)}")
    kind = schema.field(column).type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise DataError(f"{path}: column {column!r} holds {kind}, but it must hold strings")


def _strings(column, path: str, row: int) -> list[str | None]:
    """The values of a part of a column that begins with ``row``."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # which does not say where
        for number, value in enumerate(column, start=row):
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                raise DataError(f"{path}:row {number}: not UTF-8: {error}") from error
        raise
