"""Figures of a window."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.machine import MachineUse
from engine_lab.doctor.figures import (
    COSTS,
    Look,
    Seen,
    Series,
    dispersion,
    figures_of,
    machine_of,
    series_of,
)
from engine_lab.shared.live import Sample


def request(**more: Any) -> dict[str, Any]:
    usual = {
        "finish_reason": "stop",
        "prompt_tokens": 100,
        "cached_tokens": 50,
        "output_tokens": 10,
        "max_tokens": 64,
        "stream": True,
        "preemptions": 0,
        "total_ms": 100.0,
        "ttft_ms": 20.0,
        "spans": {"queue": 1.0, "prefill": 15.0, "decode": 80.0},
        "draft_chains": 0,
        "accepted_tokens": 0,
        "meanwhile": {"write_ms": 2.0, "unread_ms": 1.0},
        "ended_s_ago": 0.5,
    }
    return usual | more


def seen(
    before: Series | None = None, after: Series | None = None, looks: list[Look] | None = None, **more: Any
) -> Seen:
    usual: dict[str, Any] = {"requests": [], "details": [], "cost": None}
    return Seen(10.0, before or {}, after or {}, looks or [], **(usual | more))


def test_the_machine_of_a_window_is_kept_as_figures() -> None:
    machine = MachineUse(2, 0.4, 0.9, 0.05, None, 0.5, 3.0)
    found = figures_of(seen(machine=machine))
    assert (found["waiting_for_core"], found["others_cpus"], found["stolen_share"]) == (0.4, 0.9, 0.05)
    assert "throttled_share" not in found and machine_of(found).is_busy
    assert not machine_of(figures_of(seen())).is_busy, "nothing is known"


def test_counters_count_from_the_beginning_of_the_window() -> None:
    count, device = ("engine_step_seconds_count", ""), ("engine_step_device_seconds_sum", "")
    before: Series = {count: 10.0, device: 5.0}
    after: Series = {count: 110.0, device: 10.0}
    found = figures_of(seen(before, after))
    assert found["steps"] == 100.0
    assert found["device_ms"] == pytest.approx(50.0)
    assert found["busy_share"] == pytest.approx(0.5)


def test_a_counter_that_appears_within_the_window_began_at_zero() -> None:
    assert figures_of(seen({}, {("engine_rejected_total", ""): 4.0}))["rejected"] == 4.0


def test_a_step_cost_is_shown_once_something_is_fitted() -> None:
    nothing = dict.fromkeys(COSTS, 0.0)
    assert "cost.base_ms" not in figures_of(seen(cost={"cost": nothing}))
    assert figures_of(seen(cost={"cost": nothing | {"per_row_ms": 0.5}}))["cost.per_row_ms"] == 0.5


def test_a_window_without_requests_has_no_figures_of_requests() -> None:
    found = figures_of(seen())
    assert found["requests"] == 0.0
    assert "ttft_p50_ms" not in found
    assert not any(math.isnan(value) for value in found.values())


def test_requests_that_were_aborted_say_nothing_of_latency() -> None:
    requests = [request(), request(finish_reason="abort", ttft_ms=9999.0)]
    assert figures_of(seen(requests=requests))["ttft_p50_ms"] == 20.0


def test_the_share_of_cached_tokens_is_of_all_prompts_together() -> None:
    requests = [request(prompt_tokens=900, cached_tokens=900), request(prompt_tokens=100, cached_tokens=0)]
    assert figures_of(seen(requests=requests))["cached_share"] == pytest.approx(0.9)


def test_growth_of_the_queue_is_from_the_first_third_to_the_last() -> None:
    looks = [Look(1, waiting, 0.5) for waiting in (0, 0, 3, 3, 6, 6)]
    found = figures_of(seen(looks=looks))
    assert found["waiting_growth"] == 6.0
    assert found["waiting_share"] == pytest.approx(4 / 6, abs=1e-4)


def test_bursts_are_dispersed_and_a_metronome_is_not() -> None:
    bursts = [2.0 * burst for burst in range(6) for _ in range(8)]
    steady = [0.25 * number + 0.1 for number in range(48)]
    assert dispersion(bursts)["arrivals_dispersion"] > 5.0
    assert dispersion(steady)["arrivals_dispersion"] < 0.2


def test_what_others_have_in_common_is_told_apart_by_why() -> None:
    kinds = ("inserted", "order", "evicted", "differs")
    one: dict[str, Any] = {"prompt_tokens": 100, "cached_tokens": 0, "spans": []}
    details = [one | {"prefix": {"kind": kind, "shared_tokens": 20}} for kind in kinds]
    found = figures_of(seen(details=details))
    assert (found["early_share"], found["order_share"], found["evicted_share"]) == (0.25, 0.25, 0.25)
    assert found["shared_share"] == pytest.approx(0.2)


def test_series_are_summed_over_labels_that_do_not_matter() -> None:
    rejected = [Sample("engine_rejected_total", {"status": status, "model": "m"}, 2.0) for status in ("429", "503")]
    assert series_of(rejected) == {("engine_rejected_total", ""): 4.0}
