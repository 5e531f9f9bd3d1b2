"""What ``engine top`` computes of two looks and more."""

from typing import Any

import pytest

from engine_lab.top.frame import History, step_parts
from engine_lab.top.poll import COUNTERS, Poll


def look(at_s: float, samples: int = 0, requests: tuple[dict[str, Any], ...] = (), **counted: float) -> Poll:
    said = {"count": samples, "mean": 1.0, **dict.fromkeys(("p50", "p90", "p95", "p99"), 2.0)}
    latency = {f"{name}_ms": said for name in ("ttft", "itl", "tpot", "e2e", "queue")}
    blocks = [{"group": "full", "total": 10, "free": 4, "cached": 3, "leased": 6}]
    stats = {"running": 2, "waiting": 1, "blocks": blocks}
    return Poll(at_s, stats, latency, list(requests), {**dict.fromkeys(COUNTERS, 0.0), **counted})


def history(*polls: Poll) -> History:
    kept = History()
    for poll in polls:
        kept.add(poll)
    return kept


def test_a_first_look_has_no_rates():
    frame = history(look(0.0, output_tokens=500)).frame()
    assert frame.rates.output_tokens is None and frame.series["output_tokens"] == ()
    assert (frame.running, frame.waiting, frame.kv[0].leased) == (2, 1, 6)
    assert frame.minute.step_ms is None and frame.minute.acceptance is None


def test_rates_are_of_the_last_seconds_and_their_series_of_the_minute():
    tokens = (0, 10, 20, 30, 40, 50, 60, 80, 100, 120)
    frame = history(*(look(float(at), output_tokens=float(count)) for at, count in enumerate(tokens))).frame()
    assert frame.rates.output_tokens == pytest.approx((120 - 40) / 5)
    assert frame.series["output_tokens"] == (10.0,) * 6 + (20.0,) * 3
    assert frame.series["running"] == (2,) * 9


def test_looks_further_apart_than_that_have_rates_too():
    assert history(look(0.0), look(30.0, output_tokens=60)).frame().rates.output_tokens == 2.0


def test_what_is_older_than_a_minute_is_forgotten():
    frame = history(*(look(float(at), drafted=10.0 * at, accepted=at * at) for at in range(0, 121, 20))).frame()
    assert len(frame.series["requests"]) == 3
    assert frame.minute.acceptance == pytest.approx((120**2 - 60**2) / 600)


def test_means_of_steps_and_drafts():
    counted = {"steps": 4, "rows": 10, "step_s": 0.02, "host_s": 0.001, "device_s": 0.012, "gap_s": 0.004}
    drafts = {"drafted": 20, "accepted": 9, "chains": 6, "queries": 200, "hits": 50, "preemptions": 1}
    minute = history(look(0.0), look(1.0, **counted, **drafts)).frame().minute
    parts = (minute.gap_ms, minute.device_ms, minute.host_ms, minute.in_line_ms)
    assert (minute.step_ms, *parts) == pytest.approx((5.0, 1.0, 3.0, 0.25, 0.75))
    assert (minute.batch, minute.prefix_hit_rate, minute.preemptions) == (2.5, 0.25, 1)
    assert (minute.acceptance, minute.mean_accepted_length) == pytest.approx((0.45, 2.5))


def test_another_server_at_the_same_url_starts_anew():
    kept = history(look(0.0, output_tokens=90.0), look(1.0, output_tokens=100.0))
    kept.add(look(2.0, output_tokens=5.0))
    assert kept.frame().rates.output_tokens is None
    kept.add(look(3.0, output_tokens=9.0))
    assert kept.frame().rates.output_tokens == 4.0


@pytest.mark.parametrize(
    ("step", "device", "host", "gap", "in_line"),
    [
        (381.0, 173.0, 0.83, 0.4, 206.77),  # overlap: planned while the step before it was on the device
        (11.1, 10.0, 1.0, 1.3, 0.0),  # none: the device waits for the host
    ],
)
def test_a_step_is_the_sum_of_its_parts(step, device, host, gap, in_line):
    parts = step_parts(step, device, host, gap)
    assert parts["in_line_ms"] == pytest.approx(in_line) and parts["gap_ms"] <= gap
    assert sum(parts[f"{name}_ms"] for name in ("gap", "device", "host", "in_line")) == pytest.approx(step)


def test_waits_for_a_core_are_those_of_the_minute():
    polls = look(0.0), look(10.0)
    for poll, ran, waited, others in zip(polls, (5.0, 8.0), (1.0, 2.0), (50.0, 57.0)):
        poll.stats["machine"] = {"at_s": poll.at_s, "cpus": 2, "ran_s": ran, "waited_s": waited, "others_s": others}
    found = history(*polls).frame().minute.machine
    assert (found.waiting, found.others, found.is_busy) == (0.25, 0.7, True)
    assert history(look(0.0), look(1.0)).frame().minute.machine is None, "an engine that does not say"


def test_the_slowest_requests_come_first():
    ended = tuple({"request_id": name, "total_ms": ms} for name, ms in (("a", 5.0), ("b", 900.0), ("c", 40.0)))
    assert [found["request_id"] for found in history(look(0.0, requests=ended)).frame().slowest] == ["b", "c", "a"]
