"""What the compiled step does: a trace of some steps for xprof, and its text as the compiler left it."""

import pathlib
from typing import Any

import jax

from k3jax.config import ConfigError
from k3jax.run_folder import write_text


def parse(text: str, steps: int) -> range:
    """The steps START..STOP of a flag such as ``10:12``, both included; the empty text is none.

    Raises:
      ConfigError: not two numbers, or not within the run's steps 1..``steps``.
    """
    if not text:
        return range(0)
    start, _, stop = text.partition(":")
    if not (start.isdecimal() and stop.isdecimal()):
        raise ConfigError(f"--profile={text}: it must be START:STOP, two step numbers")
    if not 1 <= int(start) <= int(stop) <= steps:
        raise ConfigError(f"--profile={text}: it must lie within the steps 1..{steps} of the run, START first")
    return range(int(start), int(stop) + 1)


class Trace:
    """Traces the steps of a range into ``RUN/profile``, as a context manager around the loop."""

    def __init__(self, run: pathlib.Path, steps: range):
        self._folder, self._steps, self._on = run / "profile", steps, False

    def before(self, step: int) -> None:
        """Begins the trace where it is time to, or in the middle if the run resumed there."""
        if step in self._steps and not self._on:
            jax.profiler.start_trace(self._folder)
            self._on = True

    def after(self, step: int, outputs: Any) -> None:
        """Ends the trace when the last of its steps is over on the device."""
        if self._on and step >= self._steps.stop - 1:
            jax.block_until_ready(outputs)
            self._end()

    def _end(self) -> None:
        jax.profiler.stop_trace()
        self._on = False

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *_) -> None:
        if self._on:
            self._end()


def dump_hlo(run: pathlib.Path, compiled: jax.stages.Compiled, stage: int) -> pathlib.Path:
    """Writes the optimized program of a stage's step into ``RUN/hlo`` and returns the file."""
    path = run / "hlo" / f"train_step.{jax.process_index()}.stage{stage}.txt"
    path.parent.mkdir(exist_ok=True)
    write_text(path, compiled.as_text())
    return path
