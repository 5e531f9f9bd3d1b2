from __future__ import annotations

from engine.contracts.events import FirstTokenEvent, RejectedEvent, TokensEvent
from engine.service.history import COLUMNS, MOST_PERIODS, MOST_SAMPLES, PERIOD_S, History
from engine.testing.exporter import request_event, step_event


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def made() -> tuple[History, Clock]:
    clock = Clock()
    return History(clock), clock


def test_what_happened_in_a_period_is_its_figures() -> None:
    history, clock = made()
    history.add([step_event(1.0, running=2, waiting=5, kv_used=0.25, num_prefill_tokens=30)])
    history.add([step_event(2.0, running=3, waiting=1, kv_used=0.5, num_prefill_tokens=10)])
    history.add([FirstTokenEvent(1.0, "a", 20.0), FirstTokenEvent(2.0, "b", 80.0), TokensEvent(2.5, "a", 3, 7.0)])
    history.add([request_event(3.0), request_event(3.0, finish_reason="error"), RejectedEvent(4.0, 429, "queue")])
    history.add([RejectedEvent(4.0, 400, "body")])
    clock.now_s = 4.0
    history.add_machine(0.75, 1.5, is_busy=True)
    columns = history.since()["columns"]
    found = {name: values[0] for name, values in columns.items()}
    assert found == {
        "requests": 2, "errors": 2, "output_tokens": 5, "prompt_tokens": 40,
        "ttft_p50_ms": 20.0, "ttft_p95_ms": None, "ttft_max_ms": 80.0,
        "itl_p50_ms": 7.0, "itl_p95_ms": None, "itl_max_ms": 7.0,
        "running": 3, "waiting": 5, "kv_used": 0.5,
        "cpus_used": 0.75, "cpus_others": 1.5, "machine_busy": True,
    }  # fmt: skip
    assert tuple(columns) == COLUMNS


def test_periods_follow_each_other_without_a_gap_and_the_latest_hour_is_kept() -> None:
    history, clock = made()
    for period in (10, 12, 12 + 2 * MOST_PERIODS):
        history.add([FirstTokenEvent(period * PERIOD_S, "r", float(period))])
        clock.now_s = period * PERIOD_S + 1.0
        if period == 12:
            shown = history.since()
            assert (shown["first"], shown["now"], shown["ago_s"]) == (10, 12, 2 * PERIOD_S + 1.0)
            assert shown["columns"]["ttft_max_ms"] == [10.0, None, 12.0]
            assert shown["columns"]["output_tokens"] == [1, 0, 1]
            assert history.since(12)["columns"]["ttft_max_ms"] == [12.0]
    shown = history.since()
    assert (shown["first"], len(shown["columns"]["requests"])) == (shown["now"] - MOST_PERIODS + 1, MOST_PERIODS)
    assert [value for value in shown["columns"]["ttft_max_ms"] if value] == [shown["now"]]


def test_the_clock_of_an_engines_machine_may_be_ahead() -> None:
    history, clock = made()
    clock.now_s = 2 * PERIOD_S
    history.add([step_event(1e6, running=3), FirstTokenEvent(clock.now_s, "r", 20.0)])
    shown = history.since()
    assert (shown["first"], shown["now"], shown["columns"]["running"]) == (2, 2, [3])
    assert shown["columns"]["ttft_max_ms"] == [20.0]


def test_of_a_period_that_is_still_to_come_the_present_one_is_shown() -> None:
    history, clock = made()
    clock.now_s = 2.5 * PERIOD_S
    history.add([request_event(clock.now_s)])
    shown = history.since(10**9)
    assert (shown["first"], shown["now"], shown["ago_s"]) == (2, 2, 0.5 * PERIOD_S)
    assert shown["columns"]["requests"] == [1]


def test_what_is_kept_has_a_fixed_size() -> None:
    history, _ = made()
    for period in range(MOST_PERIODS + 5):
        history.add([FirstTokenEvent(period * PERIOD_S, "r", 1.0)] * 2)
    history.add([TokensEvent(period * PERIOD_S, "r", 1, 1.0)] * (MOST_SAMPLES + 5))
    assert len(history._over[""]) == MOST_PERIODS and len(history._open[""].itl) == MOST_SAMPLES


def test_a_class_has_its_own_requests_and_no_steps() -> None:
    history, _ = made()
    history.add([step_event(1.0), FirstTokenEvent(1.0, "a", 20.0, slo_class="chat"), FirstTokenEvent(1.0, "b", 900.0)])
    history.add([TokensEvent(1.0, "a", 1, 4.0, slo_class="chat"), request_event(2.0, slo_class="chat")])
    of_chat, of_all = history.since(0, "chat")["columns"], history.since()["columns"]
    assert (of_chat["ttft_max_ms"], of_chat["itl_max_ms"], of_chat["requests"]) == ([20.0], [4.0], [1])
    assert of_chat["running"] == [None] and of_all["running"] != [None]
    assert (of_all["ttft_max_ms"], of_all["requests"]) == ([900.0], [1])
    assert history.since(0, "never")["columns"]["requests"] == [0]
