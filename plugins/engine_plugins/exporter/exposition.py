"""The Prometheus text exposition format (version 0.0.4), as far as an engine needs it.

Metrics are plain lists of numbers: a histogram observation is one bisection and two additions. Label sets
are fixed when a metric is made, so no client can grow the page.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol


class Metric(Protocol):
    """One metric family of a page."""

    def lines(self, labels: str) -> Iterator[str]:
        """Its lines; ``labels`` are the page's rendered constant labels, for example ``model="m"``."""
        ...


class Scalar:
    """A counter or a gauge, optionally split by one label whose values are known beforehand."""

    def __init__(
        self, kind: str, name: str, help: str, label: str | None = None, values: Iterable[str] = ("",)
    ) -> None:
        self.kind, self.name, self.help, self.label = kind, name, help, label
        self.values: dict[str, float] = dict.fromkeys(values, 0.0)

    def add(self, amount: float, value: str = "") -> None:
        self.values[value] += amount

    def set(self, amount: float, value: str = "") -> None:
        self.values[value] = amount

    def lines(self, labels: str) -> Iterator[str]:
        yield from header(self.kind, self.name, self.help)
        for value, amount in self.values.items():
            own = "" if self.label is None else f'{self.label}="{escape(value)}"'
            yield f"{self.name}{braces(labels, own)} {number(amount)}"


class Histogram:
    """Counts per bucket; a bucket holds values up to and including its bound."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds ascend"
        self.name, self.help, self.bounds = name, help, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """Count ``value`` as ``weight`` observations."""
        self.counts[bisect_left(self.bounds, value)] += weight
        self.sum += value * weight

    def lines(self, labels: str) -> Iterator[str]:
        yield from header("histogram", self.name, self.help)
        below = 0
        for bound, count in zip((*self.bounds, math.inf), self.counts):
            below += count
            le = f'le="{number(bound)}"'
            yield f"{self.name}_bucket{braces(labels, le)} {below}"
        yield f"{self.name}_sum{braces(labels)} {number(self.sum)}"
        yield f"{self.name}_count{braces(labels)} {below}"


class Page:
    """Metrics that share constant labels."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.labels = ",".join(f'{name}="{escape(value)}"' for name, value in labels.items())
        self.metrics: list[Metric] = []

    def counter(self, name: str, help: str, label: str | None = None, values: Iterable[str] = ("",)) -> Scalar:
        return self._add(Scalar("counter", name, help, label, values))

    def gauge(self, name: str, help: str, label: str | None = None, values: Iterable[str] = ("",)) -> Scalar:
        return self._add(Scalar("gauge", name, help, label, values))

    def histogram(self, name: str, help: str, bounds: tuple[float, ...]) -> Histogram:
        metric = Histogram(name, help, bounds)
        self.metrics.append(metric)
        return metric

    def _add(self, metric: Scalar) -> Scalar:
        self.metrics.append(metric)
        return metric

    def render(self) -> str:
        return "".join(f"{line}\n" for metric in self.metrics for line in metric.lines(self.labels))


def header(kind: str, name: str, help: str) -> Iterator[str]:
    yield f"# HELP {name} {escape(help)}"
    yield f"# TYPE {name} {kind}"


def braces(*labels: str) -> str:
    inside = ",".join(label for label in labels if label)
    return f"{{{inside}}}" if inside else ""


def escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def number(value: float) -> str:
    """A sample value: integers without exponent, so that large counters stay exact."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) + ".0" if value == int(value) and abs(value) < 2**53 else repr(value)
