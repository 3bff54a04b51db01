"""Signs of life of every process in the run folder, and an end with a report for a run that stands still.

A thread writes them. It also keeps pushing back a timer of `faulthandler`, which needs no Python to go off: a process
whose threads cannot run at all prints their stacks and leaves with 1.
"""

import faulthandler
import itertools
import os
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from k3jax.exits import Exit
from k3jax.run_folder import read_json, write_json
from k3jax.telemetry.clock import Clock

HEARTBEATS, HANGS = "heartbeats", "hangs"
PERIOD = 10.0
MISSING = 6  # periods without a sign of life
CLOCKS = 2.0  # seconds that the clocks of two hosts may differ
# What ends within the limit. Compiling, evaluating (which compiles, too) and restoring may take as long as they take.
WATCHED = ("data", "device", "host", "checkpoint")


class Watchdog:
    """Watches one process of a run, as a context manager.

    Args:
      run: the run's folder.
      clock: the run's account, which knows what the process does and since when.
      step: returns how many steps are done.
      process, processes: which process this is, of how many.
      limit: seconds after which a step, a wait for data or a save counts as hung, and ends the process with
        `Exit.HUNG`; 0 is never.
      period: seconds between signs of life.
      leave: ends the process.
    """

    def __init__(
        self,
        run: pathlib.Path,
        clock: Clock,
        step: Callable[[], int],
        *,
        process: int = 0,
        processes: int = 1,
        limit: float = 0.0,
        period: float = PERIOD,
        leave: Callable[[int], None] = os._exit,
    ):
        self._run, self._clock, self._step = run, clock, step
        self._process, self._processes, self._limit, self._leave = process, processes, limit, leave
        self._period = min(period, limit / 4) if limit else period
        self._began, self._ended, self._named = time.time(), threading.Event(), set()

    def __enter__(self) -> "Watchdog":
        (self._run / HEARTBEATS).mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join(timeout=self._period)
        if self._limit:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        for beat in itertools.count():
            if self._limit:
                faulthandler.dump_traceback_later(self._limit + MISSING * self._period, exit=True, file=sys.__stderr__)
            doing, seconds = self._clock.doing()
            self._sign(doing, seconds)
            if self._process == 0 and beat % MISSING == MISSING - 1:
                self._name_missing()
            if self._limit and doing in WATCHED and seconds > self._limit:
                self._hung(doing, seconds)
            if self._ended.wait(self._period):
                return

    def _sign(self, doing: str, seconds: float) -> None:
        line = {
            "process": self._process,
            "host": socket.gethostname(),
            "step": self._step(),
            "doing": doing,
            "seconds": round(seconds, 1),
            "unix": time.time(),
        }
        try:
            write_json(self._run / HEARTBEATS / f"{self._process}.json", line)
        except OSError as error:
            print(f"k3jax.watchdog: {error}", file=sys.stderr, flush=True)

    def _name_missing(self) -> None:
        """Says once of each host that it is silent."""
        for number, text in self._missing(signs(self._run, self._processes)).items():
            if number not in self._named:
                self._named.add(number)
                print(f"k3jax.watchdog: {text}", file=sys.stderr, flush=True)

    def _missing(self, found: dict[int, dict[str, Any]]) -> dict[int, str]:
        return missing(found, began=self._began, patience=MISSING * self._period)

    def _hung(self, doing: str, seconds: float) -> None:
        """Writes down who is to blame and where every thread stands, and ends the process."""
        found = signs(self._run, self._processes)
        guilty = "; ".join(self._missing(found).values()) or slowest(found)
        text = (
            f"k3jax.watchdog: process {self._process} ({socket.gethostname()}) is at step {self._step()}, and for "
            f"{seconds:.0f} s in {doing!r}, over the limit of {self._limit:.0f} s; {guilty}"
        )
        print(text, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.__stderr__)
        try:
            (self._run / HANGS).mkdir(exist_ok=True)
            with open(self._run / HANGS / f"{self._process}.txt", "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%F %T %z')} {text}\n")
                file.flush()
                faulthandler.dump_traceback(file=file)
        finally:
            self._leave(Exit.HUNG)


def signs(run: pathlib.Path, processes: int) -> dict[int, dict[str, Any]]:
    """The newest sign of life of each process, an empty one where there is none yet."""
    return {number: _read(run / HEARTBEATS / f"{number}.json") for number in range(processes)}


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def missing(found: dict[int, dict[str, Any]], *, began: float, patience: float) -> dict[int, str]:
    """What to say of each process without a sign of life for ``patience`` seconds. ``began``: when this start of the
    run did, in seconds since 1970; a sign from before is none."""
    now, texts = time.time(), {}
    for number, sign in found.items():
        if not sign or sign["unix"] < began - CLOCKS:
            if now > began + patience:
                texts[number] = f"no sign of life of process {number} since the start"
        elif now - sign["unix"] > patience:
            texts[number] = f"no sign of life of {_name(sign)} for {now - sign['unix']:.0f} s, then at {_where(sign)}"
    return texts


def slowest(found: dict[int, dict[str, Any]]) -> str:
    """Whom the others wait for: who has made the fewest steps, and among these who does not wait for the device."""
    there = [sign for sign in found.values() if sign]
    least = min(sign["step"] for sign in there)
    slow = [sign for sign in there if sign["step"] == least]
    slow = [sign for sign in slow if sign["doing"] != "device"] or slow
    if len(slow) == len(there) > 1:
        return f"all {len(there)} processes are there, at {_where(there[0])}: a device or the network stands still"
    return "slowest: " + ", ".join(f"{_name(sign)} at {_where(sign)} for {sign['seconds']:.0f} s" for sign in slow)


def _name(sign: dict[str, Any]) -> str:
    return f"process {sign['process']} ({sign['host']})"


def _where(sign: dict[str, Any]) -> str:
    return f"step {sign['step']} in {sign['doing']!r}"
