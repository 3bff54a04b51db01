"""What is raised when a released checkpoint is refused, and JSON that is read strictly."""

import json
import pathlib
from collections.abc import Iterable
from typing import Any


class CheckpointError(ValueError):
    """A released checkpoint that cannot be read or written; the message names the file, the tensor or the field."""


def listing(names: Iterable[str], limit: int = 5) -> str:
    """The first names of a collection, in order, and how many more there are."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:limit])
    return shown if len(ordered) <= limit else f"{shown} and {len(ordered) - limit} more"


def parse_object(text: bytes, where: pathlib.Path | str) -> dict[str, Any]:
    """A JSON object in which no key appears twice.

    Raises:
      CheckpointError: ``text`` is not that.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) < len(pairs):
            keys = [key for key, _ in pairs]
            raise CheckpointError(f"{where}: {listing({k for k in keys if keys.count(k) > 1})} appears twice")
        return data

    try:
        data = json.loads(text, object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{where} must hold a JSON object, not {type(data).__name__}")
    return data
