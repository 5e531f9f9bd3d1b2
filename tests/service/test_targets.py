"""Servers elsewhere: whether they are given requests, and which have a model."""

from __future__ import annotations

import pytest

from engine.service.targets import LONGEST_PAUSE_S, MOST_FAILURES, PAUSE_S, Breaker, Target, Targets, taking


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Sending:
    """A request at a target."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def leave(self) -> None:
        self.told.append("leave")

    def check(self, now_s: float) -> None:
        self.told.append(now_s)


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        breaker.failed()


def test_a_breaker_opens_at_the_third_failure_in_a_row_and_closes_by_itself() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    fail(breaker, MOST_FAILURES - 1)
    assert not breaker.is_open
    breaker.worked()
    fail(breaker, MOST_FAILURES - 1)
    assert not breaker.is_open, "what worked between them ends the row"
    breaker.failed()
    assert breaker.is_open
    clock.now_s = PAUSE_S - 0.1
    assert breaker.is_open
    clock.now_s = PAUSE_S
    assert not breaker.is_open


def test_each_further_failure_holds_requests_back_for_twice_as_long_up_to_a_limit() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    fail(breaker, MOST_FAILURES)
    pauses = []
    for _ in range(50):
        begun_s = clock.now_s
        while breaker.is_open:
            clock.now_s += 1.0
        pauses.append(clock.now_s - begun_s)
        breaker.failed()
    assert pauses == [5.0, 10.0, *[20.0] * 48] and LONGEST_PAUSE_S == 20.0


def test_requests_that_fail_together_are_one_reason_to_wait() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    fail(breaker, 64)
    clock.now_s = PAUSE_S
    assert not breaker.is_open
    breaker.worked()
    fail(breaker, MOST_FAILURES - 1)
    assert not breaker.is_open


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_an_url_may_end_as_clients_base_urls_do(url: str) -> None:
    target = Target.at(url)
    assert (target.url, target.id) == ("http://h:1", "h:1")


def test_a_target_takes_requests_while_it_is_ready_and_neither_drained_nor_failing() -> None:
    target = Target.at("http://h:1")
    assert target.why_not == "not asked yet"
    target.is_ready({"m": {}})
    assert target.takes_requests and target.why_not is None and target.starts == 1
    target.drain()
    assert target.why_not == "draining" and not taking([target])
    target.draining = False
    fail(target.breaker, MOST_FAILURES)
    assert target.why_not == "failed 3 requests in a row"
    target.is_down("cannot be reached", lets_go=False)
    assert target.why_not == "cannot be reached"


def test_only_becoming_ready_is_a_start_and_it_ends_a_row_of_failures() -> None:
    target = Target.at("http://h:1")
    target.is_ready({"m": {}})
    fail(target.breaker, MOST_FAILURES)
    target.is_ready({"m": {}})
    assert (target.starts, target.takes_requests) == (1, False), "it was ready all the time"
    target.is_down("gone", lets_go=False)
    assert target.models == {"m": {}}, "what it had it will have again"
    target.is_ready({"n": {}})
    assert (target.starts, target.takes_requests, target.models) == (2, True, {"n": {}})


def test_requests_leave_a_target_that_is_drained_or_silent_and_stay_while_it_is_only_not_ready() -> None:
    target, sending = Target.at("http://h:1"), Sending()
    target.sendings.add(sending)
    target.is_down("/ready says 503", lets_go=False)
    assert sending.told == []
    target.is_down("does not answer", lets_go=True)
    target.drain()
    target.watch(7.0)
    assert sending.told == ["leave", "leave", 7.0]


@pytest.mark.parametrize(
    ("here", "there", "may"),
    [(8, 4, True), (4, 4, False), (4, 8, False), (None, 8, True), (8, None, True), ("8", 4, True)],
)
def test_a_target_may_take_longer_prompts_unless_both_say_how_long_theirs_are(
    here: object, there: object, may: bool
) -> None:
    first, second = Target.at("http://h:1"), Target.at("http://h:2")
    first.is_ready({"m": {"max_model_len": here}})
    second.is_ready({"m": {"max_model_len": there}})
    assert first.may_exceed(second, "m") is may
    assert first.may_exceed(second, "another one")


def test_targets_that_only_rest_take_requests_where_no_other_does() -> None:
    one, other = Target.at("http://h:1"), Target.at("http://h:2")
    for target in (one, other):
        target.is_ready({"m": {}})
    fail(one.breaker, MOST_FAILURES)
    assert taking([one, other]) == [other]
    fail(other.breaker, MOST_FAILURES)
    assert taking([one, other]) == [one, other]
    one.drain()
    assert taking([one, other]) == [other]
    other.is_down("cannot be reached", lets_go=False)
    assert taking([one, other]) == []


def two() -> Targets:
    targets = Targets(["http://h:1", "http://h:2/v1"])
    targets["h:1"].is_ready({"x": {"of": 1}, "both": {"of": 1}})
    targets["h:2"].is_ready({"both": {"of": 2}, "y:latest": {"of": 2}})
    return targets


@pytest.mark.parametrize(
    ("asked", "name", "ids"),
    [
        ("x", "x", ["h:1"]),
        ("both", "both", ["h:1", "h:2"]),
        ("both:latest", "both", ["h:1", "h:2"]),
        ("y:latest", "y:latest", ["h:2"]),
        ("y", "y", []),
        ("", "", []),
        (None, "x", ["h:1"]),
    ],
)
def test_the_targets_that_have_a_model_are_found(asked: str | None, name: str, ids: list[str]) -> None:
    found, targets = two().serving(asked)
    assert (found, [target.id for target in targets]) == (name, ids)


def test_while_nothing_is_known_nobody_has_a_model() -> None:
    targets = Targets(["http://h:1"])
    assert targets.serving(None) == ("", []) and targets.serving("x") == ("x", [])


def test_models_are_those_of_all_targets() -> None:
    assert [*two().models] == ["x", "both", "y:latest"]


def test_readings_are_of_each_target_as_it_is_now() -> None:
    targets = two()
    targets["h:2"].drain()
    targets["h:1"].load.sequences = 3
    read = {(one.name, one.engine): one.values for one in targets.readings()}
    assert [read["engine_gateway_target_ready", name] for name in targets] == [{"": True}, {"": False}]
    assert [read["engine_gateway_sequences", name] for name in targets] == [{"": 3}, {"": 0}]
