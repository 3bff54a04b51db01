"""Brings run folders back from where a spec put them, for `k3jax.report` and the tables of the experiments.

    python -m launch.collect run.json --to runs

Folders of a path are copied, those of a bucket downloaded (with `gcsfs` or `s3fs`: requirements-optional.txt). What is
here already is not fetched again, and a file appears when it is whole, so that the same command goes on after a break.
Checkpoints stay where they are unless asked for.
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

import fsspec
from absl import flags

from k3jax import distributed, runtime
from k3jax.config import ConfigError, require
from k3jax.exits import Exit
from launch import cli, storage
from launch import spec as specs
from launch.spec import RunSpec

LEFT_OUT = ("checkpoints", "damaged")
LIST = ".collected.jsonl"
SOURCE = ""  # no file's name: where those of the list come from
PATIENCE = 45.0  # seconds for a storage to answer
AT_ONCE = 8
PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}


class CollectError(RuntimeError):
    """Storage that is not there, does not answer, or refuses, or files that cannot be written here; the message names
    it."""


class File(NamedTuple):
    """A file of a run: where it is, by its path below the run's folder, its bytes, and what changes when it does."""

    source: str
    name: str
    size: int
    changed: str


def collect(spec: RunSpec, to: pathlib.Path, *, checkpoints: bool = False) -> tuple[pathlib.Path, int, int]:
    """Copies the run folder of a spec, or those of its study, into ``to/NAME``. What is gone when it is fetched, and
    links to nothing or to folders, are left out, and that is said.

    Returns:
      that folder, the number of files in it now, and how many were fetched.

    Raises:
      ConfigError: a bucket without credentials here, a volume of a cluster, or a folder that holds another run.
      CollectError: see there.
    """
    place = storage.parse(spec.runs)
    root = f"{place.text.rstrip('/')}/{spec.name}"
    if place.kind == "path" and pathlib.Path(root).resolve() == (to / spec.name).resolve():
        raise ConfigError(f"{root} is here already: --to = {str(to)!r} is its own storage")
    system = _within(place, lambda: _system(place))
    files = _within(place, lambda: list(_files(system, root, () if checkpoints else LEFT_OUT)))
    if not files:
        raise CollectError(f"there is nothing at {root}: has the run begun, and is {spec.runs!r} its storage?")
    here = Collected(to / spec.name, str(pathlib.Path(root).resolve()) if place.kind == "path" else root)
    wanted = [file for file in files if not here.has(file)]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        there = list(pool.map(lambda file: here.fetch(_blocks(system, file, place), file), wanted))
    gone = [file.name for file, found in zip(wanted, there) if not found]
    if gone:
        print(f"note: left out, because they are gone or links to nothing: {distributed.some(gone)}", flush=True)
    return here.folder, len(files) - len(gone), len(wanted) - len(gone)


def _system(place: storage.Place) -> fsspec.AbstractFileSystem:
    if place.kind == "pvc":
        raise ConfigError(
            f"runs = {place.text!r} is a volume of a cluster, which this machine cannot reach; copy the folder from a "
            "Pod that mounts it: kubectl cp POD:/mnt/runs/NAME runs/NAME"
        )
    if place.kind == "path":
        return fsspec.filesystem("file")
    storage.check_credentials(place)
    try:
        return fsspec.filesystem(place.kind, skip_instance_cache=True)
    except ImportError as error:
        raise ConfigError(
            f"runs = {place.text!r} needs a package that is not installed: pip install {PACKAGES[place.kind]}"
        ) from error


def _within[T](place: storage.Place, ask: Callable[[], T]) -> T:
    """What ``ask`` returns, or CollectError; a client that goes on trying is left behind."""
    with _named(place):
        try:
            return runtime.answer_within(PATIENCE, ask)
        except TimeoutError:
            text = f"storage {place.text!r} gave no answer in {PATIENCE:.0f} s: is there a network?"
            raise CollectError(text) from None


@contextlib.contextmanager
def _named(place: storage.Place) -> Iterator[None]:
    """Whatever a storage's client raises, as CollectError."""
    try:
        yield
    except (CollectError, ConfigError):
        raise
    except FileNotFoundError as error:
        raise CollectError(
            f"there is nothing at {error.filename or error}: has the run begun, and is {place.text!r} its storage?"
        ) from error
    except Exception as error:
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CollectError(f"storage {place.text!r}: {first}") from error


