"""A gateway's counters."""

from __future__ import annotations

import msgspec
import pytest

from engine.contracts.counters import Metric, Reading
from engine.contracts.events import OwnRequestEvent, ProxiedEvent, RejectedEvent
from engine.counters.gateway import (
    AGREEMENT,
    ANSWERED,
    COST,
    ERROR,
    FIRST_BYTE,
    LOOKS,
    OF_TARGETS,
    READY,
    REJECTED,
    REQUESTS,
    RETRIES,
    SEQUENCES,
    SHADOWS,
    GatewayCounters,
)
from engine.testing.exporter import step_event

NOW = {"a": (True, 2), "b": (False, 0)}


def proxied(server: str, status: int = 200, first_ms: float = 0.0, attempts: int = 1) -> ProxiedEvent:
    return ProxiedEvent(0.0, "name", "chat", server, status, 5.0, first_ms=first_ms, attempts=attempts)


def read(counters: GatewayCounters, metric: Metric, engine: str) -> Reading:
    (found,) = [one for one in counters.readings(NOW) if (one.name, one.engine) == (metric.name, engine)]
    return found


def test_requests_are_counted_for_the_target_that_was_the_last_by_status() -> None:
    counters = GatewayCounters(["a", "b"])
    counters.add([proxied("a"), proxied("a"), proxied("a", 499), proxied("b", 502, attempts=2), proxied("b", 418)])
    assert {key: value for key, value in read(counters, REQUESTS, "a").values.items() if value} == {"200": 2, "499": 1}
    assert {key: value for key, value in read(counters, REQUESTS, "b").values.items() if value} == {
        "502": 1,
        "other": 1,
    }
    assert [read(counters, RETRIES, name).values[""] for name in "ab"] == [0, 1]


def test_what_reached_no_target_and_what_is_no_request_is_not_counted() -> None:
    counters = GatewayCounters(["a", "b"])
    counters.add([proxied(""), proxied("c"), step_event()])
    assert not any(read(counters, REQUESTS, name).values[label] for name in "ab" for label in ("200", "other"))


def test_the_first_byte_is_observed_in_seconds_where_there_was_one() -> None:
    counters = GatewayCounters(["a", "b"])
    counters.add([proxied("a", first_ms=250.0), proxied("a", 502)])
    found = read(counters, FIRST_BYTE, "a")
    assert (sum(found.counts), found.sum) == (1, 0.25)


def test_expectations_are_compared_with_what_came_where_the_first_target_answered() -> None:
    counters = GatewayCounters(["a", "b"])
    expected = [msgspec.structs.replace(proxied("a", first_ms=250.0, attempts=n), expected_ms=200.0) for n in (1, 2)]
    counters.add([*expected, proxied("a", first_ms=250.0)])
    found = read(counters, ERROR, "a")
    assert (sum(found.counts), found.sum) == (1, pytest.approx(0.05))


def test_cost_adds_up() -> None:
    counters = GatewayCounters(["a", "b"])
    counters.add([msgspec.structs.replace(proxied("a"), cost=cost) for cost in (0.25, 0.5)])
    assert read(counters, COST, "a").values[""] == 0.75 and read(counters, COST, "b").values[""] == 0


def test_gauges_are_what_is_now() -> None:
    counters = GatewayCounters(["a", "b"])
    assert [read(counters, READY, name).values[""] for name in "ab"] == [True, False]
    assert [read(counters, SEQUENCES, name).values[""] for name in "ab"] == [2, 0]


def test_every_metric_is_read_once_for_each_target() -> None:
    found = [(one.engine, one.name) for one in GatewayCounters(["a", "b"]).readings(NOW)]
    assert found == [*((name, metric.name) for name in "ab" for metric in OF_TARGETS), ("default", REJECTED.name)]


def test_answers_to_a_name_of_several_models_are_counted_by_the_model_that_answered() -> None:
    counters = GatewayCounters(["a", "b"], {"auto": ["small", "large"]})
    asked = msgspec.structs.replace(proxied("a"), name="auto", model="large")
    counters.add([asked, asked, msgspec.structs.replace(asked, status=502), proxied("a")])
    counters.add([msgspec.structs.replace(asked, name="large")])
    assert read(counters, ANSWERED, "a").values == {"auto -> small": 0, "auto -> large": 2}
    assert not any(read(counters, ANSWERED, "b").values.values())


def test_what_the_gateway_itself_refuses_is_counted_by_status() -> None:
    counters = GatewayCounters(["a"])
    counters.add([RejectedEvent(0.0, status, "why") for status in (429, 429, 503, 418)])
    (found,) = [one for one in counters.readings(NOW) if one.name == REJECTED.name]
    assert {key: value for key, value in found.values.items() if value} == {"429": 2, "503": 1, "other": 1}
    assert counters.shed == 2


def test_own_requests_are_counted_by_name_and_their_cost_by_target() -> None:
    counters = GatewayCounters(["a", "b"], {"auto": ["small", "large"], "other": ["small"]})
    counters.add([
        OwnRequestEvent(0.0, "r", "look", "unsure", "auto", "small", "a", 0.5),
        OwnRequestEvent(0.0, "r", "shadow", "agrees", "auto", "small", "b"),
        OwnRequestEvent(0.0, "r", "shadow", "dropped", "auto", "medium"),
        OwnRequestEvent(0.0, "r", "shadow", "agrees", "gone", "small"),
    ])  # fmt: skip
    assert [read(counters, COST, name).values[""] for name in "ab"] == [0.5, 0.0]
    assert read(counters, LOOKS, "auto").values == {"confident": 0, "unsure": 1, "no_logprobs": 0, "failed": 0}
    assert read(counters, SHADOWS, "auto").values == {"agrees": 1, "differs": 0, "failed": 0, "dropped": 1}
    assert read(counters, AGREEMENT, "auto").values["share"] == 1.0
    assert not [one for one in counters.readings(NOW) if one.engine == "other"]
    assert read(counters, REQUESTS, "a").values["200"] == 0
