"""What belongs to one engine of a server carries its name, and is counted for it alone."""

from __future__ import annotations

import time
from dataclasses import replace

from engine.contracts.events import (
    DroppedEvent,
    Event,
    FirstTokenEvent,
    OwnRequestEvent,
    PrefixCacheEvent,
    ProxiedEvent,
    RejectedEvent,
    StepEvent,
    StoredAnswersEvent,
)
from engine.counters import declared
from engine.loop.messages import StepOutputs
from engine.service.engines import EngineHandle, count_for
from engine.testing.exporter import one_of_each, step_event

from .fakes import ScriptedClient, in_loop, make_plan, make_tokenizer

OF_THE_SERVER = (ProxiedEvent, OwnRequestEvent, StoredAnswersEvent, DroppedEvent)


def handle(name: str) -> EngineHandle:
    return EngineHandle(name, make_plan(), ScriptedClient(), make_tokenizer())


@in_loop
async def test_events_that_an_engine_sends_are_published_with_its_name() -> None:
    for name in ("default", "second"):
        engine, published = handle(name), list[Event]()
        engine.publish_to(published.extend)
        client = engine.client
        assert isinstance(client, ScriptedClient)
        client.deliver(StepOutputs((), (step_event(step=7), PrefixCacheEvent(1.0, 10, 8)), client.stats))
        assert [type(event) for event in published] == [StepEvent, PrefixCacheEvent]
        assert {getattr(event, "engine", "") for event in published} == {name}


@in_loop
async def test_an_event_is_counted_for_its_engine_and_those_of_the_server_once() -> None:
    engines = {name: handle(name) for name in ("first", "second")}
    count_for(engines, [
        FirstTokenEvent(0.0, "r1", 5.0, "elsewhere"),
        FirstTokenEvent(time.monotonic(), "r2", 5.0, "second"),
        RejectedEvent(0.0, 429, "full", "first"),
        DroppedEvent(0.0, 3),
    ])  # fmt: skip
    counted = {}
    for name, engine in engines.items():
        readings = {reading.name: reading for reading in engine.counters.readings()}
        assert {reading.engine for reading in readings.values()} == {name}
        rejected = readings[declared.REJECTED.name].values["429"]
        dropped = readings[declared.DROPPED_EVENTS.name].values[""]
        counted[name] = (sum(readings[declared.TTFT.name].counts), rejected, dropped)
    assert counted == {"first": (0, 1, 3), "second": (1, 0, 0)}
    assert engines["second"].latency.summary()["ttft_ms"]["count"] == 1


@in_loop
async def test_an_engines_fingerprint_is_that_of_what_was_asked_for() -> None:
    """How much memory was free at start differs from one start to the next."""
    asked = make_plan()
    plans = (asked, replace(asked, memory_bytes=2**30), replace(asked, notes=("another",)))
    found = [EngineHandle("a", each, ScriptedClient(), make_tokenizer()).fingerprint for each in plans]
    assert found[0] == found[1] != found[2]


def test_every_event_but_those_of_the_server_names_its_engine() -> None:
    assert {type(event) for event in one_of_each() if not hasattr(event, "engine")} == set(OF_THE_SERVER)