def _files(system: fsspec.AbstractFileSystem, root: str, left_out: tuple[str, ...]) -> Iterator[File]:
    """All files below a folder. Folders that are left out are not even listed: a checkpoint has many files."""
    base = system._strip_protocol(root)
    for _, folders, files in system.walk(root, detail=True, on_error="raise"):
        for name in left_out:
            folders.pop(name, None)
        for found in files.values():
            name = os.path.relpath(found["name"], base)
            yield File(found["name"], name, found["size"], _changed(found))


def _changed(found: dict[str, Any]) -> str:
    """What differs between two versions of a file: its digest where the storage has one, else its time."""
    keys = ("etag", "ETag", "md5Hash", "mtime", "LastModified", "created")
    return str(next((found[key] for key in keys if found.get(key)), ""))


def _blocks(system: fsspec.AbstractFileSystem, file: File, place: storage.Place) -> Iterator[bytes] | None:
    """The content of a file; None where there is none any more, or a link to nothing or to a folder."""
    with _named(place):
        try:
            source = system.open(file.source, "rb")
        except (FileNotFoundError, IsADirectoryError):
            return None
    return _read(source, place)


def _read(source: IO[bytes], place: storage.Place) -> Iterator[bytes]:
    with _named(place), source:
        while block := source.read(1 << 20):
            yield block


@contextlib.contextmanager
def _here(path: pathlib.Path) -> Iterator[None]:
    """What the file system of this machine raises, as CollectError."""
    try:
        yield
    except OSError as error:
        raise CollectError(f"cannot write {error.filename or path}: {error.strerror or error}") from error


class Collected:
    """A run folder on this machine, with a list of the versions of files that it has.

    Raises:
      ConfigError: the folder has files that come from elsewhere than ``source``, which the list names.
      CollectError: it cannot be read or written.
    """

    def __init__(self, folder: pathlib.Path, source: str):
        self.folder, self._lock = folder, threading.Lock()
        self._list = folder / LIST
        self._known: dict[str, str] = {}
        with _here(folder):
            folder.mkdir(parents=True, exist_ok=True)
            has_list = self._list.exists()
            text = self._list.read_text(encoding="utf-8", errors="replace") if has_list else ""
            foreign = not has_list and any(folder.iterdir())
        for line in text.splitlines():
            with contextlib.suppress(ValueError, TypeError):  # a line whose writer was killed
                self._known |= json.loads(line)
        require(not foreign, f"{folder} holds files that were not collected; give another folder with --to")
        before = self._known.get(SOURCE, source)
        require(before == source, f"{folder} was collected from {before}, not {source}; give another folder with --to")
        if SOURCE not in self._known or not text.endswith("\n"):
            self._note(SOURCE, source, begin="\n" if text else "")

    def has(self, file: File) -> bool:
        """Whether this version of a file is here."""
        path = self.folder / file.name
        same = file.changed != "" and self._known.get(file.name) == file.changed
        with _here(path):
            return same and path.exists() and path.stat().st_size == file.size

    def fetch(self, blocks: Iterator[bytes] | None, file: File) -> bool:
        """Writes a file beside the old one and renames. One that grows meanwhile is fetched again the next time.

        Returns:
          whether it was there: not where ``blocks`` are None.
        """
        if blocks is None:
            return False
        path = self.folder / file.name
        part = path.with_name(f".{path.name}.part")
        with _here(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(part, "wb") as copy:
                copy.writelines(blocks)
            os.replace(part, path)
        self._note(file.name, file.changed)
        return True

    def _note(self, name: str, text: str, begin: str = "") -> None:
        """A line of the list."""
        with self._lock, _here(self._list), open(self._list, "a", encoding="utf-8") as known:
            known.write(begin + json.dumps({name: text}) + "\n")


def main(argv: list[str]) -> None:
    given = flags.FLAGS
    if len(argv) < 2:
        raise cli.UsageError("one spec or more are needed, got none")
    try:
        for path in argv[1:]:
            folder, files, fetched = collect(specs.load(path), pathlib.Path(given.to), checkpoints=given.checkpoints)
            print(f"{folder}: {files} files, {fetched} of them new")
            if (folder / "metrics.jsonl").exists():
                print(f"next: python -m k3jax.report {folder}")
    except (ConfigError, CollectError) as error:
        print(f"launch.collect: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # A client that goes on trying in its thread would keep the interpreter from ending.
        os._exit(Exit.CONFIGURATION if isinstance(error, ConfigError) else Exit.STORAGE)


if __name__ == "__main__":
    flags.DEFINE_string("to", "runs", "the folder that gets a folder for each spec's name")
    flags.DEFINE_bool("checkpoints", False, "also fetch the checkpoints")
    cli.start(main, "python -m launch.collect SPEC [SPEC ...] [--to FOLDER] [--checkpoints]")
