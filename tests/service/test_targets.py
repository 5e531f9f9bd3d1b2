"""Servers elsewhere: whether they are given requests, and which have a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from engine.contracts.config import GatewaySettings, ProviderSettings
from engine.service.targets import (
    LONGEST_PAUSE_S,
    LONGEST_REST_S,
    MOST_FAILURES,
    PAUSE_S,
    Breaker,
    Target,
    Targets,
    taking,
)


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


def test_a_key_is_not_shown() -> None:
    assert "sesame" not in repr(Target.at("http://h:1", "sesame"))


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


@pytest.mark.parametrize(("said", "length"), [(8, 8), (None, None), ("8", None)])
def test_a_target_may_say_how_long_a_context_is(said: object, length: int | None) -> None:
    target = Target.at("http://h:1")
    target.is_ready({"m": {"max_model_len": said}})
    assert target.max_len("m") == length and target.max_len("another one") is None


def test_a_target_that_asked_for_a_rest_has_it_even_where_there_is_no_other() -> None:
    target = Target.at("http://h:1")
    target.is_ready({"m": {}})
    target.rest(30.0)
    assert target.why_not == "asked for 30 s without requests" and taking([target]) == []
    target.rest(1.0)
    assert 29.0 < target.rests_s <= 30.0, "a shorter rest does not end a longer one"
    target.rest(3600.0)
    assert target.rests_s <= LONGEST_REST_S


def test_a_provider_is_ready_has_names_of_its_own_and_the_endpoints_of_its_base_url() -> None:
    provider = Target.of("p", ProviderSettings("https://h/api/v1/", {"here": "there"}), "key")
    assert provider.takes_requests and [*provider.models] == ["here"] and provider.name_of("here") == "there"
    assert provider.at_path("/v1/chat/completions") == "https://h/api/v1/chat/completions"
    assert [provider.answers(kind) for kind in ("chat", "completion", "responses", "messages", "ollama")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    own = Target.at("http://h:1/v1")
    assert own.at_path("/v1/messages") == "http://h:1/v1/messages" and own.answers("ollama")


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


def of(*urls: str, environ: Mapping[str, str] | None = None, **settings: Any) -> Targets:
    return Targets(GatewaySettings([*urls], **settings), environ or {})


def two(**settings: Any) -> Targets:
    targets = of("http://h:1", "http://h:2/v1", **settings)
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
    targets = two()
    found, models = targets.serving(asked)
    assert (found, [target.id for target in targets.having(name)]) == (name, ids)
    assert models == [name] * bool(ids)


def test_a_name_stands_for_models_in_order_and_may_be_a_models_own() -> None:
    targets = two(models={"auto": ["x", "gone", "both"], "x": ["x", "both"]})
    assert targets.serving("auto") == ("auto", ["x", "both"])
    assert targets.serving("x") == ("x", ["x", "both"]) and targets.serving("both") == ("both", ["both"])
    assert [*targets.models] == ["x", "both", "y:latest", "auto"]


def test_each_target_has_the_key_that_the_environment_has_for_it() -> None:
    provider = ProviderSettings("https://p/v1", {"m": "n"}, key_env="THEIRS")
    environ = {"OURS": "1", "THEIRS": "2"}
    targets = of("http://h:1", key_env="OURS", providers={"p": provider}, environ=environ)
    assert {name: target.key for name, target in targets.items()} == {"h:1": "1", "p": "2"}


def test_while_nothing_is_known_nobody_has_a_model() -> None:
    targets = of("http://h:1")
    assert targets.serving(None) == ("", []) and targets.serving("x") == ("x", [])


def test_models_are_those_of_all_targets() -> None:
    assert [*two().models] == ["x", "both", "y:latest"]


def test_a_model_is_listed_as_its_own_target_says_it_and_not_as_a_provider() -> None:
    targets = two(providers={"p": ProviderSettings("https://p/v1", {"x": "n", "z": "n"})})
    assert targets.models["x"] == {"of": 1} and targets.models["z"]["owned_by"] == "p"


def test_readings_are_of_each_target_as_it_is_now() -> None:
    targets = two()
    targets["h:2"].drain()
    targets["h:1"].load.sequences = 3
    read = {(one.name, one.engine): one.values for one in targets.readings()}
    assert [read["engine_gateway_target_ready", name] for name in targets] == [{"": True}, {"": False}]
    assert [read["engine_gateway_sequences", name] for name in targets] == [{"": 3}, {"": 0}]
