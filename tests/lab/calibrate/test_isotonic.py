"""A share that rises with a value."""

from __future__ import annotations

import random

import pytest

from engine_lab.calibrate.isotonic import isotonic


def shares(observed: list[tuple[float, bool]], least: int = 1) -> list[tuple[float, float]]:
    return [(step.low, step.share) for step in isotonic(observed, least)]


def test_violators_are_pooled_and_what_ascends_is_kept() -> None:
    given = [(1.0, False), (2.0, True), (3.0, False), (4.0, True)]
    assert shares(given) == [(1.0, 0.0), (2.0, 0.5), (4.0, 1.0)]
    assert shares([(2.0, True), (1.0, True), (3.0, False)]) == [(1.0, pytest.approx(2 / 3))]
    assert shares([(1.0, True), (1.0, False), (1.0, True)]) == [(1.0, pytest.approx(2 / 3))], "equal values are one"
    assert shares([]) == []


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_closest_of_all_that_ascend(seed: int) -> None:
    """Against the formula: the fit at i is the largest, over beginnings, of the smallest, over ends, mean."""
    drawn = random.Random(seed)
    hits = [drawn.random() < i / 30 for i in range(30)]
    expected = [max(min(sum(hits[a:b]) / (b - a) for b in range(i + 1, 31)) for a in range(i + 1)) for i in range(30)]
    steps = isotonic([(float(i), hit) for i, hit in enumerate(hits)], 1)
    fitted = [step.share for step in steps for _ in range(step.total)]
    assert fitted == pytest.approx(expected)


def test_no_step_is_of_fewer_than_it_takes() -> None:
    drawn = random.Random(0)
    steps = isotonic([(drawn.random(), drawn.random() < 0.5) for _ in range(203)], 20)
    assert all(step.total >= 20 for step in steps) and sum(step.total for step in steps) == 203
    assert [step.total for step in isotonic([(1.0, True), (2.0, False)], 20)] == [2]
