"""Estimates with intervals: paired differences and ratios, shares, quantiles. Two-sided, from few observations.

Values of one run are not independent (requests queue behind each other), so what is paired and counted here are runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from statistics import NormalDist, median

from engine.contracts.shares import share_interval

LEVEL = 0.95
MOST_EXACT = 60
"""Pairs up to which the distribution of the signed-rank statistic is counted out; beyond, it is taken as normal."""


@dataclass(frozen=True, slots=True)
class Interval:
    """What holds the true value with at least the asked level, under the assumptions of what made it."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval; ``None``: ``n`` observations are too few for one at this level."""

    value: float
    interval: Interval | None
    n: int

    def excludes(self, value: float) -> bool:
        """Whether the interval says that the true value is not this one. Without an interval, nothing is said."""
        return self.interval is not None and value not in self.interval


def hodges_lehmann(differences: Sequence[float], level: float = LEVEL) -> Estimate:
    """The median of all Walsh averages (Hodges and Lehmann, 1963), with the interval that belongs to Wilcoxon's
    signed-rank test: exact for independent differences that are distributed symmetrically around the true one.

    At 95 % there is no interval below 6 differences. Raises ``ValueError`` without any.
    """
    n = len(differences)
    if not n:
        raise ValueError("no differences to estimate from")
    walsh = sorted((a + b) / 2 for i, a in enumerate(differences) for b in differences[i:])
    rank = _signed_rank_tail(n, (1 - level) / 2)
    return Estimate(median(walsh), Interval(walsh[rank - 1], walsh[-rank]) if rank else None, n)


def paired_ratio(before: Sequence[float], after: Sequence[float], level: float = LEVEL) -> Estimate:
    """after / before of paired runs: :func:`hodges_lehmann` of the logarithms. Raises ``ValueError`` for values that
    are not positive."""
    pairs = list(zip(before, after, strict=True))
    if not all(value > 0 for pair in pairs for value in pair):
        raise ValueError("a ratio needs values above 0")
    found = hodges_lehmann([math.log(b / a) for a, b in pairs], level)
    low_high = found.interval
    interval = low_high and Interval(math.exp(low_high.low), math.exp(low_high.high))
    return Estimate(math.exp(found.value), interval, found.n)


def paired_difference(before: Sequence[float], after: Sequence[float], level: float = LEVEL) -> Estimate:
    """after - before of paired runs, for shares and whatever may be 0."""
    return hodges_lehmann([b - a for a, b in zip(before, after, strict=True)], level)


def wilson(successes: int, total: int, level: float = LEVEL) -> Interval:
    """A share's score interval (Wilson, 1927). Raises ``ValueError`` without trials."""
    if not 0 <= successes <= total or not total:
        raise ValueError(f"{successes} successes of {total} trials")
    return Interval(*share_interval(successes, total, NormalDist().inv_cdf((1 + level) / 2)))


def quantile_interval(values: Sequence[float], share: float, level: float = LEVEL) -> Interval | None:
    """A quantile's interval between two order statistics, whatever the distribution of independent values.

    Each side may miss with half of 1 - level, or, where even the outermost value misses more often, with what the other
    side leaves. ``None`` where no two values reach the level: at 95 %, below 59 values for P95 and 299 for P99.
    """
    if not 0 < share < 1:
        raise ValueError(f"quantile {share:g}: expected a share between 0 and 1")
    n, alpha = len(values), 1 - level
    chances = _binomial(n, share)  # of so many values lying below the quantile
    none_below, all_below = chances[0], chances[n]
    if none_below + all_below > alpha:
        return None
    misses_low = max(none_below, min(alpha / 2, alpha - all_below))
    misses_high = max(all_below, min(alpha / 2, alpha - none_below))
    low = sum(chance <= misses_low for chance in accumulate(chances))
    high = n + 1 - sum(chance <= misses_high for chance in accumulate(reversed(chances)))
    ordered = sorted(values)
    return Interval(ordered[low - 1], ordered[high - 1])


def _binomial(n: int, share: float) -> list[float]:
    """Probabilities of 0 to ``n`` successes; by logarithms, as the coefficients overflow a float."""
    yes, no, all_ways = math.log(share), math.log1p(-share), math.lgamma(n + 1)
    return [
        math.exp(all_ways - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * yes + (n - k) * no) for k in range(n + 1)
    ]


@lru_cache
def _signed_rank_tail(n: int, alpha: float) -> int:
    """The largest k with P(T < k) <= alpha, of the signed-rank statistic T of ``n`` differences around 0."""
    if n > MOST_EXACT:
        mean, deviation = n * (n + 1) / 4, math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return max(0, math.floor(mean + NormalDist().inv_cdf(alpha) * deviation + 0.5))
    ways = [1]  # of giving signs to the ranks so far, by the sum of the positive ones
    for rank in range(1, n + 1):
        longer = ways + [0] * rank
        for total, count in enumerate(ways):
            longer[total + rank] += count
        ways = longer
    allowed = alpha * 2**n
    return next(k for k, below in enumerate(accumulate(ways)) if below > allowed)
