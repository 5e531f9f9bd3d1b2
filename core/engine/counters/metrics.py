"""Counters, gauges and histograms that are kept.

An observation is one bisection and two additions. Values of labels are known when a metric is made, or come from the
engine: no client can add one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from engine.contracts.counters import Metric, Reading


class Scalar:
    """A counter or a gauge."""

    def __init__(self, metric: Metric, values: Iterable[str] = ("",)) -> None:
        """``values``: the values of the metric's label."""
        self.metric = metric
        self.values: dict[str, float] = dict.fromkeys(values, 0.0)

    def add(self, amount: float, value: str = "") -> None:
        self.values[value] += amount

    def set(self, amount: float, value: str = "") -> None:
        self.values[value] = amount

    def reading(self) -> Reading:
        metric = self.metric
        return Reading(metric.name, metric.kind, metric.unit, metric.help, metric.label, dict(self.values))


class Histogram:
    """Counts observations by bucket."""

    def __init__(self, metric: Metric) -> None:
        assert list(metric.bounds) == sorted(set(metric.bounds)), "bounds ascend"
        self.metric = metric
        self._counts = [0] * (len(metric.bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """Count ``value`` as ``weight`` observations."""
        self._counts[bisect_left(self.metric.bounds, value)] += weight
        self._sum += value * weight

    def reading(self) -> Reading:
        metric = self.metric
        return Reading(
            metric.name, metric.kind, metric.unit, metric.help,
            bounds=metric.bounds, counts=tuple(self._counts), sum=self._sum,
        )  # fmt: skip


class Metrics:
    """Metrics that are read together, in the order in which they are made."""

    def __init__(self) -> None:
        self._made: list[Scalar | Histogram] = []

    def scalar(self, metric: Metric, values: Iterable[str] = ("",)) -> Scalar:
        """``values``: those of the metric's label that are known beforehand."""
        made = Scalar(metric, values)
        self._made.append(made)
        return made

    def histogram(self, metric: Metric) -> Histogram:
        made = Histogram(metric)
        self._made.append(made)
        return made

    def readings(self) -> list[Reading]:
        return [made.reading() for made in self._made]
