"""Token ids on disk: ArrayRecord files, an index of lengths, and a manifest that says what they hold.

A folder holds, for each split: ``SPLIT-00000.array_record`` and so on, whose records are runs of at most CHUNK tokens
of one document, in the smallest integers that hold them; ``SPLIT.index.npy``, int64 [N, 3], tokens, bytes of text and
key (the order of held-out documents) of each document; ``SPLIT.names.txt``, a name a line with escapes, only read for
messages.
``manifest.json`` has the source, the tokenizer, counts, and the size and digest of every file.
"""

import bisect
import hashlib
import itertools
import json
import os
import pathlib
import threading

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from k3jax.data.documents import DataError, Document, read_text_part

FORMAT = 1
CHUNK = 65536
MANIFEST = "manifest.json"
SPLITS = ("train", "held_out")

_FILE = {"file": str, "size": int, "digest": str}
_SPLIT = {"documents": int, "tokens": int, "bytes": int, "shards": [{"records": int, **_FILE}], "files": [_FILE]}
_FIELDS = {
    "dtype": str,
    "tokenizer": {"config": dict, "hash": str, "size": int, "bos": int, "eos": int},
    "splits": dict.fromkeys(SPLITS, _SPLIT),
}


def write_shard(path: pathlib.Path, documents: list[np.ndarray]) -> dict:
    """Writes the tokens of some documents, and returns the shard's entry in the manifest.

    Raises OSError when the file does not hold all of them afterwards, for example on a full disk.
    """
    writer = ArrayRecordWriter(str(path), "group_size:1,zstd:1")
    records = 0
    for tokens in documents:
        for start in range(0, len(tokens), CHUNK):
            writer.write(tokens[start : start + CHUNK].tobytes())
            records += 1
    writer.close()
    if records:
        reader = _open(str(path))
        if not reader.ok() or reader.num_records() != records:
            raise OSError(f"{path}: {records} records were written, but {reader.num_records()} can be read")
        reader.close()
    return {"records": records, **describe_file(path)}


def _open(path: str) -> ArrayRecordReader:
    """For random access: nothing is read ahead, and the buffer is small, because every shard has one."""
    return ArrayRecordReader(path, "readahead_buffer_size:0,max_parallelism:0", file_reader_buffer_size=65536)


