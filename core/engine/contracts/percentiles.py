"""Percentiles of latencies, computed in one way wherever the engine reports them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

FEWEST: Mapping[int, int] = {50: 1, 90: 10, 95: 20, 99: 100}
"""Samples from which on a percentile is told. Of fewer, it would be the largest of them under another name."""
PERCENTILES = tuple(FEWEST)
TOO_FEW = f"- is a percentile of too few samples: {', '.join(f'P{p} needs {n}' for p, n in FEWEST.items() if n > 1)}"
"""For those who print them."""

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
    """Count, mean and percentiles of weighted samples; ``None`` for those of too few (:data:`FEWEST`)."""
    count = sum(weight for _, weight in samples)
    if not count:
        return {"count": 0, "mean": None, **{f"p{rank}": None for rank in PERCENTILES}}
    mean = sum(value * weight for value, weight in samples) / count
    told = zip(PERCENTILES, percentiles(samples))
    return {"count": count, "mean": mean, **{f"p{rank}": v if count >= FEWEST[rank] else None for rank, v in told}}
