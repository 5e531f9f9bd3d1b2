"""What is taken of an SLO."""

import pytest

from engine_lab.bench.record import RequestRecord
from engine_lab.bench.slo import parse_slo
from engine_lab.sweep.figures import BY_KEY, figures_of, share_of

SLO = parse_slo("ttft=100ms,itl=20ms")


def record(index: int, ttft_ms: float, itl_ms: float = 10.0) -> RequestRecord:
    start = ttft_ms / 1e3
    chunks = (start, start + itl_ms / 1e3)
    return RequestRecord(index, 0.0, 0.0, chunks[1], chunks, chunks[1], 10, 0, 2)


def test_the_limit_that_a_request_takes_most_of_counts_and_then_the_95th_percentile_of_requests():
    records = [record(i, 10.0 * i) for i in range(1, 21)]
    assert share_of(SLO, records) == pytest.approx(1.9)
    assert share_of(SLO, [record(i, 10.0, 30.0) for i in range(20)]) == pytest.approx(1.5)
    assert share_of(SLO, records[:19]) is None


def test_a_run_has_the_figures_that_sets_are_ordered_by():
    found = figures_of([record(i, 50.0) for i in range(20)], [0.0], SLO)
    assert found.keys() >= BY_KEY.keys() and found["slo"] == pytest.approx(0.5) and found["good"] == 1.0
    assert BY_KEY["tokens_per_s"].worse(4.0) == 0.25 and BY_KEY["e2e"].worse(4.0) == 4.0
