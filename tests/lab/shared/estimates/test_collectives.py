"""Times of all-reduces: figures as they are, and what is between and beyond them."""

from __future__ import annotations

import pytest

from engine_lab.shared.estimates.collectives import PUBLISHED, RATE, Collectives, Figure, collectives, figures_from
from engine_lab.shared.estimates.errors import EstimateError

LINK = 100e9


def of(*figures: tuple[int, int, float]) -> Collectives:
    """``(ranks, bytes, us)``"""
    return collectives("ring", LINK, [Figure("ring", *each, device="any", source="a test") for each in figures])


def test_a_figure_is_what_it_is():
    assert of((4, 1024, 10.0), (4, 4096, 20.0)).all_reduce_us(4096, 4) == 20.0


def test_between_figures_the_time_is_a_power_of_bytes():
    constant, proportional, between = (of((4, 1024, 10.0), (4, 4096, end)) for end in (10.0, 40.0, 20.0))
    assert constant.all_reduce_us(2048, 4) == 10.0
    assert proportional.all_reduce_us(2048, 4) == pytest.approx(20.0)
    assert between.all_reduce_us(2048, 4) == pytest.approx(10.0 * 2**0.5)


def test_below_the_first_figure_latency_counts_alone():
    assert of((4, 1024, 10.0), (4, 4096, 20.0)).all_reduce_us(8, 4) == 10.0


def test_beyond_the_last_figure_bytes_cross_links():
    found = of((4, 1024, 10.0)).all_reduce_us(1024 + 10**9, 4)
    assert found == pytest.approx(10.0 + 2 * 3 / 4 * 1e9 / (RATE * LINK) * 1e6)


def test_a_sum_over_one_rank_takes_no_time():
    assert of((4, 1024, 10.0)).all_reduce_us(10**6, 1) == 0.0


def test_figures_of_as_many_ranks_count_before_those_of_others():
    found = of((2, 1024, 7.0), (4, 1024, 10.0), (0, 1024, 30.0))
    assert [found.all_reduce_us(1024, ranks) for ranks in (2, 3, 4, 8)] == [7.0, 10.0, 10.0, 10.0]
    assert of((0, 1024, 30.0)).all_reduce_us(1024, 4) == 30.0


@pytest.mark.parametrize("method", ["NCCL", "one-shot", "two-shot", "multimem"])
def test_published_times_rise_with_bytes(method):
    found = collectives(method.upper(), 450e9)
    times = [found.all_reduce_us(2**power, 4) for power in range(3, 28)]
    assert times == sorted(times) and found.labels == "published" and found.method == method


def test_every_published_figure_has_its_source():
    assert all(figure.source and figure.label == "published" for figure in PUBLISHED)


def test_measured_figures_are_read_from_json():
    row = {
        "method": "shm",
        "ranks": 2,
        "num_bytes": 8,
        "us": 5,
        "device": "a CPU",
        "source": "here",
        "label": "measured",
    }
    found = collectives("shm", LINK, figures_from([row]))
    assert (found.all_reduce_us(8, 2), found.labels) == (5.0, "measured")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "expected a list"),
        ([3], "figure 0: 3, expected an object"),
        ([{"method": "shm"}], "figure 0: ranks is missing"),
        ([{"size": 3}], "'size' is unknown"),
        (
            [{"method": "x", "ranks": "2", "num_bytes": 8, "us": 5, "device": "", "source": ""}],
            "ranks '2', expected a n",
        ),
        ([{"method": "x", "ranks": 1, "num_bytes": 8, "us": 5, "device": "", "source": ""}], "at least 2 ranks"),
        ([{"method": "x", "ranks": 2, "num_bytes": 8, "us": 0, "device": "", "source": ""}], "positive numbers"),
    ],
)
def test_odd_figures_are_refused(values, message):
    with pytest.raises(EstimateError, match=message):
        figures_from(values)


def test_an_unknown_method_is_refused_with_those_that_are_known():
    with pytest.raises(
        EstimateError, match=r"'nvls': no figures of it; expected one of NCCL, one-shot, two-shot, mult"
    ):
        collectives("nvls", LINK)


@pytest.mark.parametrize(("num_bytes", "ranks"), [(-1, 2), (8, 0)])
def test_an_impossible_sum_is_refused(num_bytes, ranks):
    with pytest.raises(EstimateError, match="expected at least 0 and 1"):
        of((2, 8, 1.0)).all_reduce_us(num_bytes, ranks)
