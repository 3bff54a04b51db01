"""Configurations to and from text: JSON files and ``path.to.field=value`` settings, strict and driven by type hints.

Works for every frozen dataclass whose fields are int, float, str, bool, Literal, tuples of these, dataclasses, and
unions of all that. Nothing is coerced except an integer where a float belongs, and nothing in the text is executed.
"""

import ast
import dataclasses
import difflib
import json
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from k3jax.config import ConfigError
from k3jax.config_checks import ADDED

TAG = "type"


class _Name(str):
    """A bare word in a setting: a choice of a Literal, or a dataclass with all its defaults."""


class _Call(NamedTuple):
    """``name(field=value, ...)`` in a setting, or an object with a type tag in JSON."""

    name: str
    fields: Mapping[str, Any]


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as JSON types: tuples become lists, and where the field's type is a union, a dataclass carries
    its class name under "type"."""
    return _plain(type(config), config)


def from_dict[C](cls: type[C], data: Mapping[str, Any], *, complete: bool = True) -> C:
    """The inverse of :func:`to_dict`. Every field must be there, so that a saved run does not change with a default,
    but those that came later (:func:`k3jax.config_checks.added`); with ``complete=False`` a field that has a default
    may be missing.

    Raises:
      ConfigError: a field is unknown, missing, of the wrong type, or refused by its class; the message has its dotted
        path, the value and what would be valid.
    """
    return _build(cls, data, "", complete=complete)


def save_json(config: Any, path: str | Path) -> None:
    """Writes the configuration as indented JSON."""
    Path(path).write_text(json.dumps(to_dict(config), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def load_json[C](cls: type[C], path: str | Path, *, complete: bool = True) -> C:
    """Reads what :func:`save_json` wrote, or with ``complete=False`` what a person wrote, who may leave out defaults.

    Raises:
      ConfigError: the file cannot be read, is not JSON, repeats a key, or does not describe a ``cls``.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
        return from_dict(cls, data, complete=complete)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"configuration file {str(path)!r}: {error}") from error


def override[C](config: C, settings: Iterable[str]) -> C:
    """The configuration with settings such as ``model.moe.experts=32`` or ``model.residual=BlockAttnRes(block=4)``.

    A value is a Python literal, a bare choice (``bfloat16``), or a dataclass that the field allows, with the fields to
    set by name and defaults for the rest. For a text field the value is the text itself, quotes optional. Settings
    apply in order, the last one wins, and the result is checked once, at the end: fields that depend on each other may
    change together.

    Raises:
      ConfigError: a path that does not exist, or a value that its field does not take.
    """
    tree = to_dict(config)
    for setting in settings:
        path, separator, text = setting.partition("=")
        if not separator or not path.strip():
            raise ConfigError(f"setting {setting!r} is not of the form path.to.field=value")
        _set(type(config), tree, path.strip(), text)
    return from_dict(type(config), tree)


