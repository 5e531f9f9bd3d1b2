"""Numbers that rules compare: each as Prometheus computes it, and computed here."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from engine.contracts.counters import Metric
from engine_lab.alerts.history import History
from engine_lab.shared import live

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, "<": operator.lt, ">=": operator.ge, "==": operator.eq,
}  # fmt: skip
_LE = re.compile(r'_bucket\{le="([^"]+)"\}')


@dataclass(frozen=True, slots=True)
class Term:
    """A number of one engine; NaN where nothing is known, with which every comparison is false."""

    promql: str
    value: Callable[[History], float]

    def times(self, factor: float) -> Term:
        return Term(f"{factor:g} * {self.promql}", lambda history: factor * self.value(history))


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison; what is compared is the alert's value."""

    left: Term
    compare: str
    right: Term | float
    is_minimum: bool = False
    """It says whether the others say something."""

    @property
    def promql(self) -> str:
        right = self.right.promql if isinstance(self.right, Term) else f"{self.right:g}"
        return f"{self.left.promql} {self.compare} {right}"

    def is_known(self, history: History) -> bool:
        if self.is_minimum:
            return self.holds(history)
        right = self.right.value(history) if isinstance(self.right, Term) else self.right
        return not math.isnan(self.left.value(history) + right)

    def holds(self, history: History) -> bool:
        right = self.right.value(history) if isinstance(self.right, Term) else self.right
        return COMPARE[self.compare](self.left.value(history), right)


def seconds(window: str) -> float:
    """Of a duration such as ``5m``."""
    return int(window[:-1]) * SECONDS[window[-1]]


def gauge(metric: Metric) -> Term:
    return Term(metric.name, lambda history: history.latest(metric.name))


def increase(series: str, window: str) -> Term:
    return Term(f"increase({series}[{window}])", lambda history: history.increase(series, seconds(window)))


def ratio(part: Metric, whole: Metric, window: str) -> Term:
    """Of two counters' increases."""
    over, under = increase(part.name, window), increase(whole.name, window)
    return Term(f"({over.promql} / {under.promql})", lambda history: _divide(over.value(history), under.value(history)))


def share_above(histogram: Metric, bound_s: float, window: str) -> Term:
    """Share of a histogram's observations above the bound of a bucket."""
    bucket = increase(f'{histogram.bucket}{{le="{bound_s!r}"}}', window)
    count = increase(histogram.count, window)
    return Term(
        f"(1 - {bucket.promql} / ignoring(le) {count.promql})",
        lambda history: 1.0 - _divide(bucket.value(history), count.value(history)),
    )


def quantile(share: float, histogram: Metric, window: str) -> Term:
    """Of a histogram's observations, by linear interpolation within a bucket."""

    def value(history: History) -> float:
        buckets = {
            float(found[1]): history.increase(series, seconds(window))
            for series in history.known
            if series.startswith(histogram.bucket) and (found := _LE.search(series))
        }
        return live.quantile(share, buckets)

    return Term(f"histogram_quantile({share:g}, rate({histogram.bucket}[{window}]))", value)


def _divide(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
