"""Which layers a list of names and patterns means."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

LINEAR = "Linear"
"""The class of every layer asked for here."""


def targets(name: str, entry: str) -> bool:
    """compressed-tensors: a layer's whole name, ``re:`` and the beginning of a match, or the class ``Linear``."""
    return _is_named(name, entry) or entry == LINEAR


def precedence(entry: str) -> int:
    """compressed-tensors: a name counts for more than a pattern, a pattern for more than a class."""
    if entry.startswith("re:"):
        return 1
    return 2 if entry == LINEAR else 0


def lists_module(name: str, entries: Iterable[str]) -> bool:
    """``modules_to_not_convert`` and the like: a layer, the end of its name, or a module it is in."""
    modules = name.split(".")
    places = {".".join(part) for i in range(len(modules)) for part in (modules[: i + 1], modules[i:])}
    # Sets: a mixture has tens of thousands of layers, and a list may name hundreds.
    return any(entry in places or _is_named(name, entry) for entry in entries)


def lists_part(name: str, entries: Iterable[str]) -> bool:
    """AutoAWQ: any part of a layer's name."""
    return any(entry in name for entry in entries)


def lists_wildcard(name: str, entries: Iterable[str]) -> bool:
    """ModelOpt: names with ``*`` and ``?``, of a layer or of a module it is in."""
    modules = name.split(".")
    ancestors = [".".join(modules[: i + 1]) for i in range(len(modules))]
    return any(fnmatchcase(module, entry) for entry in entries for module in ancestors)


def _is_named(name: str, entry: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    return name == entry
