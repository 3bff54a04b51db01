"""Runs the processes of one run on this machine: shows what they say, stops all when one fails, and starts them again
where that may help.

python -m launch.local --processes 2 --logs runs/two/logs -- python -m k3jax.train --config nano --run runs/two

What process 1 says appears after ``[1]``, and in ``1.log``. The exit code is that of the process that failed first, of
the last start. A signal is passed on.
"""

import contextlib
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from absl import flags

from k3jax.exits import FINAL, Exit
from launch import cli

# Seconds in which the others may leave by themselves after one has failed: with a message of their own, perhaps, but
# never with a checkpoint, which takes all of them.
PATIENCE = 10.0
PAUSE = 1.0  # seconds before the next start
# What a process hears of a signal. A terminal that is closed is a stop like any other.
PASSED_ON = {signal.SIGTERM: signal.SIGTERM, signal.SIGINT: signal.SIGINT, signal.SIGHUP: signal.SIGTERM}


class Process:
    """One process of a run, in a session of its own: Ctrl-C reaches it through the launcher only. What it says goes to
    the screen and to its log; its end is put into ``events`` as (number, exit code)."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        logs: pathlib.Path,
        events: queue.SimpleQueue,
    ):
        self.number = number
        self._log = open(logs / f"{number}.log", "ab")  # noqa: SIM115 (closed by the thread that writes it)
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, args=(events,), daemon=True).start()

    def send(self, number: int) -> None:
        """A signal for the process alone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """Ends it, and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Waits for its last words. A process that it started and left behind does not keep them open."""
        self.kill()
        self._process.wait()
        self._reader.join(timeout=PAUSE)

    def _read(self) -> None:
        with self._log, self._process.stdout as lines:
            for line in lines:
                self._log.write(line)
                self._log.flush()
                say(f"[{self.number}] {line.decode(errors='replace').rstrip()}")

    def _wait(self, events: queue.SimpleQueue) -> None:
        code = self._process.wait()
        events.put((self.number, 128 - code if code < 0 else code))


def say(line: str) -> None:
    """A line on the screen, whole; a screen that is gone ends nothing."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


@dataclass(frozen=True)
class Group:
    """The processes of a run.

    Attributes:
      command: of one process; where there are several, each gets ``--coordinator``, ``--processes``, ``--process``.
      gpus: GPUs of each process, the first ones for process 0; 0 is whatever JAX finds.
      retries: starts after a failure; those after a preemption, which has saved, do not count.
      grace: seconds to save in after a signal.
    """

    command: Sequence[str]
    logs: pathlib.Path
    processes: int = 1
    gpus: int = 0
    retries: int = 10
    grace: float = 120.0

    def numbers(self) -> list[list[str]]:
        """What tells the processes from each other; each call gives a new port."""
        if self.processes == 1:
            return [[]]
        several = ["--coordinator", f"localhost:{free_port()}", "--processes", str(self.processes), "--process"]
        return [[*several, str(number)] for number in range(self.processes)]

    def environment(self, number: int) -> dict[str, str]:
        """The variables of one process."""
        mine = range(number * self.gpus, (number + 1) * self.gpus)
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, mine))} if self.gpus else {}


def run(group: Group) -> int:
    """Starts the processes until they are done, fail in a way that another start does not mend, or are told to stop.

    Returns:
      the exit code of the process that failed first, in the last start; 128 + its number for a signal.
    """
    group.logs.mkdir(parents=True, exist_ok=True)
    events: queue.SimpleQueue = queue.SimpleQueue()  # the only queue that a signal handler may put into
    before = {number: signal.signal(number, lambda got, _: events.put(PASSED_ON[got])) for number in PASSED_ON}
    try:
        return _starts(group, events)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _starts(group: Group, events: queue.SimpleQueue) -> int:
    failures = 0
    while True:
        code, told = _start(group, events)
        if told or code in (Exit.DONE, *FINAL):
            return code
        failures += code != Exit.PREEMPTED
        if failures > group.retries:
            say(f"exit code {code} after {group.retries} retries: giving up")
            return code
        say(f"exit code {code}: starting all again, after {failures} failures of {group.retries}")
        with contextlib.suppress(queue.Empty):
            events.get(timeout=PAUSE)
            return code


def _start(group: Group, events: queue.SimpleQueue) -> tuple[int, bool]:
    """One start of all processes, to the end of the last one: the first exit code that is not zero, and whether a
    signal came."""
    running: dict[int, Process] = {}
    try:
        for number, own in enumerate(group.numbers()):
            command = [*group.command, *own]
            running[number] = Process(number, command, group.environment(number), group.logs, events)
        return _watch(running, group.grace, events)
    finally:
        for process in running.values():
            process.close()


def _watch(running: dict[int, Process], grace: float, events: queue.SimpleQueue) -> tuple[int, bool]:
    """Takes processes out of ``running`` as they end."""
    first, told, deadline = 0, False, float("inf")
    while running:
        try:
            left = deadline - time.monotonic()
            event = events.get(timeout=None if left == float("inf") else max(left, 0.0))
        except queue.Empty:
            say(f"process {', '.join(map(str, running))} did not leave in time: killed")
            deadline = float("inf")
            for process in running.values():
                process.kill()
            continue
        if isinstance(event, int):
            deadline = time.monotonic() if told and event == signal.SIGINT else time.monotonic() + grace
            told = True
            for process in running.values():
                process.send(event)
            continue
        number, code = event
        running.pop(number).close()
        if code and not first:
            first = code
            say(f"process {number} left with exit code {code}" + (": stopping the others" if running else ""))
            deadline = min(deadline, time.monotonic() + (grace if code == Exit.PREEMPTED else PATIENCE))
            for process in running.values():
                process.send(signal.SIGTERM)
    return first, told


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def main(argv: list[str]) -> None:
    given = flags.FLAGS
    if len(argv) < 2:
        raise cli.UsageError("there is no command to run")
    fields = dict(processes=given.processes, gpus=given.gpus, retries=given.retries, grace=given.grace)
    raise SystemExit(run(Group(argv[1:], pathlib.Path(given.logs), **fields)))


if __name__ == "__main__":
    flags.DEFINE_integer("processes", 1, "how many processes", lower_bound=1)
    flags.DEFINE_string("logs", None, "the folder of their logs")
    flags.DEFINE_integer("gpus", 0, "GPUs of each process; 0 is whatever JAX finds", lower_bound=0)
    flags.DEFINE_integer("retries", 10, "starts after a failure that another start may mend", lower_bound=0)
    flags.DEFINE_float("grace", 120.0, "seconds to save in after a signal", lower_bound=0.0)
    flags.mark_flag_as_required("logs")
    cli.start(main, "python -m launch.local --processes N --logs FOLDER -- COMMAND")
