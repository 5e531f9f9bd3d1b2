from __future__ import annotations

import random

import pytest

from engine.contracts.events import FirstTokenEvent, TokensEvent
from engine.contracts.percentiles import describe, percentiles
from engine.service.latency import RollingLatency
from engine.testing.exporter import request_event, step_event


def make(now: float = 0.0, **changes) -> RollingLatency:
    return RollingLatency(clock=lambda: now, **changes)


def test_percentiles_are_values_that_were_observed():
    values = [(float(v), 1) for v in range(1, 101)]
    random.Random(0).shuffle(values)
    assert percentiles(values, (1, 50, 90, 95, 99, 100)) == (1, 50, 90, 95, 99, 100)
    assert percentiles([(7.0, 1)]) == (7.0, 7.0, 7.0, 7.0)


def test_percentiles_of_weighted_samples_equal_those_of_repeated_ones():
    rng = random.Random(1)
    weighted = [(rng.random(), rng.randint(1, 9)) for _ in range(200)]
    repeated = [(value, 1) for value, weight in weighted for _ in range(weight)]
    assert percentiles(weighted) == percentiles(repeated)


def test_percentiles_of_nothing_are_an_error():
    with pytest.raises(ValueError):
        percentiles([])


def test_every_latency_is_summarised_from_its_own_event():
    latency = make()
    latency.add([FirstTokenEvent(0.0, "r", 20.0), TokensEvent(0.0, "r", 3, 1.0), TokensEvent(0.0, "r", 1, 9.0)])
    latency.add([request_event(0.0), step_event(0.0)])
    summary = latency.summary()
    assert summary["ttft_ms"]["p50"] == 20.0
    assert (summary["itl_ms"]["count"], summary["itl_ms"]["mean"], summary["itl_ms"]["p50"]) == (4, 3.0, 1.0)
    assert (summary["tpot_ms"]["p50"], summary["e2e_ms"]["p50"], summary["queue_ms"]["p50"]) == (10.0, 60.0, 4.0)


@pytest.mark.parametrize("rank", [90, 95, 99])
def test_a_percentile_is_told_of_so_many_samples_that_one_may_lie_above_it(rank):
    fewest = 100 // (100 - rank)
    few, enough = (describe([(float(n), 1) for n in range(count)]) for count in (fewest - 1, fewest))
    assert few[f"p{rank}"] is None, "it would be the largest"
    assert enough[f"p{rank}"] < fewest - 1
    assert few["p50"] is not None and few["mean"] is not None


def test_requests_that_were_aborted_count_for_queueing_only():
    latency = make()
    latency.add([request_event(0.0, "abort")])
    summary = latency.summary()
    assert (summary["e2e_ms"]["count"], summary["tpot_ms"]["count"], summary["queue_ms"]["count"]) == (0, 0, 1)


def test_samples_older_than_the_window_are_left_out():
    latency = make(now=400.0, window_s=300.0)
    latency.add([FirstTokenEvent(99.0, "old", 1000.0), FirstTokenEvent(101.0, "new", 10.0)])
    assert latency.summary()["ttft_ms"]["count"] == 1
    assert latency.summary()["ttft_ms"]["p50"] == 10.0


def test_only_the_newest_samples_are_kept():
    latency = make(max_samples=10)
    latency.add([FirstTokenEvent(0.0, "r", float(i)) for i in range(1000)])
    assert latency.summary()["ttft_ms"]["count"] == 10
    assert latency.summary()["ttft_ms"]["p50"] == 994.0


def test_without_samples_there_are_no_figures():
    assert make().summary()["itl_ms"] == {"count": 0, "mean": None, "p50": None, "p90": None, "p95": None, "p99": None}
