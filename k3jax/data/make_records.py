"""From text to a folder of token records, in parallel, the same bytes whatever the number of processes.

The text is read twice: once to split it and to count, once to tokenize it. Nothing but the shards under way is held in
memory. The folder appears under its name when it is complete; only one process at a time makes it.
"""

import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import pathlib
import shutil
import socket
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import NamedTuple

import numpy as np

from k3jax import config_io
from k3jax.config_data import TextSource, Tokenizer
from k3jax.data.documents import DataError
from k3jax.data.records import FORMAT, MANIFEST, SPLITS, describe_file, write_shard
from k3jax.data.text import Text, held_out_order, read_texts
from k3jax.data.tokenizers import make_tokenizer
from k3jax.run_folder import BusyError

SHARD_BYTES = 2**25
_LOCK = "lock"


class Scan(NamedTuple):
    """What the first reading found: the key of every document, whether it is held out, and the bytes of all."""

    keys: np.ndarray
    held_out: np.ndarray
    bytes: int
    skipped: list[str]


def scan(source: TextSource) -> Scan:
    """Reads a source to split it. Raises DataError as `read_texts`, and for fewer than two documents."""
    skipped: list[str] = []
    keys, total = [], 0
    for text in read_texts(source, skipped):
        keys.append(text.key)
        total += len(text.content)
    held_out = np.zeros(len(keys), bool)
    held_out[held_out_order(source, keys, skipped)] = True
    return Scan(np.array(keys, np.uint64), held_out, total, skipped)


def make_records(
    source: TextSource,
    tokenizer: Tokenizer,
    out: pathlib.Path,
    *,
    workers: int,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict:
    """Tokenizes a source into the folder ``out``, which must not exist or be empty.

    Args:
      workers: processes that tokenize.
      shard_bytes: text of a shard, at least; a shard ends with the document that reaches it.
      progress: called with the bytes done and the bytes in all.

    Returns:
      the manifest.

    Raises:
      DataError: the source cannot be read, or changes meanwhile; ``out`` is in use. ConfigError: the tokenizer's.
      BusyError: another live process makes the same folder. OSError: the folder cannot be written.
    """
    _check_new(out)
    made = make_tokenizer(tokenizer)
    with _unfinished(out) as unfinished:
        _check_new(out)  # again: another process may have made it just now
        found = scan(source)
        splits = {split: Split(unfinished, split) for split in SPLITS}
        with _pool(tokenizer, workers) as pool:
            done = 0
            for split, names, result in _finished(pool, workers, _shards(source, found, shard_bytes), unfinished):
                splits[split].add(names, *result)
                done += int(result[1][:, 1].sum())
                progress(done, found.bytes)
        manifest = {
            "format": FORMAT,
            "source": {config_io.TAG: type(source).__name__, **config_io.to_dict(source)},
            "source_keys": hashlib.blake2b(found.keys.tobytes(), digest_size=16).hexdigest(),
            "tokenizer": {
                "config": {config_io.TAG: type(tokenizer).__name__, **config_io.to_dict(tokenizer)},
                **{name: getattr(made, name) for name in ("hash", "size", "bos", "eos")},
            },
            "dtype": made.dtype.name,
            "skipped": len(found.skipped),
            "splits": {name: split.finish() for name, split in splits.items()},
        }
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, out)
    (out / _LOCK).unlink()  # not before: without it another process would take the folder for its own
    return manifest


def _check_new(out: pathlib.Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} is not an empty folder: token records go to a new one")


