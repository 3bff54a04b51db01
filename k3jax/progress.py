"""One progress line that keeps moving while XLA compiles and while the run trains.

On a terminal it is a live line drawn by `rich`; anywhere else (a file, a pipe, a batch system) it is a plain line at
each new phase and then at most every `interval` seconds. A thread draws it, because the main thread is silent for the
whole length of a compilation. It writes to stderr and never raises into the run.
"""

import contextlib
import logging
import os
import sys
import threading
import time

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column


class Progress:
    """Use as a context manager around the whole run:

        with Progress(total=2000) as progress:
            progress.phase("compiling the train step")
            ...
            progress.update(step, loss=1.9, tokens_per_second=12_300.0)

    `total` is the number of steps of the whole run and `first` the number done before this process started. `update`
    takes the number of steps done so far, and says "training" until the next `phase`.
    """

    def __init__(self, total: int, *, first: int = 0, stream=None, interval: float = 10.0):
        if total < 1 or not 0 <= first <= total:
            raise ValueError(f"progress needs total >= 1 and first within 0..total, got total {total}, first {first}")
        self._total, self._step, self._interval = total, first, interval
        self._stream = sys.stderr if stream is None else stream
        self._phase, self._numbers = "starting", ""
        self._start = self._phase_start = time.monotonic()
        self._pace = None  # (time, step) of the first update: compilation does not count in the ETA
        self._ended = threading.Event()
        live = self._stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        self._view = _LiveLine(self) if live else _PlainLines(self, interval)

    def phase(self, name: str) -> None:
        """Names what the run is doing now; its own clock starts at zero."""
        self._phase, self._phase_start = name, time.monotonic()
        self._view.refresh(now=True)

    def update(self, step: int, *, loss: float | None = None, tokens_per_second: float | None = None) -> None:
        """Reports `step` steps done, with the newest loss (nats per token) and speed where known. Costs microseconds:
        only the thread draws."""
        now = time.monotonic()
        self._pace = self._pace or (now, step)
        self._step = step
        if self._phase != "training":
            self._phase, self._phase_start = "training", now
        parts = [] if loss is None else [f"loss {loss:.3f}"]
        parts += [] if tokens_per_second is None else [f"{tokens_per_second:,.0f} tokens/s"]
        self._numbers = "  ".join(parts)

    @property
    def step(self) -> int:
        """Steps done so far."""
        return self._step

    def log(self, text: str) -> None:
        """Prints a line of its own to the same stream, above the live line where there is one."""
        self._view.log(text)

    def describe(self) -> str:
        """The line as plain text, without spinner and bar."""
        now = time.monotonic()
        parts = [f"{self._phase} {_duration(now - self._phase_start)}"]
        if self._pace is not None:
            parts = [self._phase, f"step {self._step}/{self._total}", self._numbers, self._eta(now)]
        return "  ".join(part for part in parts if part)

    def _eta(self, now: float) -> str:
        start, first = self._pace
        if self._step >= self._total:
            return f"took {_duration(now - self._start)}"
        if self._step == first:
            return ""
        return f"ETA {_duration((now - start) / (self._step - first) * (self._total - self._step))}"

    def __enter__(self) -> "Progress":
        self._view.start()
        self._thread = threading.Thread(target=self._tick, name="progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join()
        self._view.stop()

    def _tick(self) -> None:
        while not self._ended.wait(self._view.period):
            self._view.refresh()


class _PlainLines:
    """A line at each new phase, then one every `interval` seconds."""

    def __init__(self, progress: Progress, interval: float):
        self._progress, self._interval = progress, interval
        self.period = min(interval, 1.0)
        self._lock = threading.Lock()
        self._next = 0.0

    def start(self) -> None:
        pass

    def stop(self) -> None:
        self.refresh(now=True)

    def refresh(self, now: bool = False) -> None:
        with self._lock:
            if now or time.monotonic() >= self._next:
                self._next = time.monotonic() + self._interval
                self.log(f"[{_duration(time.monotonic() - self._progress._start)}] {self._progress.describe()}")

    def log(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed pipe must not end the run
            self._progress._stream.write(text + "\n")
            self._progress._stream.flush()


class _LiveLine:
    """The line redrawn in place by rich. Prints made meanwhile appear above it; so do log records, for which a first
    handler on the root logger clears the line before the others write."""

    period = 0.25

    def __init__(self, progress: Progress):
        self._progress = progress
        self._console = Console(file=progress._stream, force_terminal=True)
        text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
        columns = (SpinnerColumn(), BarColumn(bar_width=24), text)
        self._rich = RichProgress(*columns, console=self._console, auto_refresh=False)
        self._task = self._rich.add_task("", total=progress._total, completed=progress._step)
        self._clear = _ClearLine(progress._stream)

    def start(self) -> None:
        self._rich.start()
        logging.root.handlers.insert(0, self._clear)

    def stop(self) -> None:
        logging.root.handlers.remove(self._clear)
        self.refresh()
        with contextlib.suppress(OSError, ValueError):
            self._rich.stop()

    def refresh(self, now: bool = True) -> None:
        with contextlib.suppress(OSError, ValueError):
            done, text = self._progress._step, self._progress.describe()
            self._rich.update(self._task, completed=done, description=text, refresh=True)

    def log(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._rich.print(text, markup=False, highlight=False)


class _ClearLine(logging.Handler):
    """Clears the current terminal line; sees each record before the handlers that print it."""

    def __init__(self, stream):
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write("\r\x1b[2K")
            self._stream.flush()


def _duration(seconds: float) -> str:
    """ "8 s", "3 min 05 s", "2 h 07 min"."""
    seconds = int(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
