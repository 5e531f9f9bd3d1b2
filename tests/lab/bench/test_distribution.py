from __future__ import annotations

import random

import pytest

from engine_lab.bench.distribution import parse_distribution


def draws(text: str, count: int = 4000) -> list[int]:
    distribution = parse_distribution(text)
    rng = random.Random(0)
    return [distribution.sample(rng) for _ in range(count)]


def test_a_number_is_that_number_every_time():
    assert set(draws("128")) == {128}


def test_uniform_reaches_both_ends_and_nothing_beyond():
    found = draws("uniform:3,7")
    assert set(found) == {3, 4, 5, 6, 7}


def test_the_first_parameter_of_lognormal_is_its_mean():
    found = draws("lognormal:500,0.5", 20_000)
    assert sum(found) / len(found) == pytest.approx(500, rel=0.02)
    assert sorted(found)[len(found) // 2] < 460  # skewed: the median is below the mean


def test_lognormal_without_spread_is_fixed():
    assert set(draws("lognormal:40,0")) == {40}


@pytest.mark.parametrize("text", ["128", "uniform:3,7", "lognormal:500,0.5"])
def test_a_distribution_prints_as_it_is_written(text):
    assert str(parse_distribution(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-3", "1.5", "many", "uniform:7,3", "uniform:0,3", "uniform:1.5,3", "uniform:1", "normal:1,2"),
        *("lognormal:0,1", "lognormal:10,-1", "lognormal:nan,1", "lognormal:inf,1", "uniform:1,2,3"),
    ],
)
def test_anything_else_is_refused_by_name(text):
    with pytest.raises(ValueError, match="expected a whole number") as error:
        parse_distribution(text)
    assert repr(text) in str(error.value)
