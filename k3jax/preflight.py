"""What must be there on every host, and alike, before a run computes anything.

Each process says what its host has when they meet (`k3jax.distributed`), process 0 compares, and all are told at once.
The devices are looked at afterwards, because JAX must not touch them before its own service has begun. A message names
the host and what to do there.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import psutil

from k3jax import distributed, runtime
from k3jax.checkpoint import FOLDER
from k3jax.config import ConfigError
from k3jax.config_data import Mixture, TokenRecords
from k3jax.data.records import MANIFEST
from k3jax.distributed import Problem
from k3jax.exits import Exit
from k3jax.run_config import TrainConfig
from k3jax.step import abstract_state
from k3jax.watchdog import CLOCKS

PATIENCE = 20.0  # seconds for a file system to answer
SHARED = 3.0  # seconds in which a file written on one host must be seen on another
PACKAGES = (
    "jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt",
)  # fmt: skip
AGAIN = "make the environment there anew from the same requirements file, or use one image for all"


def facts_of_host(config: TrainConfig, run: pathlib.Path) -> dict[str, Any]:
    """What the host of this process has, in JSON types, with what it finds wrong by itself."""
    problems: list[Problem] = []
    storage = _within("the run folder", lambda: _write_mark(run), Exit.STORAGE, problems)
    _within("the data", lambda: _read_manifests(config), Exit.DATA, problems)
    commit = f"{runtime.commit()} (sources {_sources()})"
    packages = {name: _version(name) for name in PACKAGES}
    return {
        "versions": {"commit": commit, "Python": platform.python_version(), **packages},
        "storage": storage,
        "problems": problems,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _sources() -> str:
    """A digest of all that is imported from this repository: it tells apart what a commit with changes does not."""
    package, digest = pathlib.Path(__file__).parent, hashlib.blake2b(digest_size=4)
    for folder in (package, package.parent / "pallas_kernels"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(package.parent)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _within[T](what: str, ask: Callable[[], T], code: Exit, problems: list[Problem]) -> T | None:
    """What ``ask`` returns; what it raises, and silence, are put down as problems. The thread of a file system that
    never answers is left behind."""
    try:
        return runtime.answer_within(PATIENCE, ask)
    except TimeoutError:
        problems.append((code, f"{what} did not answer in {PATIENCE:.0f} s: the file system is not reachable there"))
    except OSError as error:
        problems.append((code, str(error)))
    return None


def _write_mark(run: pathlib.Path) -> dict[str, Any]:
    """Leaves a file in the run folder for process 0 to find, and says what room there is."""
    try:
        made = not run.exists()
        run.mkdir(parents=True, exist_ok=True)
        _remove_marks_of_the_dead(run)
        mark = run / f"{_own_marks()}{os.getpid()}"
        mark.write_text(f"{time.time()}\n", encoding="utf-8")
        content, free = mark.read_text(encoding="utf-8"), shutil.disk_usage(run).free
        return {"mark": mark.name, "content": content, "free": free, "made": made}
    except OSError as error:
        raise OSError(
            f"the run folder {run} cannot be written: {error}; mount it there for this user, or choose another --run"
        ) from error


def _own_marks() -> str:
    """How the names of this host's marks begin; the number of the process follows."""
    return f".preflight-{socket.gethostname()}-"


def _remove_marks_of_the_dead(run: pathlib.Path) -> None:
    """Those of processes of this host that were ended before process 0 had judged, which removes them."""
    for mark in run.glob(f"{_own_marks()}*"):
        number = mark.name.removeprefix(_own_marks())
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            mark.unlink(missing_ok=True)


def _read_manifests(config: TrainConfig) -> None:
    """Raises OSError where the manifest of a source of token records cannot be read."""
    sources = [config.data, *(stage.data for stage in config.stages if stage.data is not None)]
    parts = [part.source for source in sources if isinstance(source, Mixture) for part in source.parts]
    for source in (*sources, *parts):
        if isinstance(source, TokenRecords):
            path = pathlib.Path(source.path) / MANIFEST
            try:
                json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise OSError(
                    f"the data's manifest {path} cannot be read: {error}; mount the folder there, or make it with "
                    "python -m k3jax.tokenize"
                ) from error


