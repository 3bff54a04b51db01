"""What every program does before its first computation."""

import concurrent.futures
import contextlib
import functools
import gc
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
import psutil
from absl import app, logging
from jax.experimental import multihost_utils

CACHE_VARIABLE = "K3JAX_CACHE"
TPU_FLAGS = "--xla_tpu_enable_async_ragged_all_to_all=true"
"""Of the TPU's compiler (libtpu 0.0.52): a TPU7x carries tokens between experts beside other work."""


def start() -> None:
    """Turns on the persistent compilation cache, and keeps libraries' progress notes off the screen.

    The cache lies in ``$K3JAX_CACHE`` or ``~/.cache/k3jax``, unless JAX has one already. A compiled step is keyed by
    its program and the compiler's version, so a cache is never stale. A TPU's compiler is given :data:`TPU_FLAGS`, and
    after them what ``$LIBTPU_INIT_ARGS`` says.
    """
    os.environ["LIBTPU_INIT_ARGS"] = f"{TPU_FLAGS} {os.environ.get('LIBTPU_INIT_ARGS', '')}".strip()
    logging.set_verbosity(logging.WARNING)
    if jax.config.jax_compilation_cache_dir is None:
        default = pathlib.Path.home() / ".cache" / "k3jax"
        jax.config.update("jax_compilation_cache_dir", os.environ.get(CACHE_VARIABLE, str(default)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def start_without_devices() -> None:
    """:func:`start` of a program that compiles for devices that are only described.

    A machine with libtpu and no TPU would look for one, and ask its cloud for its place in a slice.
    """
    if jax.config.jax_platforms is None:
        jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    start()


def barrier(name: str) -> None:
    """Returns when every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def from_first_process(text: str | None) -> str | None:
    """What process 0 says, on all of them."""
    if jax.process_count() == 1:
        return text
    data = np.zeros(1024, np.uint8)
    encoded = (text or "").encode()[: data.size]
    data[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    data = np.asarray(multihost_utils.broadcast_one_to_all(data))
    return data.tobytes().rstrip(b"\0").decode(errors="replace") or None


def answer_within[T](seconds: float, ask: Callable[[], T]) -> T:
    """What ``ask`` returns. Raises what it raises, or TimeoutError: a thread that waits for a dead file system or
    network is left behind."""
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run():
        try:
            answer.set_result(ask())
        except BaseException as error:  # raised by the waiting thread
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer.result(timeout=seconds)


def refuse_stray(argv: list[str]) -> None:
    """Raises a usage error for arguments that belong to no flag: ``k3jax.train tiny`` must not train the default."""
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1]!r} belongs to no flag")


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection inside. Tracing makes millions of objects that live on, and looking through them again and
    again takes a sixth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def compiler_options() -> dict[str, int]:
    """For the train step on a CPU: less optimized machine code, quicker to compile by a fifth and no slower to run."""
    return {"xla_backend_optimization_level": 1} if jax.devices()[0].platform == "cpu" else {}


def seconds_since_start() -> float:
    """Wall-clock seconds since this process was started, imports included."""
    return time.time() - psutil.Process().create_time()


def environment() -> dict[str, str]:
    """Versions, devices and commit of this process, for the record of a run."""
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "platform": platform.platform(),
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "cores": str(os.cpu_count()),
        "commit": commit(),
        "command": _command(),
    }


def _command() -> str:
    """This process's command, to be pasted."""
    spec = sys.modules["__main__"].__spec__
    program = ["python", "-m", spec.name] if spec else ["python", sys.argv[0]]
    return shlex.join([*program, *sys.argv[1:]])


@functools.cache
def commit() -> str:
    """The commit of the checkout this package runs from, as it is when first asked for, with ``+changes`` if it has
    any; ``unknown`` elsewhere."""
    root = pathlib.Path(__file__).parent

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
