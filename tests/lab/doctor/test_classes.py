"""Who gets what, and whom a change harms."""

from __future__ import annotations

import math
from typing import Any

from engine_lab.doctor.classes import Recorded, by_class, harmed, long_from, p95s


def request(prompt: int = 60, itl: float = 5.0, ttft: float = 20.0, **more: Any) -> Recorded:
    usual = {"cached_tokens": 0, "output_tokens": 32, "max_tokens": 32, "stream": True, "e2e_ms": ttft + 31 * itl}
    return Recorded(0.0, prompt, ttft_ms=ttft, itl_ms=itl, **(usual | more))


def test_long_prompts_are_those_far_from_the_short_ones() -> None:
    assert 60 < long_from([60] * 90 + [1850] * 10) < 1850
    assert math.isinf(long_from([100, 150, 300])) and math.isinf(long_from([64]))
    assert list(by_class([request(60), request(1850)])) == ["short", "long"]
    assert list(by_class([request(60), request(90)])) == ["all"] and by_class([]) == {}
    assert list(by_class([request(60), request(90)], 300.0)) == ["short"]


def test_classes_of_the_server_come_before_lengths() -> None:
    assert set(by_class([request(60, of_class="chat"), request(1850, of_class="batch")])) == {"chat", "batch"}


def test_a_change_that_is_good_on_average_harms_the_short_ones() -> None:
    before = p95s([request(60, itl=40.0)] * 3 + [request(1850, itl=40.0, ttft=2000.0)])
    after = p95s([request(60, itl=70.0)] * 3 + [request(1850, itl=5.0, ttft=300.0)])
    lines = list(harmed(before, after))
    assert lines and all(line.startswith("short: ") for line in lines)
    assert any("ITL P95 40 -> 70 ms (x 1.75)" in line for line in lines)


def test_an_itl_that_stays_below_the_limit_of_a_chat_harms_nobody() -> None:
    before, after = (p95s([request(itl=itl, e2e_ms=500.0)]) for itl in (4.0, 12.0))
    assert list(harmed(before, after)) == []
    assert p95s([request(output_tokens=1)])["all"].keys() == {"ttft_ms", "e2e_ms"}
