"""Types of argparse, whose complaints name the value and what was expected."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def parsed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """An argparse type that keeps the message of a ``ValueError``."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def whole(low: int) -> Callable[[str], Any]:
    """An argparse type: a whole number of at least ``low``."""

    def parse(text: str) -> int:
        if not re.fullmatch("-?[0-9]+", text) or int(text) < low:
            raise ValueError(f"{text!r}: expected a whole number of at least {low}")
        return int(text)

    return parsed(parse)


def number(low: float) -> Callable[[str], Any]:
    """An argparse type: a finite number of at least ``low``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value < float("inf"):
            raise ValueError(f"{text!r}: expected a number of at least {low:g}")
        return value

    return parsed(parse)


def share(text: str) -> float:
    """An argparse type: from 0 to 1."""
    value = number(0.0)(text)
    if value > 1.0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share from 0 to 1")
    return float(value)
