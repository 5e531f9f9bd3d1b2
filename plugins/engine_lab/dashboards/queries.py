"""PromQL over the chosen engines."""

from __future__ import annotations

from engine.contracts.counters import Metric
from engine_lab.dashboards.model import SELECTED, Query


def selected(metric: Metric | str, labels: str = "") -> str:
    """A metric, or a series of a histogram."""
    name = metric.name if isinstance(metric, Metric) else metric
    return f"{name}{{{SELECTED}{',' * bool(labels)}{labels}}}"


def rate(metric: Metric | str, labels: str = "", by: str = "") -> str:
    """A second, of all engines together."""
    return f"sum{f' by ({by})' * bool(by)} (rate({selected(metric, labels)}[$__rate_interval]))"


def share(part: Metric | str, whole: Metric | str, labels: str = "") -> str:
    """Of two counters' rates."""
    return f"{rate(part, labels)} / {rate(whole)}"


def mean(histogram: Metric) -> str:
    return share(histogram.sum, histogram.count)


def quantile(of: float, histogram: Metric) -> str:
    return f"histogram_quantile({of:g}, {rate(histogram.bucket, by='le')})"


def quantiles(histogram: Metric) -> tuple[Query, ...]:
    return tuple(Query(quantile(of, histogram), f"P{100 * of:g}") for of in (0.5, 0.95, 0.99))


def gauge(metric: Metric, reduce: str = "sum", by: str = "") -> str:
    return f"{reduce}{f' by ({by})' * bool(by)} ({selected(metric)})"
