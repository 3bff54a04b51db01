"""The folder of a run: one live process at a time, and small files that are whole or not there."""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import Any


class BusyError(RuntimeError):
    """Another live process has the run; the message names it."""


class RunLock:
    """Holds a run's folder for this process, as a context manager. The operating system lets go of it when the process
    ends, however it ends.

    Raises:
      BusyError: a live process holds it.
    """

    def __init__(self, run: pathlib.Path):
        self._path = run / "lock"
        self._file = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115 (held until __exit__)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip() or "an unknown process"
            self._file.close()
            raise BusyError(f"{run} is in use by {owner}; stop it, or choose another folder with --run") from None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_) -> None:
        self._file.close()


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Adds the path to an OSError that names no file, which is what writing to an open file raises."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes beside the old file and renames, so that a crash or a full disk leaves the old one whole.

    Raises OSError, which names the file.
    """
    fresh = path.with_name(path.name + ".new")
    with naming(path), open(fresh, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Indented JSON, as :func:`write_text`."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a file, or an empty one where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
