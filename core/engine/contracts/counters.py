"""Metrics as plain data: what is declared once, and read at any moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """The declaration of a metric."""

    kind: Kind
    name: str
    """As Prometheus has it: with the unit, and ``_total`` after a counter's."""
    unit: str
    """``s``, ``tokens``, ``requests``, ... or ``1`` for a share."""
    help: str
    """One sentence."""
    label: str = ""
    """Of a counter or a gauge: what splits it."""
    bounds: tuple[float, ...] = ()
    """Of a histogram: upper bounds of its buckets, ascending. A bucket holds its bound."""


class Reading(msgspec.Struct, frozen=True, omit_defaults=True):
    """A metric and its values at a moment."""

    name: str
    kind: Kind
    unit: str
    help: str
    label: str = ""
    values: dict[str, float] = {}
    """Of a counter or a gauge, by the label's value; that of a metric without label is empty."""
    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    """Of a histogram: observations in each bucket; the last one is of those beyond all bounds."""
    sum: float = 0.0