@contextlib.contextmanager
def _unfinished(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """The folder beside ``out`` that this process alone fills and renames, without what a killed one left there. It is
    removed when that fails.

    Raises BusyError: a live process has it. The operating system lets go of the lock of one that ends.
    """
    folder = out.with_name(f".{out.name}.unfinished")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _LOCK, "a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / _LOCK))
        except (BlockingIOError, FileNotFoundError):
            ours = False
        if not ours:  # held by another process, which may have finished and removed it meanwhile
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            raise BusyError(f"{out} is being made by {owner}; wait for it, or choose another folder")
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        try:
            for path in folder.iterdir():
                if path.name != _LOCK:
                    path.unlink()
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


class Split:
    """The files of one split as they grow."""

    def __init__(self, folder: pathlib.Path, name: str):
        self._folder, self._name = folder, name
        self._shards: list[dict] = []
        self._index: list[np.ndarray] = []

    def add(self, names: list[str], shard: dict, index: np.ndarray) -> None:
        self._shards.append(shard)
        self._index.append(index)
        with open(self._folder / f"{self._name}.names.txt", "ab") as file:
            file.writelines(name.encode("unicode_escape") + b"\n" for name in names)

    def finish(self) -> dict:
        """Writes the index, and returns the split's entry in the manifest."""
        index = np.concatenate(self._index)
        np.save(self._folder / f"{self._name}.index.npy", index)
        return {
            "documents": len(index),
            "tokens": int(index[:, 0].sum()),
            "bytes": int(index[:, 1].sum()),
            "shards": self._shards,
            "files": [describe_file(self._folder / f"{self._name}.{end}") for end in ("index.npy", "names.txt")],
        }


def _shards(source: TextSource, found: Scan, shard_bytes: int) -> Iterator[tuple[str, int, list[Text]]]:
    """(split, number in the split, documents) of every shard, as the second reading comes to its end."""
    waiting: dict[str, list[Text]] = {split: [] for split in SPLITS}
    sizes, numbers = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    count = 0
    for text in read_texts(source, []):
        if count == len(found.keys) or text.key != found.keys[count]:
            raise DataError(f"{text.name}: the source changed while it was tokenized")
        split = SPLITS[int(found.held_out[count])]
        count += 1
        waiting[split].append(text)
        sizes[split] += len(text.content)
        if sizes[split] >= shard_bytes:
            yield split, numbers[split], waiting[split]
            waiting[split], sizes[split] = [], 0
            numbers[split] += 1
    if count != len(found.keys):
        raise DataError(f"the source changed while it was tokenized: {len(found.keys)} documents, then {count}")
    for split, texts in waiting.items():
        if texts:
            yield split, numbers[split], texts


def _finished(pool, workers: int, shards, folder) -> Iterator[tuple[str, list[str], tuple[dict, np.ndarray]]]:
    """(split, names of the documents, what `_tokenize_shard` returns) in the order of the shards."""
    running: deque[tuple[str, list[str], Future]] = deque()
    for split, number, texts in shards:
        path = folder / f"{split}-{number:05d}.array_record"
        running.append((split, [text.name for text in texts], pool.submit(_tokenize_shard, path, texts)))
        if len(running) > workers:
            split, names, future = running.popleft()
            yield split, names, future.result()
    for split, names, future in running:
        yield split, names, future.result()


@contextlib.contextmanager
def _pool(tokenizer: Tokenizer, workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes of their own, each with the tokenizer; what waits is dropped when something fails."""
    fresh = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=fresh, initializer=_begin, initargs=(tokenizer,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(tokenizer: Tokenizer) -> None:
    global _TOKENIZER
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _TOKENIZER = make_tokenizer(tokenizer)


def _tokenize_shard(path: pathlib.Path, texts: list[Text]) -> tuple[dict, np.ndarray]:
    """Writes a shard; returns its entry in the manifest, and tokens, bytes and key of each document."""
    tokens = [found.astype(_TOKENIZER.dtype) for found in _TOKENIZER.encode_batch([text.content for text in texts])]
    columns = [list(map(len, tokens)), [len(text.content) for text in texts]]
    keys = np.array([text.key for text in texts], np.uint64).view(np.int64)
    return write_shard(path, tokens), np.stack([*np.array(columns, np.int64), keys], axis=1)
