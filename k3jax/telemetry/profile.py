"""A trace of some steps for xprof, and the text of the compiled step."""

import os
import pathlib
from typing import Any

import jax

from k3jax.config import ConfigError, require


def parse_span(text: str | None, *, steps: int) -> range:
    """The steps of a flag ``START:STOP``, both included, counted from 1; no steps for None or the empty text.

    Raises:
      ConfigError: not of this form, or not within the run's ``steps``.
    """
    if not text:
        return range(0)
    start, colon, stop = text.partition(":")
    if not (colon and start.isdecimal() and stop.isdecimal()):
        raise ConfigError(f"--profile={text}: write START:STOP, for example --profile=20:24 for steps 20 to 24")
    require(int(start) >= 1, f"--profile={text}: the first step is 1")
    require(int(start) <= int(stop), f"--profile={text}: it ends before it starts")
    require(int(stop) <= steps, f"--profile={text}: the run has only {steps} steps")
    return range(int(start), int(stop) + 1)


class Profile:
    """Traces the steps of a span into ``RUN/profile``, as a context manager around the loop. Look at it with xprof:
    ``pip install xprof; xprof --logdir RUN/profile``.

    Args:
      span: :func:`parse_span`. first: steps made before this process.

    Raises:
      ConfigError: the run stands behind the start of the span already.
    """

    def __init__(self, run: str | os.PathLike, span: range, *, first: int = 0):
        if span and first >= span.start:
            raise ConfigError(
                f"--profile={span.start}:{span.stop - 1}: the run goes on with step {first + 1} and cannot trace "
                f"earlier ones"
            )
        self._folder, self._span, self._tracing = pathlib.Path(run) / "profile", span, False

    def before(self, step: int, state: Any) -> None:
        """To be called before each step is sent. Starts the trace when the steps before, which make ``state``, are
        done, and ends it when those of the span are."""
        if self._tracing and step >= self._span.stop:
            jax.block_until_ready(state)
            self.close()
        elif self._span and step == self._span.start:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True

    def close(self) -> None:
        """Ends the trace, if there is one, and writes it."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def dump_hlo(
    run: str | os.PathLike, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, *, name: str = "train_step"
) -> pathlib.Path:
    """Writes a program as JAX lowered it (``NAME.stablehlo.mlir``) and as XLA compiled it (``NAME.hlo.txt``) into
    ``RUN/hlo``, which it returns."""
    folder = pathlib.Path(run) / "hlo"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.stablehlo.mlir").write_text(lowered.as_text(), encoding="utf-8")
    (folder / f"{name}.hlo.txt").write_text(compiled.as_text(), encoding="utf-8")
    return folder
