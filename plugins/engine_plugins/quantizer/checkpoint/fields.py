"""Values of a JSON object, each of the type it should have; what is not is collected as a problem."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.checkpoint.files import clipped, shown
from engine.checkpoint.limits import MAX_MODULES, MAX_PATTERN_CHARS
from engine.checkpoint.patterns import why_endless

SHORT = 64
"""Characters. Every string here is a word: the name of a method, a layout, a number type."""


class Fields:
    """One object of a configuration. ``where``: its name in messages. ``null`` counts as missing."""

    def __init__(
        self, where: str, values: Mapping[str, Any], problems: list[str], patterns: list[int] | None = None
    ) -> None:
        """``patterns``: after each regular expression so far, the characters of all of them."""
        self.where = where
        self.values = values
        self.problems = problems
        self._patterns: list[int] = [0] if patterns is None else patterns

    def refuse(self, reason: str) -> None:
        """Add a problem, in words."""
        self.problems.append(f"{self.where}: {reason}")

    def wrong(self, key: str, expected: str) -> None:
        """Add a problem: the value of ``key`` is not what is expected."""
        self.problems.append(f"{self.where}.{key}={clipped(self.values.get(key))}: expected {expected}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def either(self, key: str, other: str) -> str:
        """Which of two names of one thing is there; ``key`` if none is. Refuses values that contradict each other."""
        if not self.has(other):
            return key
        if self.has(key) and str(self.values[key]).lower() != str(self.values[other]).lower():
            both = f"{key}={clipped(self.values[key])} and {other}={clipped(self.values[other])}"
            self.refuse(f"{both} contradict each other")
        return key if self.has(key) else other

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > SHORT or not value.isprintable():
            self.wrong(key, f"a string of at most {SHORT} characters")
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
        if len(value) > MAX_MODULES:
            self.wrong(key, f"at most {MAX_MODULES} names (MAX_MODULES)")
            return ()
        return tuple(name for name in value if self.compiles(key, name.removeprefix("re:"), name.startswith("re:")))

    def compiles(self, key: str, pattern: str, is_pattern: bool = True) -> bool:
        """Whether a pattern is a regular expression that can be matched in time; says so if not."""
        if not is_pattern:
            return True
        before = self._patterns[-1]
        self._patterns.append(before + len(pattern))
        if before + len(pattern) > MAX_PATTERN_CHARS:
            if before <= MAX_PATTERN_CHARS:
                most = f"at most {MAX_PATTERN_CHARS} are read (MAX_PATTERN_CHARS)"
                self.refuse(f"{key}: its patterns and those before them have too many characters, {most}")
            return False
        if why := why_endless(pattern, by_python=True):
            self.refuse(f"{key} has {clipped(pattern)}: {why}")
            return False
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            self.refuse(f"{key} has {clipped(pattern)}, which is no regular expression: {error}")
            return False
        return True

    def section(self, key: str) -> Fields | None:
        """The object below ``key``; ``None`` if there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping) or len(value) > MAX_MODULES:
            self.wrong(key, f"an object of at most {MAX_MODULES} entries (MAX_MODULES)")
            return None
        return Fields(f"{self.where}.{shown(key)}", value, self.problems, self._patterns)
