"""Shares of trials, and how sure they are."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054
"""Of the normal distribution: two-sided, 95 %."""


def share_interval(successes: int, total: int, z: float = Z_95) -> tuple[float, float]:
    """A share's score interval (Wilson, 1927). ``total``: at least 1."""
    share, spread = successes / total, z * z / total
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt((share * (1 - share) + spread / 4) / total)
    return max(0.0, middle - half), min(1.0, middle + half)
