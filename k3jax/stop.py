"""Requests to stop: SIGTERM of a preempted machine, Ctrl-C of a person."""

import contextlib
import os
import signal
import sys
import threading

import jax
from jax.experimental import multihost_utils

from k3jax.exits import Exit

SIGNALS = {signal.SIGTERM: Exit.PREEMPTED, signal.SIGINT: Exit.INTERRUPTED}


class StopRequest:
    """Listens for SIGTERM and SIGINT, as a context manager. A second Ctrl-C is a KeyboardInterrupt.

    Python runs signal handlers between two of its own instructions, which compiling a large program can put off for
    minutes. A thread hears of the signal at once, and inside :meth:`nothing_to_save` ends the process by itself.

    Where several processes train together, a SIGTERM or a Ctrl-C to any of them is agreed on through JAX's preemption
    service, and all stop after the same step.
    """

    def __init__(self):
        self.exit: Exit | None = None
        self._unsaved = True
        self._main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "StopRequest":
        if self._main:
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._fd_before = signal.set_wakeup_fd(self._write)
            alone = jax.process_count() == 1
            kept = SIGNALS if alone else (signal.SIGINT,)  # JAX's own service listens to SIGTERM otherwise
            self._handlers = {number: signal.signal(number, self._handle) for number in kept}
            threading.Thread(target=self._listen, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        if self._main:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._fd_before)
            os.close(self._write)

    @contextlib.contextmanager
    def nothing_to_save(self):
        """Where a stop may end the process on the spot."""
        self._unsaved = False
        self._leave_if_asked()
        try:
            yield
        finally:
            self._unsaved = True

    def at_step(self, step: int) -> Exit | None:
        """With what exit code to stop after this step, alike in all processes; None is to go on."""
        if jax.process_count() == 1:
            return self.exit
        return Exit.PREEMPTED if multihost_utils.reached_preemption_sync_point(step) else None

    @property
    def hurried(self) -> bool:
        """Somebody waits for this process, and no other has to agree on what it leaves out."""
        return self.exit is not None and jax.process_count() == 1

    def _handle(self, number: int, _) -> None:
        if self.exit is Exit.INTERRUPTED and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.exit = SIGNALS[number]
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def _listen(self) -> None:
        while data := os.read(self._read, 1):
            self._heard(data[0])
        os.close(self._read)

    def _heard(self, number: int) -> None:
        if number in SIGNALS and not self._unsaved:
            _leave(SIGNALS[number])

    def _leave_if_asked(self) -> None:
        if self.exit is not None:
            _leave(self.exit)


def _leave(code: Exit) -> None:
    print("k3jax.train: asked to stop with nothing to save", file=sys.stderr, flush=True)
    os._exit(code)