def diff(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """{dotted path: (old value, new value)} of two configurations of one class.

    A field whose dataclass changes its type is one entry; otherwise the entries are single values.
    """
    if type(old) is not type(new):
        raise ConfigError(f"cannot compare a {type(old).__name__} with a {type(new).__name__}")
    return dict(_differences(old, new, ""))


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the option nearest to a misspelt word, or nothing."""
    near = difflib.get_close_matches(str(word), list(options), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


@cache
def _hints(cls: type) -> dict[str, Any]:
    """Field names and types of a dataclass, in order."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type itself."""
    return get_args(hint) if _is_union(hint) else (hint,)


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _classes(hint: Any) -> dict[str, type]:
    """The dataclasses that a field of this type may hold, by name."""
    return {option.__name__: option for option in _options(hint) if dataclasses.is_dataclass(option)}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else str(name)


def _plain(hint: Any, value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(_item_hint(hint, len(value), i), item) for i, item in enumerate(value)]
    if not dataclasses.is_dataclass(value):
        return value
    fields = {name: _plain(field, getattr(value, name)) for name, field in _hints(type(value)).items()}
    return {TAG: type(value).__name__, **fields} if _is_union(hint) else fields


def _item_hint(hint: Any, length: int, index: int) -> Any:
    """The type of item ``index`` of a tuple of ``length`` items in a field of type ``hint``."""
    tuples = [get_args(option) for option in _options(hint) if get_origin(option) is tuple]
    items = next(items for items in tuples if items[-1] is Ellipsis or len(items) == length)
    return items[0] if items[-1] is Ellipsis else items[index]


def _build(hint: Any, value: Any, path: str, *, complete: bool) -> Any:
    """``value``, as read from JSON or a setting, as an instance of ``hint``."""
    word = isinstance(value, _Name) and value not in _classes(hint) and Literal in map(get_origin, _options(hint))
    if _classes(hint) and isinstance(value, (Mapping, _Call, _Name)) and not word:
        cls, fields = _selected(hint, value, path)
        return _construct(cls, fields, path, complete=complete)
    for option in _options(hint):
        matches, converted = _accept(option, value, path, complete)
        if matches:
            return converted
    shown = value.name if isinstance(value, _Call) else value
    advice = did_you_mean(value, _words(hint)) if isinstance(value, str) else ""
    if isinstance(value, str) and value in _classes(hint):
        advice = f'; a class is written without quotes, and in JSON as {{"{TAG}": "{value}"}}'
    raise ConfigError(f"{path or 'configuration'} = {shown!r}, but it must be {_expected(hint)}{advice}")


def _selected(hint: Any, value: Mapping | _Call | _Name, path: str) -> tuple[type, Mapping[str, Any]]:
    """Which dataclass ``value`` names, and its fields."""
    classes = _classes(hint)
    if isinstance(value, _Call):
        name, fields = value
    elif isinstance(value, _Name):
        name, fields = str(value), {}
    elif _is_union(hint):
        name, fields = value.get(TAG), {key: item for key, item in value.items() if key != TAG}
    else:
        (name,), fields = classes, value
    if name not in classes:
        problem = f"there is no {name!r} here" if name is not None else f'the class must be named under "{TAG}"'
        raise ConfigError(f"{path}: {problem}; it must be {_expected(hint)}{did_you_mean(name, classes)}")
    return classes[name], fields


def _construct(cls: type, given: Mapping[str, Any], path: str, *, complete: bool) -> Any:
    hints = _hints(cls)
    for name in given:
        _check_field(cls, name, path)
    optional = {f.name for f in dataclasses.fields(cls) if (ADDED in f.metadata if complete else not _is_required(f))}
    missing = [name for name in hints if name not in given and name not in optional]
    if missing:
        raise ConfigError(f"{path or 'configuration'}: {cls.__name__} lacks {', '.join(missing)}")
    values = {name: _build(hints[name], v, _join(path, name), complete=complete) for name, v in given.items()}
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from error


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _check_field(cls: type, name: str, path: str) -> None:
    fields = _hints(cls)
    if name not in fields:
        valid = ", ".join(fields) or "none"
        raise ConfigError(
            f"{_join(path, name)}: {cls.__name__} has no field {name!r}{did_you_mean(name, fields)} (fields: {valid})"
        )


def _accept(option: Any, value: Any, path: str, complete: bool) -> tuple[bool, Any]:
    """Whether ``value`` is an ``option`` (not a dataclass), and the value to store."""
    word = str(value) if isinstance(value, _Name) else value
    if get_origin(option) is Literal:
        return any(type(word) is type(choice) and word == choice for choice in get_args(option)), word
    if get_origin(option) is tuple:
        return _accept_tuple(option, value, path, complete)
    if option is types.NoneType:
        return value is None, None
    if option is float:
        return _accept_float(value)
    if option in (int, str, bool):
        return type(word) is option, word
    if dataclasses.is_dataclass(option):
        return False, None
    raise TypeError(f"{path}: a configuration field cannot be of type {option}")


def _accept_float(value: Any) -> tuple[bool, float | None]:
    """Finite numbers; an integer only if a float holds it exactly."""
    try:
        if type(value) in (int, float) and math.isfinite(value) and float(value) == value:
            return True, float(value)
    except OverflowError:
        pass
    return False, None


def _accept_tuple(option: Any, value: Any, path: str, complete: bool) -> tuple[bool, Any]:
    items = get_args(option)
    if not isinstance(value, (list, tuple)) or isinstance(value, _Call):
        return False, None
    if items[-1] is Ellipsis:
        items = items[:1] * len(value)
    if len(items) != len(value):
        return False, None
    built = [_build(item, v, f"{path}[{i}]", complete=complete) for i, (item, v) in enumerate(zip(items, value))]
    return True, tuple(built)


def _expected(hint: Any) -> str:
    """What a field of this type takes, in words."""
    names = {int: "an integer", float: "a finite number", str: "a string", bool: "True or False", type(None): "None"}

    def words(option: Any) -> str:
        if get_origin(option) is Literal:
            return "one of " + ", ".join(map(repr, get_args(option)))
        if get_origin(option) is tuple:
            return "a list, each item " + _expected(get_args(option)[0])
        return names.get(option) or option.__name__

    return " or ".join(words(option) for option in _options(hint))


def _words(hint: Any) -> list[str]:
    """The words that a field of this type understands."""
    choices = [c for o in _options(hint) if get_origin(o) is Literal for c in get_args(o) if isinstance(c, str)]
    return choices + list(_classes(hint))


def _set(cls: type, tree: dict, path: str, text: str) -> None:
    """Replaces one entry of ``to_dict``'s tree by the parsed ``text``."""
    *parents, last = path.split(".")
    hint, node, done = cls, tree, ""
    for part in parents:
        owner = _owner(hint, node, done)
        _check_field(owner, part, done)
        hint, node, done = _hints(owner)[part], node[part], _join(done, part)
    owner = _owner(hint, node, done)
    _check_field(owner, last, done)
    hint = _hints(owner)[last]
    node[last] = _plain(hint, _build(hint, _parse(text, hint, path), path, complete=False))


def _owner(hint: Any, node: Any, path: str) -> type:
    """The dataclass that ``node`` of the tree describes."""
    if not isinstance(node, dict):
        whole = " | ".join(_classes(hint))
        advice = f"; set it as a whole first, to {whole}" if whole else ""
        raise ConfigError(f"{path} is {node!r} and has no fields{advice}")
    classes = _classes(hint)
    return classes[node[TAG]] if _is_union(hint) else next(iter(classes.values()))


def _parse(text: str, hint: Any, path: str) -> Any:
    """The value that the text of a setting stands for, before its type is checked."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        node = None
    if str in _options(hint):
        value = node.value if isinstance(node, ast.Constant) else text
        return value if isinstance(value, str) or (value is None and types.NoneType in _options(hint)) else text
    try:
        return _from_ast(node)
    except ConfigError as error:
        raise ConfigError(f"{path} = {text!r} {error}; it must be {_expected(hint)}") from None


def _from_ast(node: ast.AST | None) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if type(value) in (int, float):
            return -value
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return [_from_ast(item) for item in items]
        case ast.Name(id=name):
            return _Name(name)
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if all(k.arg for k in keywords):
            return _Call(name, {k.arg: _from_ast(k.value) for k in keywords})
        case ast.Call(func=ast.Name(id=name)):
            raise ConfigError(f"must name every field that it sets, as in {name}(field=value)")
    raise ConfigError("is not a literal, a name, or Name(field=value)")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise ConfigError(f"key {key!r} appears twice in one object")
        data[key] = value
    return data


def _differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    if dataclasses.is_dataclass(old) and type(old) is type(new):
        for name in _hints(type(old)):
            yield from _differences(getattr(old, name), getattr(new, name), _join(path, name))
    elif old != new:
        yield path, (old, new)
