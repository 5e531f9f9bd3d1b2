"""Percentiles of latencies, computed in one way wherever the engine reports them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

PERCENTILES = (50, 90, 95, 99)

Sample = tuple[float, int]
"""(value, weight): a value that was observed ``weight`` times."""


def percentiles(samples: Iterable[Sample], ranks: Sequence[float] = PERCENTILES) -> tuple[float, ...]:
    """Nearest-rank percentiles of weighted samples: each is the smallest observed value such that at least
    that share of all observations is no greater. ``ranks`` ascend, in percent. Raises ``ValueError`` without
    samples."""
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("percentiles of no samples")
    total = sum(weight for _, weight in ordered)
    found: list[float] = []
    below = 0
    for value, weight in ordered:
        below += weight
        while len(found) < len(ranks) and below * 100 >= ranks[len(found)] * total:
            found.append(value)
    return tuple(found)


def describe(samples: Sequence[Sample]) -> dict[str, float | int | None]:
    """Count, mean and percentiles of weighted samples."""
    labels = [f"p{rank}" for rank in PERCENTILES]
    count = sum(weight for _, weight in samples)
    if not count:
        return {"count": 0, "mean": None, **dict.fromkeys(labels)}
    mean = sum(value * weight for value, weight in samples) / count
    return {"count": count, "mean": mean, **dict(zip(labels, percentiles(samples)))}
