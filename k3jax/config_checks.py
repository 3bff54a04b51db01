"""What every configuration class checks itself with, and what it raises."""

import dataclasses
from typing import Any, get_args


class ConfigError(ValueError):
    """A configuration that cannot be built: the message names the field, the value, and what would be valid."""


def require(condition: bool, message: str) -> None:
    """Raises :class:`ConfigError` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message)


ADDED = "added"


def added(default: Any) -> Any:
    """A field that came after runs were saved. In a file without it, it has its default, which must therefore stay what
    the program did before."""
    return dataclasses.field(default=default, metadata={ADDED: True})


def require_positive(config: object, *names: str) -> None:
    """Every named integer field of ``config`` must be at least 1."""
    for name in names:
        value = getattr(config, name)
        require(value >= 1, f"{type(config).__name__}.{name} = {value}, but it must be at least 1")


def require_choice(config: object, name: str, literal: Any) -> None:
    """Field ``name`` of ``config`` must be one of the values of a Literal."""
    value, valid = getattr(config, name), get_args(literal)
    require(value in valid, f"{type(config).__name__}.{name} = {value!r}, but it must be one of {', '.join(valid)}")
