"""Values of a checkpoint's configuration, each of the type and the size it should have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.checkpoint import limits
from engine.checkpoint.files import CheckpointError, clipped


class Values:
    """One JSON object. ``null`` counts as missing, and what is missing is the default.

    Methods raise :class:`CheckpointError` naming the key, its value and what was expected. ``most``: the name of a
    limit in :mod:`engine.checkpoint.limits`.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def whole(self, key: str, most: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._given(key, default)
        limit: int = getattr(limits, most)
        if type(value) is not int or not least <= value <= limit:
            raise self._wrong(key, f"a whole number from {least} to {limit} ({most})")
        return value

    def number(self, key: str, most: str, default: float | None = None, *, least: float = 0.0) -> float:
        """Larger than ``least``."""
        value = self._given(key, default)
        limit: float = getattr(limits, most)
        if not _is_number(value, least, limit):
            raise self._wrong(key, f"a number larger than {least:g} and at most {limit:g} ({most})")
        return float(value)

    def numbers(self, key: str, most: str, count: int, *, least: float = 0.0) -> tuple[float, ...]:
        """A list of exactly ``count`` numbers larger than ``least``."""
        value = self._given(key, [])
        limit: float = getattr(limits, most)
        if type(value) is not list or len(value) != count or not all(_is_number(v, least, limit) for v in value):
            raise self._wrong(key, f"{count} numbers larger than {least:g} and at most {limit:g} ({most})")
        return tuple(map(float, value))

    def flag(self, key: str, default: bool) -> bool:
        value = self._given(key, default)
        if type(value) is not bool:
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._given(key, default)
        if not _is_name(value):
            raise self._wrong(key, f"one line of at most {limits.MAX_NAME_CHARS} characters (MAX_NAME_CHARS)")
        return str(value)

    def texts(self, key: str, most: str) -> tuple[str, ...]:
        value = self._given(key, [])
        limit: int = getattr(limits, most)
        if type(value) is not list or len(value) > limit or not all(map(_is_name, value)):
            raise self._wrong(key, f"a list of at most {limit} names ({most})")
        return tuple(value)

    def wholes(self, key: str, most: str, *, largest: str) -> tuple[int, ...]:
        """A list of at most ``most`` whole numbers, or one alone."""
        given = self._given(key, [])
        value = given if type(given) is list else [given]
        count, limit = getattr(limits, most), getattr(limits, largest)
        if len(value) > count or not all(type(each) is int and 0 <= each <= limit for each in value):
            expected = f"whole numbers from 0 to {limit} ({largest}), at most {count} ({most})"
            raise self._wrong(key, expected)
        return tuple(value)

    def section(self, key: str) -> Values:
        """The object below ``key``; an empty one if there is none."""
        value = self._given(key, {})
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object")
        return Values(value)

    def _given(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def _wrong(self, key: str, expected: str) -> CheckpointError:
        if not self.has(key):
            return CheckpointError(f"{key} is missing: expected {expected}")
        return CheckpointError(f"{key}={clipped(self.values[key])}: expected {expected}")


def _is_name(value: Any) -> bool:
    return type(value) is str and len(value) <= limits.MAX_NAME_CHARS and value.isprintable()


def _is_number(value: Any, least: float, most: float) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and least < value <= most
