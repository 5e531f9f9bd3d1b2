"""Metrics as plain data: what is declared once, and read at any moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from engine.contracts.events import DEFAULT_ENGINE

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
    """What splits a counter or a gauge; empty: nothing does."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, ascending. A bucket holds its bound."""

    @property
    def bucket(self) -> str:
        """Series of a histogram: the cumulative count up to each bound, by label ``le``."""
        return self._of_histogram("bucket")

    @property
    def sum(self) -> str:
        """Series of a histogram: all observed values, added up."""
        return self._of_histogram("sum")

    @property
    def count(self) -> str:
        """Series of a histogram: how many values were observed."""
        return self._of_histogram("count")

    def selector(self, value: str) -> str:
        """The label with this value, as PromQL has it: ``finish_reason="error"``."""
        assert self.label, f"{self.name} has no label"
        return f'{self.label}="{value}"'

    def series(self, value: str) -> str:
        """Series of a counter or a gauge whose label has this value."""
        return f"{self.name}{{{self.selector(value)}}}"

    def _of_histogram(self, part: str) -> str:
        assert self.kind == "histogram", f"{self.name} is a {self.kind}"
        return f"{self.name}_{part}"


class Reading(msgspec.Struct, frozen=True, omit_defaults=True):
    """A metric and its values at a moment."""

    name: str
    kind: Kind
    unit: str
    help: str
    label: str = ""
    values: dict[str, float] = {}
    """Values of a counter or a gauge by the label's value, which is empty for a metric without label."""
    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    """Observations in each bucket of a histogram; the last one is of those beyond all bounds."""
    sum: float = 0.0
    """All values that a histogram observed, added up."""
    engine: str = DEFAULT_ENGINE
    """The id of the engine that was measured."""
