"""Is a value what its annotation says? For plain data that crosses the border: attributes of plugins, dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from engine.plugin_guard.calls import quote

_PLAIN = frozenset({int, float, str, bool, NoneType})


def attribute_problems(plugin: object, protocol: type[Any]) -> Iterator[str]:
    """What a plugin's attributes are that its protocol says otherwise, one text each."""
    for name, hint in get_type_hints(protocol).items():
        if hasattr(plugin, name):
            yield from problems(getattr(plugin, name), hint, name)


def problems(value: Any, hint: Any, path: str) -> Iterator[str]:
    """Where ``value`` differs from the annotation ``hint``: ``layers[0][2].qkv is 3, expected LinearSpec``.

    Goes into dataclasses, tuples and sequences; a list will do for a tuple. Types it does not know (tensors, callables,
    Any) are left alone.
    """
    if type(value) is hint and hint in _PLAIN:
        return  # most values of a large graph
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        meant = next((option for option in arguments if _is_a(value, option)), None)
        if meant is not None:
            yield from problems(value, meant, path)
        elif all(any(problems(value, option, path)) for option in arguments):
            yield _wrong(value, path, hint)
    elif origin is Literal:
        if not any(type(value) is type(choice) and value == choice for choice in arguments):
            yield _wrong(value, path, hint)
    elif origin is tuple:
        yield from _tuple_problems(value, arguments, path, hint)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            yield _wrong(value, path, hint)
    elif isinstance(origin, type) and issubclass(origin, Sequence):
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            yield _wrong(value, path, hint)
        else:
            for i, item in enumerate(value):
                yield from problems(item, arguments[0], f"{path}[{i}]")
    elif isinstance(hint, type) and hint is not Any:
        if not _is_a(value, hint):
            yield _wrong(value, path, hint)
        elif dataclasses.is_dataclass(hint):
            record: Any = type(value)
            for name, kind in _hints(record).items():
                yield from problems(getattr(value, name), kind, f"{path}.{name}")


def _tuple_problems(value: Any, arguments: tuple[Any, ...], path: str, hint: Any) -> Iterator[str]:
    if not isinstance(value, tuple | list):
        yield _wrong(value, path, hint)
    elif len(arguments) == 2 and arguments[1] is Ellipsis:
        for i, item in enumerate(value):
            yield from problems(item, arguments[0], f"{path}[{i}]")
    elif len(value) != len(arguments):
        yield _wrong(value, path, hint)
    else:
        for i, (item, kind) in enumerate(zip(value, arguments, strict=True)):
            yield from problems(item, kind, f"{path}[{i}]")


def _is_a(value: Any, hint: Any) -> bool:
    """As ``isinstance``, but a bool is no int, and an int is a float."""
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else False


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Of a dataclass's fields; those whose types are imported for type checkers alone are left out."""
    try:
        hints = get_type_hints(kind)
    except NameError:
        return {}
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _wrong(value: Any, path: str, hint: Any) -> str:
    return f"{path} is {quote(value)}, expected {_spelled(hint)}"


def _spelled(hint: Any) -> str:
    """An annotation as one writes it."""
    if get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_spelled(option) for option in get_args(hint))
    if hint is NoneType:
        return "None"
    if isinstance(hint, type) and not get_args(hint):
        return hint.__name__
    return str(hint).replace("typing.", "").replace("collections.abc.", "").replace("engine.contracts.", "")