def describe_file(path: pathlib.Path) -> dict:
    """{"file": name, "size": bytes, "digest": BLAKE2b of the content}."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return {"file": path.name, "size": path.stat().st_size, "digest": digest}


def read_manifest(folder: str | pathlib.Path) -> dict:
    """The manifest of a folder of token records, after checking that every file is the one it lists.

    The index and the names are read and must have their digests. Shards, which may be terabytes, must only have their
    size: a record that changed is noticed when it is read, by ArrayRecord's checksums.

    Raises DataError: no manifest, one of another format or without a field, a file that is missing or another one.
    """
    folder = pathlib.Path(folder)
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{folder} holds no {MANIFEST}: python -m k3jax.tokenize makes such a folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path}: not a manifest of format {FORMAT}; tokenize the source again")
    _check_fields(manifest, _FIELDS, f"{path}: the manifest")
    if manifest["dtype"] not in ("uint8", "uint16", "uint32"):
        raise DataError(f"{path}: dtype {manifest['dtype']!r}, but tokens are uint8, uint16 or uint32")
    for split in SPLITS:
        entries = manifest["splits"][split]
        files = [entry["file"] for entry in entries["files"]]
        if files != [f"{split}.index.npy", f"{split}.names.txt"]:
            raise DataError(f"{path}: the files of {split} are {files}, but they must be its index and its names")
        for entry in [*entries["shards"], *entries["files"]]:
            _check_file(folder, entry, content=entry in entries["files"])
    return manifest


def _check_fields(found, wanted, where: str) -> None:
    """Raises DataError where JSON lacks a field of ``wanted``, {name: type, fields, or a list of one of them}."""
    kind = wanted if isinstance(wanted, type) else type(wanted)
    if not isinstance(found, kind) or isinstance(found, bool):
        raise DataError(f"{where} is {type(found).__name__}, but it must be {kind.__name__}; tokenize the source again")
    if isinstance(wanted, list):
        for number, value in enumerate(found):
            _check_fields(value, wanted[0], f"{where}[{number}]")
    if isinstance(wanted, dict):
        for name, value in wanted.items():
            if name not in found:
                raise DataError(f"{where} has no field {name!r}; tokenize the source again")
            _check_fields(found[name], value, f"{where}.{name}")


def _check_file(folder: pathlib.Path, entry: dict, *, content: bool) -> None:
    path = folder / entry["file"]
    if not path.is_file():
        raise DataError(f"{path} is missing, but the manifest lists it")
    if path.stat().st_size != entry["size"]:
        raise DataError(f"{path} has {path.stat().st_size} bytes, but the manifest says {entry['size']}")
    if content:
        try:
            digest = describe_file(path)["digest"]
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from error
        if digest != entry["digest"]:
            raise DataError(
                f"{path} is damaged: its digest is {digest}, but the manifest says {entry['digest']}; "
                "copy it again, or tokenize the source again"
            )


def _read_index(path: pathlib.Path, split: dict) -> np.ndarray:
    """int64 [N, 3]. Raises DataError: another array than the split's entry in the manifest tells of."""
    try:
        index = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: {error}") from error
    if index.ndim != 2 or index.shape[1] != 3 or index.dtype != np.int64 or (index[:, :2] < 0).any():
        raise DataError(f"{path} holds {index.dtype} {list(index.shape)}, but an index is int64 [N, 3], not negative")
    wanted = [split["documents"], split["tokens"], split["bytes"], sum(shard["records"] for shard in split["shards"])]
    records = -(-index[:, 0] // CHUNK)
    found = [len(index), *(int(column.sum()) for column in (index[:, 0], index[:, 1], records))]
    if found != wanted:
        raise DataError(f"{path} has documents, tokens, bytes, records {found}, but the manifest says {wanted}")
    return index


def check_tokenizer(folder: str, manifest: dict, tokenizer) -> None:
    """Raises DataError when the records were made by another tokenizer than the run's."""
    made = manifest["tokenizer"]
    if made["hash"] != tokenizer.hash:
        raise DataError(
            f"{folder} was tokenized by {made['config']} (hash {made['hash']}, {made['size']} tokens), but the run's "
            f"tokenizer has the hash {tokenizer.hash} and {tokenizer.size} tokens"
        )


class RecordDocuments:
    """The documents of one split of a folder of token records; nothing is read but what is asked for.

    Held-out documents come in the order of their keys, as from the text itself.

    Raises DataError when the index is not that of the manifest.
    Raises, on reading: DataError with the file and the record for one that is corrupt, and for a file that is gone.
    """

    def __init__(self, folder: str | pathlib.Path, split: str, manifest: dict):
        self.name = str(folder)
        self.bos, self.eos = manifest["tokenizer"]["bos"], manifest["tokenizer"]["eos"]
        index = _read_index(pathlib.Path(folder) / f"{split}.index.npy", manifest["splits"][split])
        records = -(-index[:, 0] // CHUNK)
        first = np.cumsum(records) - records
        order = np.argsort(index[:, 2].view(np.uint64), kind="stable") if split == "held_out" else np.arange(len(index))
        self.lengths, self.bytes = index[order, 0] + 1, index[order, 1]
        self._first, self._order = first[order], order
        self._names = pathlib.Path(folder) / f"{split}.names.txt"
        self._dtype = np.dtype(manifest["dtype"])
        shards = manifest["splits"][split]["shards"]
        self._paths = [str(pathlib.Path(folder) / shard["file"]) for shard in shards]
        self._shard_ends = list(itertools.accumulate(shard["records"] for shard in shards))
        self._open_files()

    def _open_files(self) -> None:
        self._readers: dict[str, ArrayRecordReader] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name not in ("_readers", "_lock")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._open_files()

    def title(self, index: int) -> str:
        names = self._names.read_bytes().splitlines()
        return names[self._order[index]].decode("unicode_escape")

    def __getitem__(self, index: int) -> Document:
        return self.part(index, 0, int(self.lengths[index]))

    def part(self, index: int, start: int, stop: int) -> Document:
        length, first = int(self.lengths[index]), int(self._first[index])

        def read(low: int, high: int) -> np.ndarray:
            chunks = range(low // CHUNK, -(-high // CHUNK))
            found = [self._record(first + i, min(CHUNK, length - 1 - i * CHUNK)) for i in chunks]
            tokens = np.concatenate(found) if len(found) > 1 else found[0]
            return tokens[low - chunks[0] * CHUNK : high - chunks[0] * CHUNK]

        return read_text_part(read, length, int(self.bytes[index]), start, stop, self.bos, self.eos)

    def _record(self, record: int, count: int) -> np.ndarray:
        """`count` tokens, by the number of the record in the split."""
        shard = bisect.bisect_right(self._shard_ends, record)
        number = record - (self._shard_ends[shard - 1] if shard else 0)
        path = self._paths[shard]
        with self._lock:  # seek and read take a twentieth of the time of a read by number, but have a state
            reader = self._reader(path)
            try:
                reader.seek(number)
                data = reader.read()
            except (RuntimeError, IndexError, ValueError) as error:
                del self._readers[path]  # after a failure it would fail for every record
                gone = "" if os.path.exists(path) else ": the file is gone"
                raise DataError(f"{path}: record {number} cannot be read{gone}: {error}") from error
        tokens = np.frombuffer(data, self._dtype)
        if len(tokens) != count:
            raise DataError(f"{path}: record {number} holds {len(tokens)} tokens, but the index says {count}")
        return tokens

    def _reader(self, path: str) -> ArrayRecordReader:
        if path not in self._readers:
            if not os.path.exists(path):
                raise DataError(f"{path} is gone since the run began")
            self._readers[path] = _open(path)
        return self._readers[path]
