"""The start of a command: what is wrong with what it was given is said in a line, with the exit code of that."""

from collections.abc import Callable

from absl import app, flags

from k3jax.config import ConfigError
from k3jax.exits import leave


class UsageError(ConfigError):
    """Arguments or flags that a command does not have; to be said with the usage."""


def start(main: Callable[[list[str]], None], usage: str) -> None:
    """Runs ``main`` with the arguments that are no flags; a ConfigError ends the process with 2.

    Args:
      usage: a line, ``python -m launch.NAME ...``.
    """
    name = usage.split()[2]
    try:
        app.run(main, flags_parser=_parse)
    except UsageError as error:
        leave(f"{name}: {error}\nusage: {usage}; --help lists the flags")
    except ConfigError as error:
        leave(f"{name}: {error}")


def only_argument(argv: list[str], what: str) -> str:
    """The one argument of a command.

    Raises:
      UsageError: there is none, or there are several.
    """
    if len(argv) != 2:
        raise UsageError(f"one {what} is needed, got {' and '.join(map(repr, argv[1:])) or 'none'}")
    return argv[1]


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        raise UsageError(" ".join(str(error).split())) from None
