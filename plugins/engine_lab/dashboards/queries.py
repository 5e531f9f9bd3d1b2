"""PromQL over the chosen engines."""

from __future__ import annotations

from engine_lab.dashboards.model import SELECTED, Query


def selected(metric: str, labels: str = "") -> str:
    return f"{metric}{{{SELECTED}{',' * bool(labels)}{labels}}}"


def rate(metric: str, labels: str = "", by: str = "") -> str:
    """A second, of all engines together."""
    return f"sum{f' by ({by})' * bool(by)} (rate({selected(metric, labels)}[$__rate_interval]))"


def share(part: str, whole: str, labels: str = "") -> str:
    """Of two counters' rates."""
    return f"{rate(part, labels)} / {rate(whole)}"


def mean(histogram: str) -> str:
    return share(f"{histogram}_sum", f"{histogram}_count")


def quantile(of: float, histogram: str) -> str:
    return f"histogram_quantile({of:g}, {rate(f'{histogram}_bucket', by='le')})"


def quantiles(histogram: str) -> tuple[Query, ...]:
    return tuple(Query(quantile(of, histogram), f"P{100 * of:g}") for of in (0.5, 0.95, 0.99))


def gauge(metric: str, reduce: str = "sum", by: str = "") -> str:
    return f"{reduce}{f' by ({by})' * bool(by)} ({selected(metric)})"
