"""What is taken of an SLO."""

from dataclasses import replace

import pytest

from engine_lab.bench.record import RequestRecord
from engine_lab.bench.result import Limits
from engine_lab.bench.slo import parse_slo
from engine_lab.sweep.figures import BY_KEY, figures_of, keys_of, shares_of

SLO = parse_slo("ttft=100ms,itl=20ms")


def record(index: int, ttft_ms: float, itl_ms: float = 10.0, service_class: str = "") -> RequestRecord:
    start = ttft_ms / 1e3
    chunks = (start, start + itl_ms / 1e3)
    return RequestRecord(index, 0.0, 0.0, chunks[1], chunks, chunks[1], 10, 0, 2, service_class=service_class)


def test_the_limit_that_a_request_takes_most_of_counts_and_then_the_95th_percentile_of_requests():
    limits = Limits(SLO, {})
    records = [record(i, 10.0 * i) for i in range(1, 21)]
    assert shares_of(limits, records) == {"": pytest.approx(1.9)}
    assert shares_of(limits, [record(i, 10.0, 30.0) for i in range(20)]) == {"": pytest.approx(1.5)}
    assert shares_of(limits, records[9:19]) == {"": pytest.approx(1.9)}  # too few for a P95: the worst counts


def test_a_run_has_the_figures_that_sets_are_ordered_by():
    found = figures_of([record(i, 50.0) for i in range(20)], [0.0], SLO, {})
    assert found.keys() >= BY_KEY.keys() and found["slo"] == pytest.approx(0.5) and found["good"] == 1.0
    assert BY_KEY["tokens_per_s"].worse(4.0) == 0.25 and BY_KEY["e2e"].worse(4.0) == 4.0


def test_a_class_is_judged_by_its_own_limits_and_the_one_that_takes_most_of_them_counts():
    chat = [record(i, 10.0 * i, service_class="chat") for i in range(1, 21)]
    batch = [record(i, 4_000.0 + i, service_class="batch") for i in range(3)]  # too few for a P95: the worst counts
    free = [record(0, 9_000.0, service_class="nobody waits for")]
    limits = {"chat": SLO, "batch": parse_slo("ttft=2001ms")}
    found = figures_of([*chat, *batch, *free], [0.0], None, limits)
    assert found["slo of chat"] == pytest.approx(1.9) and found["slo of batch"] == pytest.approx(2.0)
    assert found["slo"] == found["slo of batch"]
    assert keys_of(found) == [*BY_KEY, "slo of batch", "slo of chat"]
    left = [replace(one, left=True) for one in batch]
    assert figures_of([*chat, *left], [0.0], None, limits)["slo"] == pytest.approx(1.9)
