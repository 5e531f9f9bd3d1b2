"""Lines of a trace file, and what is expected of the values in them."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec


class TraceError(ValueError):
    """A trace cannot be read: which file and line, and what was expected there."""


def lines_of(path: Path) -> Iterator[Line]:
    """The lines of a text file that are not empty, of ``.gz`` as well."""
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8-sig") as file
        ):
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield Line(path, number, text.strip())
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise TraceError(f"{path}: expected a text file, or one packed by gzip ({error})") from error


class Line:
    """One line, which knows where it is."""

    __slots__ = ("number", "path", "text")

    def __init__(self, path: Path, number: int, text: str) -> None:
        self.path, self.number, self.text = path, number, text

    def fail(self, problem: str) -> NoReturn:
        raise TraceError(f"{self.path}, line {self.number}: {problem}")

    def record(self) -> dict[str, Any]:
        """The JSON object that it is."""
        try:
            return msgspec.json.decode(self.text, type=dict[str, Any])
        except msgspec.DecodeError as error:
            self.fail(f"expected a JSON object ({error})")

    def tokens(self, record: Mapping[str, Any], *names: str) -> int:
        """A number of tokens, from 1 on, under the first of ``names`` that is there."""
        value = self.value(record, *names)
        count = _number(value)
        if count is None or count < 1 or count != int(count):
            self.fail(f"{names[0]} is {value!r}, expected a whole number from 1 on")
        return int(count)

    def seconds(self, record: Mapping[str, Any], *names: str, unit: float = 1.0) -> float:
        """A moment or a time in units of ``unit`` seconds."""
        value = self.value(record, *names)
        number = _number(value)
        if number is None or not math.isfinite(number) or number < 0:
            self.fail(f"{names[0]} is {value!r}, expected a number from 0 on")
        return number * unit

    def value(self, record: Mapping[str, Any], *names: str) -> Any:
        for name in names:
            if record.get(name) is not None:
                return record[name]
        self.fail(f"{names[0]} is missing")

    def hashes(self, record: Mapping[str, Any], name: str) -> tuple[int, ...]:
        """Whole numbers; none if they are not there."""
        value = record.get(name) or ()
        if not isinstance(value, list | tuple) or any(type(each) is not int for each in value):
            self.fail(f"{name} is {str(value)[:80]}, expected a list of whole numbers")
        return tuple(value)

    def part(self, record: Mapping[str, Any], name: str) -> dict[str, Any]:
        value = record.get(name)
        if not isinstance(value, dict):
            self.fail(f"{name} is {str(value)[:80]}, expected an object")
        return value

    def names(self, record: Mapping[str, Any], name: str) -> tuple[str, ...]:
        """Ids of requests; none if they are not there."""
        value = record.get(name) or ()
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list | tuple) or any(not isinstance(each, str) for each in value):
            self.fail(f"{name} is {str(value)[:80]}, expected a list of request ids")
        return tuple(value)


def _number(value: object) -> float | None:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def named(value: object) -> str:
    """An id, which may be the number 0; empty if there is none."""
    return "" if value is None else str(value)
