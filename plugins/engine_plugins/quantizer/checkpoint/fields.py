"""Values of a JSON object, each of the type it should have; what is not is collected as a problem."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


class Fields:
    """One object of a configuration. ``where``: its name in messages. ``null`` counts as missing."""

    def __init__(self, where: str, values: Mapping[str, Any], problems: list[str]) -> None:
        self.where = where
        self.values = values
        self.problems = problems

    def refuse(self, reason: str) -> None:
        """Add a problem, in words."""
        self.problems.append(f"{self.where}: {reason}")

    def wrong(self, key: str, expected: str) -> None:
        """Add a problem: the value of ``key`` is not what is expected."""
        self.problems.append(f"{self.where}.{key}={self.values.get(key)!r}: expected {expected}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def either(self, key: str, other: str) -> str:
        """Which of two names of one thing is there; ``key`` if none is. Refuses values that contradict each other."""
        if not self.has(other):
            return key
        if self.has(key) and str(self.values[key]).lower() != str(self.values[other]).lower():
            self.refuse(f"{key}={self.values[key]!r} and {other}={self.values[other]!r} contradict each other")
        return key if self.has(key) else other

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.wrong(key, "a string")
            return default
        return value

    def one_of(self, key: str, choices: Sequence[str], default: str) -> str:
        """A string, compared in lower case."""
        value = self.text(key, default).lower()
        if value not in choices:
            self.wrong(key, " or ".join(choices))
            return default
        return value

    def integer(self, key: str, default: int) -> int:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.wrong(key, "an integer")
            return default
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(key, "true or false")
            return default
        return value

    def bits(self, key: str, choices: Sequence[int], default: int) -> int:
        value = self.integer(key, default)
        if value not in choices:
            self.wrong(key, " or ".join(map(str, choices)) + " bits")
            return default
        return value

    def group_size(self, key: str, default: int) -> int:
        """Input features that share a scale; -1: all."""
        value = self.integer(key, default)
        if value != -1 and value < 1:
            self.wrong(key, "a positive number, or -1 for one group")
            return default
        return value

    def block(self, key: str) -> tuple[int, int] | None:
        """Two positive integers: output and input features of a block; or both in words, ``128x128``."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,6}x[0-9]{1,6}", value):
            value = [int(size) for size in value.split("x")]
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        if not is_pair or any(type(size) is not int or size < 1 for size in value):
            self.wrong(key, "two positive integers, output and input features of a block")
            return None
        return value[0], value[1]

    def names(self, key: str) -> tuple[str, ...]:
        """A list of strings; patterns (``re:...``) among them compile."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
            self.wrong(key, "a list of names")
            return ()
        return tuple(name for name in value if self.compiles(key, name.removeprefix("re:"), name.startswith("re:")))

    def compiles(self, key: str, pattern: str, is_pattern: bool = True) -> bool:
        """Whether a pattern is a regular expression; says so if not."""
        try:
            if is_pattern:
                re.compile(pattern)
        except re.error as error:
            self.refuse(f"{key} has {pattern!r}, which is no regular expression: {error}")
            return False
        return True

    def section(self, key: str) -> Fields | None:
        """The object below ``key``; ``None`` if there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.wrong(key, "an object")
            return None
        return Fields(f"{self.where}.{key}", value, self.problems)
