"""Numbers out of metrics lines: every numeric field as one array, whatever it is called.

A line is a JSON object. Objects inside it are taken apart by name (`update_rms` becomes `update_rms.experts`, ...); a
number, or a list of numbers, or of such lists, is a field. A field keeps its form over a whole file.
"""

import dataclasses
from collections.abc import Iterator
from itertools import chain

import numpy as np

NUMBERS = frozenset([int, float, type(None)])


class FieldError(ValueError):
    """A field is not numbers, or changes its form; the message names the line of the file."""


@dataclasses.dataclass(frozen=True)
class Field:
    """values: [N, ...] float64 at the steps [N], with an axis for each list around the numbers. NaN: null, not finite,
    and the ends of lists that are shorter than others beside them."""

    steps: np.ndarray
    values: np.ndarray


def read_fields(numbered: list[tuple[int, dict]], *, scalars: frozenset[str] = frozenset()) -> dict[str, Field]:
    """All numeric fields of lines, each given with its number in the file. Text is left out, and so are booleans.

    Args:
      scalars: fields that must be a number or null wherever they are.

    Raises:
      FieldError: a field that is a number elsewhere, or one of `scalars`, holds something else; a list changes its
        length.
    """
    found: dict[str, list[tuple[int, int, object]]] = {}
    for number, line in numbered:
        for name, value in _leaves(line, ""):
            if name not in ("step", "kind"):
                found.setdefault(name, []).append((number, line["step"], value))
    fields = {}
    for name, entries in found.items():
        field = _field(name, entries, scalar=name in scalars)
        if field is not None:
            fields[name] = field
    return fields


def _leaves(line: dict, path: str) -> Iterator[tuple[str, object]]:
    for key, value in line.items():
        if type(value) is dict:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield path + key, value


def _field(name: str, entries: list[tuple[int, int, object]], *, scalar: bool) -> Field | None:
    numbers, steps, values = zip(*entries)
    kinds = set(map(type, values))
    if not scalar and not kinds & {int, float, list}:
        return None
    if kinds <= NUMBERS:
        return Field(np.array(steps, np.float64), _array(values, name, numbers))
    if scalar or kinds - {list, type(None)}:
        _refuse_mixture(name, entries, scalar=scalar)
    return _list_field(name, [entry for entry in entries if entry[2] is not None])


def _list_field(name: str, entries: list[tuple[int, int, list]]) -> Field | None:
    """A field of lists, all of one form. None for lists of text and for empty ones."""
    form = _form(entries[0][2])
    for number, _, value in entries:
        if _form(value) != form:
            found, usual = _words(_form(value)), _words(form)
            raise FieldError(f"line {number}: {name} holds {found}, but {usual} in line {entries[0][0]}")
    numbers, steps, flat = zip(*entries)
    for _ in range(_depth(form, name, numbers[0])):
        flat = list(chain.from_iterable(item for item in flat if item is not None))
    kinds = set(map(type, flat))
    if kinds == {str}:
        return None
    if kinds - NUMBERS:
        for number, _, value in entries:
            _check_items(name, number, value)
    if not flat:
        return None
    return Field(np.array(steps, np.float64), _padded(_array(flat, name, numbers).reshape(len(steps), -1), form))


def _form(value: list) -> int | tuple:
    """The length of a list of items, or the forms of the lists in a list of them; null is an empty list there."""
    kinds = set(map(type, value))
    if list in kinds and kinds <= {list, type(None)}:
        return tuple(0 if item is None else _form(item) for item in value)
    return len(value)


def _depth(form: int | tuple, name: str, number: int) -> int:
    if isinstance(form, int):
        return 1
    depths = {_depth(inner, name, number) for inner in form if inner != 0}
    if len(depths) > 1:
        raise FieldError(f"line {number}: {name} holds lists of numbers beside lists of lists")
    return 1 + max(depths, default=1)


def _words(form: int | tuple) -> str:
    if isinstance(form, int):
        return f"{form} numbers"
    inner = set(form)
    return f"{len(form)} lists of {_words(form[0])}" if len(inner) == 1 else f"{len(form)} lists of several lengths"


def _padded(array: np.ndarray, form: int | tuple) -> np.ndarray:
    """[N, numbers] as [N, ...], with the shape that the form has once short lists are made as long as the longest."""
    places = np.array(list(_places(form, ())))
    out = np.full((len(array), *(places.max(axis=0) + 1)), np.nan)
    out[:, *places.T] = array
    return out


def _places(form: int | tuple, outer: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if isinstance(form, int):
        yield from ((*outer, i) for i in range(form))
    else:
        for number, inner in enumerate(form):
            yield from _places(inner, (*outer, number))


def _array(values, name: str, numbers) -> np.ndarray:
    try:
        array = np.array(values, np.float64)
    except OverflowError as error:
        raise FieldError(f"lines {numbers[0]} to {numbers[-1]}: {name} holds an integer of more than 1e308") from error
    array[~np.isfinite(array)] = np.nan
    return array


def _refuse_mixture(name: str, entries, *, scalar: bool) -> None:
    """Names the first line whose value is of another kind than the first number or list."""
    wanted = NUMBERS
    if not scalar:
        first = next(value for _, _, value in entries if type(value) in (int, float, list))
        wanted = frozenset([list, type(None)]) if type(first) is list else NUMBERS
    for number, _, value in entries:
        if type(value) not in wanted:
            need = "a list of numbers" if list in wanted else "a number or null"
            raise FieldError(f"line {number}: {name} must be {need}, but is {_shown(value)}")


def _check_items(name: str, number: int, value: list) -> None:
    nested = isinstance(_form(value), tuple)
    for item in value:
        if nested and item is not None:
            _check_items(name, number, item)
        elif type(item) not in NUMBERS:
            raise FieldError(f"line {number}: {name} must hold numbers or null, but holds {_shown(item)}")


def _shown(value) -> str:
    text = repr(value)
    return f"{text[:40]}..." if len(text) > 43 else text
