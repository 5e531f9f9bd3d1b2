"""Checks of values, whose errors name the key."""

from __future__ import annotations

import math
from typing import Any


def at_least(key: str, value: float, low: float) -> None:
    """Raise ``ValueError`` naming the key unless ``value`` is a finite number from ``low`` on."""
    if not low <= value < math.inf:
        raise ValueError(f"{key}={value}: expected " + ("a finite number" if value == math.inf else f"at least {low}"))


def between(key: str, value: float, low: float, high: float) -> None:
    """Raise ``ValueError`` naming the key unless ``low <= value <= high``."""
    if not low <= value <= high:
        raise ValueError(f"{key}={value}: expected {low} to {high}")


def one_of(key: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ``ValueError`` naming the key unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{key}={value}: expected one of {', '.join(map(str, choices))}")
