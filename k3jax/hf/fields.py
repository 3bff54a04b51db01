"""A JSON object whose fields are taken one by one, so that what nobody asked for can be refused."""

import math
from collections.abc import Set
from typing import Any

from k3jax import config_io
from k3jax.hf.errors import CheckpointError, listing

REQUIRED = object()


class Fields:
    """The fields of ``data``; ``where`` is how messages call it."""

    def __init__(self, where: str, data: Any):
        if not isinstance(data, dict):
            raise CheckpointError(f"{where} must be a JSON object, not {data!r}")
        self.where, self.data = where, data
        self.known: set[str] = set()

    def take(self, name: str, kind: type, default: Any = REQUIRED) -> Any:
        """A field of type ``kind`` (an integer passes for a float), or ``default`` when it is absent or null."""
        self.known.add(name)
        value = self.data.get(name)
        if value is None and default is not REQUIRED:
            return default
        if value is None:
            near = config_io.did_you_mean(name, set(self.data) - self.known)
            raise CheckpointError(f"{self.where} lacks {name!r}{near}")
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise CheckpointError(f"{self.where}: {name} = {value!r}, but it must be of type {kind.__name__}")
        if kind is float and not math.isfinite(value):
            raise CheckpointError(f"{self.where}: {name} = {value!r}, but it must be finite")
        return kind(value)

    def layers(self, name: str) -> tuple[int, ...]:
        """A field that lists layers."""
        value = self.take(name, list)
        if not all(type(n) is int for n in value):
            raise CheckpointError(f"{self.where}: {name} = {value!r}, but it must list layers, counted from 1")
        return tuple(value)

    def fixed(self, name: str, value: Any, reason: str, *, required: bool) -> None:
        """A field that may only have one value."""
        kind = float if type(value) is int else type(value)
        found = self.take(name, kind, REQUIRED if required else value)
        if found != value:
            shown = f"{name} = {self.data[name]!r}"
            raise CheckpointError(f"{self.where}: {shown} is not supported, only {value!r}: {reason}")

    def finish(self, ignored: Set[str] = frozenset()) -> None:
        """Refuses fields that were neither taken nor are in ``ignored``."""
        unknown = set(self.data) - self.known - ignored
        if unknown:
            near = config_io.did_you_mean(min(unknown), self.known | ignored)
            raise CheckpointError(f"{self.where} has unknown fields: {listing(unknown)}{near}")
