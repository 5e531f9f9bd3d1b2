"""Figures as JSON has them."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, TypeVar

from engine_lab.shared.estimates.errors import EstimateError

T = TypeVar("T")


def read(kind: type[T], values: object, what: str) -> T:
    """A ``kind``, a dataclass of numbers and texts, of an object with its fields. Raises :class:`EstimateError` saying
    which field of ``what`` is missing, unknown, or no number or text."""
    if not isinstance(values, dict):
        raise EstimateError(f"{what}: {values!r}, expected an object")
    known: dict[str, Any] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := [key for key in values if key not in known]:
        raise EstimateError(f"{what}: {unknown[0]!r} is unknown, expected {', '.join(known)}")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in values]
    if missing:
        raise EstimateError(f"{what}: {missing[0]} is missing")
    for key, value in values.items():
        is_text = known[key].type == "str"
        fits = isinstance(value, str) if is_text else isinstance(value, int | float) and not isinstance(value, bool)
        if not fits:
            raise EstimateError(f"{what}: {key} {value!r}, expected a {'text' if is_text else 'number'}")
    return kind(**values)
