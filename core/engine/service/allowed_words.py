"""Which words a field of a request may be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

import msgspec
from msgspec import inspect

_PART = re.compile(r"\[\.\.\.\]|[^.\[\]]+")
_type_info = lru_cache(32)(inspect.type_info)


def allowed_words(kind: type[msgspec.Struct], path: str) -> tuple[str, ...]:
    """``path``: of a field, as msgspec names it. Empty for a field that is not one of some words."""
    found = [*_alternatives(_type_info(kind))]
    for part in _PART.findall(path):
        found = [one for above in found for below in _below(above, part) for one in _alternatives(below)]
    words = (value for one in found if isinstance(one, inspect.LiteralType) for value in one.values)
    return tuple(sorted(map(str, words)))


def _alternatives(one: inspect.Type) -> tuple[inspect.Type, ...]:
    return one.types if isinstance(one, inspect.UnionType) else (one,)


def _below(one: inspect.Type, part: str) -> Iterator[inspect.Type]:
    if isinstance(one, inspect.StructType):
        yield from (field.type for field in one.fields if field.encode_name == part)
    elif isinstance(one, inspect.ListType) and part == "[...]":
        yield one.item_type