class Judge:
    """Compares what the hosts of a run said, for process 0. ``checkpoint``: bytes of one."""

    def __init__(self, run: pathlib.Path, checkpoint: int):
        self._run, self._checkpoint = run, checkpoint

    def __call__(self, hosts: dict[int, dict[str, Any]]) -> Problem | None:
        """All that is wrong, under the exit code of the first."""
        own = [(code, f"{name_of(hosts, n)}: {text}") for n in hosts for code, text in hosts[n]["facts"]["problems"]]
        found = [*own, *_differences(hosts), *_clocks(hosts), *self._storage(hosts)]
        return (found[0][0], "\n".join(text for _, text in found)) if found else None

    def _storage(self, hosts: dict[int, dict[str, Any]]) -> Iterator[Problem]:
        there = {number: said["facts"]["storage"] for number, said in hosts.items() if said["facts"]["storage"]}
        deadline = time.monotonic() + SHARED
        apart = [number for number, storage in there.items() if not self._found(storage, deadline)]
        if any(storage["made"] for storage in there.values()):
            with contextlib.suppress(OSError):  # a run that ends before it begins leaves no folder
                self._run.rmdir()
        if apart:
            text = f"{_names(hosts, apart)} wrote into another {self._run} than {name_of(hosts, 0)} sees"
            yield Exit.STORAGE, f"{text}: the run folder must be on a file system that all hosts share"
        kept = sum(path.name.isdecimal() for path in (self._run / FOLDER).glob("*"))
        more = max(2 - kept, 1)
        full = [number for number, storage in there.items() if storage["free"] < self._checkpoint * more]
        if full:
            least, size = min(there[number]["free"] for number in full), f"{self._checkpoint / 1e9:.3f} GB"
            text = f"{_names(hosts, full)}: {self._run} has room for {least / 1e9:.3f} GB"
            yield Exit.STORAGE, f"{text}, but {more} checkpoint(s) of {size} must fit; free some there"

    def _found(self, storage: dict[str, Any], deadline: float) -> bool:
        """Whether what a host wrote can be read here; then it is removed."""
        mark = self._run / storage["mark"]
        while True:
            with contextlib.suppress(OSError):
                if mark.read_text(encoding="utf-8") == storage["content"]:
                    mark.unlink()
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)


def _differences(hosts: dict[int, dict[str, Any]]) -> Iterator[Problem]:
    """What is not the same on all: most hosts are taken to be right, process 0's in doubt."""
    for name in hosts[0]["facts"]["versions"]:
        values = {number: said["facts"]["versions"].get(name) for number, said in hosts.items()}
        usual = max(values.values(), key=lambda value: (list(values.values()).count(value), value == values[0]))
        for other in dict.fromkeys(value for value in values.values() if value != usual):
            odd = [number for number, value in values.items() if value == other]
            remedy = f"bring {usual.split()[0]} there, or use one image for all" if name == "commit" else AGAIN
            yield Exit.CONFIGURATION, f"{_names(hosts, odd)}: {name} is {other}, but {usual} elsewhere; {remedy}"


def _clocks(hosts: dict[int, dict[str, Any]]) -> Iterator[Problem]:
    offsets = {number: said["offset"] for number, said in hosts.items()}
    middle = sorted(offsets.values())[(len(offsets) - 1) // 2]
    for number, offset in offsets.items():
        if abs(offset - middle) > CLOCKS:
            way = "ahead of" if offset > middle else "behind"
            text = f"{name_of(hosts, number)}: its clock is {abs(offset - middle):.0f} s {way} the others"
            yield Exit.CONFIGURATION, f"{text}; set it by NTP there (chronyc makestep)"


def name_of(hosts: dict[int, dict[str, Any]], number: int) -> str:
    """A host, with the number of its process."""
    return f"{hosts[number]['host']} (process {number})"


def _names(hosts: dict[int, dict[str, Any]], numbers: list[int]) -> str:
    return distributed.some([name_of(hosts, number) for number in numbers])


def start(
    config: TrainConfig,
    run: pathlib.Path,
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    hosts: tuple[str, ...] = (),
    timeout: float = distributed.TIMEOUT,
) -> None:
    """Joins the processes of a run if all their hosts have what it needs.

    Raises: as `k3jax.distributed.join_processes`; the message has a line for each problem.
    """
    if "://" in str(run) or str(run).startswith(("gs:/", "s3:/")):
        raise ConfigError(f"--run={run}: a run folder is a path; mount the bucket, as launch.render does")
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract_state(config)))
    distributed.join_processes(
        coordinator, processes, process, hosts=hosts, timeout=timeout, facts=facts_of_host(config, run),
        judge=Judge(run, size),
    )  # fmt: skip
