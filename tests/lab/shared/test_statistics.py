"""Estimates and intervals against counted-out distributions and published values."""

import math
import random
from itertools import product
from statistics import median

import pytest

from engine_lab.shared.statistics import (
    hodges_lehmann,
    paired_difference,
    paired_ratio,
    quantile_interval,
    wilson,
)


def test_the_estimate_is_the_median_of_the_averages_of_all_pairs():
    values = [1.0, 4.0, 9.0]
    assert hodges_lehmann(values).value == median([1.0, 2.5, 5.0, 4.0, 6.5, 9.0])


@pytest.mark.parametrize(("n", "rank"), [(6, 1), (7, 3), (8, 4), (10, 9), (12, 14), (20, 53), (25, 90)])
def test_the_interval_is_between_the_ranks_of_published_tables(n, rank):
    """Ranks are critical values of the signed-rank test at 5 %, two-sided, plus 1."""
    values = [2.0**i for i in range(n)]  # no two pairs have the same average
    walsh = sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])
    interval = hodges_lehmann(values).interval
    assert (interval.low, interval.high) == (walsh[rank - 1], walsh[-rank])


def test_the_interval_covers_as_often_as_all_signs_say():
    n, sizes = 8, [1.0, 2.1, 3.3, 4.7, 6.2, 8.9, 11.4, 15.8]
    covered = sum(
        0.0 in hodges_lehmann([s * size for s, size in zip(signs, sizes)]).interval
        for signs in product((-1, 1), repeat=n)
    )
    assert 0.95 <= covered / 2**n < 0.97


def test_five_differences_have_no_interval_and_exclude_nothing():
    found = hodges_lehmann([5.0, 5.1, 5.2, 5.3, 5.4])
    assert found.value == pytest.approx(5.2)
    assert found.interval is None and not found.excludes(0.0)


def test_many_differences_have_the_interval_of_the_normal_distribution():
    rng = random.Random(1)
    values = [rng.gauss(3.0, 1.0) for _ in range(200)]
    interval = hodges_lehmann(values).interval
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * math.sqrt(math.pi / 3 / 200), rel=0.2)
    assert 3.0 in interval


def test_a_ratio_is_of_after_to_before_and_ignores_the_unit():
    before, after = [10.0, 12.0, 9.0, 11.0, 10.0, 13.0], [5.0, 6.0, 4.5, 5.5, 5.0, 6.5]
    found = paired_ratio(before, after)
    assert found.value == pytest.approx(0.5) and found.excludes(1.0)
    assert paired_ratio([1e3 * x for x in before], [1e3 * x for x in after]).value == pytest.approx(0.5)


def test_a_ratio_of_nothing_is_refused():
    with pytest.raises(ValueError, match="values above 0"):
        paired_ratio([1.0, 0.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="no differences"):
        paired_difference([], [])


def test_a_difference_may_start_at_zero():
    assert paired_difference([0.0] * 6, [0.5] * 6).interval.low == 0.5


def test_wilsons_interval_has_its_published_values():
    found = wilson(8, 10)
    assert (found.low, found.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 20).high == pytest.approx(0.1611, abs=1e-4) and wilson(0, 20).low == 0.0
    assert wilson(20, 20).high == 1.0
    with pytest.raises(ValueError, match="0 trials"):
        wilson(0, 0)


@pytest.mark.parametrize(("share", "least"), [(0.95, 59), (0.99, 299), (0.999, 2995), (0.5, 6)])
def test_a_quantile_has_an_interval_from_so_many_values_on(share, least):
    assert quantile_interval(range(least - 1), share) is None
    found = quantile_interval(range(least), share)
    assert found.low <= share * least <= found.high + 1


def test_p99_of_a_thousand_lies_between_its_known_ranks():
    found = quantile_interval(range(1, 1001), 0.99)
    assert (found.low, found.high) == (983, 997)


def test_a_quantiles_interval_covers_at_the_level():
    rng = random.Random(2)
    covered = sum(0.9 in quantile_interval([rng.random() for _ in range(60)], 0.9) for _ in range(500))
    assert covered / 500 > 0.93
