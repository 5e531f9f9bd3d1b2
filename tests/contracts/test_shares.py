"""How sure a share is."""

from __future__ import annotations

import pytest

from engine.contracts.shares import share_interval


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"), [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)]
)
def test_the_score_interval_is_that_of_wilson(successes: int, total: int, low: float, high: float) -> None:
    """The last one: Newcombe, 1998, table I."""
    assert share_interval(successes, total) == pytest.approx((low, high), abs=1e-4)
