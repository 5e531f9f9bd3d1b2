"""Figures of engines: what says that there are too many or too few."""

from __future__ import annotations

import time

from msgspec.structs import replace

from engine.contracts.config import SloClass, SloSettings
from engine.contracts.events import FirstTokenEvent, RejectedEvent
from engine.contracts.router import ToEngine
from engine.contracts.step_cost import StepCost
from engine.counters import fleet as gauges
from engine.loop.messages import EngineStats, GroupBlocks, StoreState
from engine.loop.step_errors import StepCostReport
from engine.service.engines import EngineHandle
from engine.service.first_byte import FEWEST
from engine.service.fleet import may_go
from engine.service.load import Share
from engine.service.scaling import class_figures, condition, engine_figures, engine_readings, fleet_figures

from .fakes import ScriptedClient, in_loop, make_plan, make_tokenizer
from .test_dispatch import Fleet, texts

COST = StepCost(0.0, 1.0, 64)
"""A millisecond a token."""


def reported(cached: int = 0, leased: int = 0) -> EngineStats:
    blocks = GroupBlocks("full", 10, 10 - cached - leased, cached, leased)
    return EngineStats(1.0, 9, blocks=(blocks,), step_cost=StepCostReport(COST))


@in_loop
async def test_each_state_of_an_engine_has_one_name() -> None:
    engines = Fleet("abcd").engines
    a, b, c, d = engines.values()
    assert condition(a) == "starting"
    for engine in (a, b, c):
        await engine.supervisor.start()
    b.draining = True
    await c.supervisor.stop()
    d.supervisor.state = "failed"
    assert [condition(engine) for engine in engines.values()] == ["ready", "draining", "stopped", "down"]
    assert [engine.pid for engine in engines.values()] == [1, 1, None, None]


@in_loop
async def test_each_store_is_a_series_of_its_figures() -> None:
    fleet = Fleet("a")
    host = StoreState("host", 3, 100, 400, 1, 0, loaded_tokens=64, saved_s=-0.5, skipped={"late": 2, "busy": 0})
    fleet.clients["a"].stats = EngineStats(stores=(host, replace(host, name="disk", records=5)))
    found = {reading.name: reading.values for reading in engine_readings(fleet.engines["a"])}
    assert found[gauges.STORE_RECORDS.name] == {"host": 3.0, "disk": 5.0}
    assert found[gauges.STORE_SAVED_SECONDS.name] == {"host": -0.5, "disk": -0.5}
    assert found[gauges.STORE_SKIPPED.name] == {"late": 4.0, "busy": 0.0}


@in_loop
async def test_a_backlog_is_of_queued_tokens_alone_and_the_mean_of_engines_that_take_requests() -> None:
    fleet = Fleet("abc")
    a, b, c = fleet.engines.values()
    for engine in (a, b):
        await engine.supervisor.start()
    c.supervisor.state = "stopped"
    fleet.clients["a"].stats, fleet.clients["b"].stats = reported(), reported(leased=9)
    first, second = Share(a.load, 1000, 600), Share(a.load, 100, 0)
    second.took(1)
    assert engine_figures(a).backlog_s == 0.4 and engine_figures(a).tokens_per_s == 1000
    assert (engine_figures(a).saturation, engine_figures(b).saturation) == (2 / 32, 0.9)
    found = fleet_figures(fleet.engines.values(), 7.0, held=0)
    assert (found.at_s, found.up, found.sequences, found.backlog_s) == (7.0, 2, 2, 0.2)
    assert found.saturation == (2 / 32 + 0.9) / 2
    for share in (first, second):
        share.end()
    assert engine_figures(a).backlog_s == 0.0


@in_loop
async def test_an_engine_that_has_measured_nothing_has_no_backlog_that_is_known() -> None:
    fleet = Fleet("a")
    await fleet.start()
    Share(fleet.engines["a"].load, 100, 0)
    assert fleet_figures(fleet.engines.values(), 0.0, held=0).backlog_s is None
    told = {one.name: one.values for one in engine_readings(fleet.engines["a"], 1)}
    assert told[gauges.BACKLOG.name] == {} and told[gauges.DESIRED.name] == {"": 1}
    assert told[gauges.STATE.name] == {**dict.fromkeys(gauges.STATES, 0.0), "ready": 1.0}


@in_loop
async def test_engines_with_least_in_flight_and_the_coldest_cache_go_first() -> None:
    fleet = Fleet("abcde")
    await fleet.start()
    for name, cached, sequences in (("a", 1, 2), ("b", 5, 1), ("c", 3, 1), ("d", 3, 1)):
        fleet.clients[name].stats = reported(cached)
        fleet.engines[name].load.sequences = sequences
    fleet.engines["e"].supervisor.state = "stopped"
    assert [engine.id for engine in may_go(fleet.engines.values())] == ["d", "c", "b", "a"]
    fleet.clients["a"].die()
    assert may_go(fleet.engines.values())[0].id == "a", "it serves nobody"


@in_loop
async def test_percentiles_of_a_class_are_of_all_engines_together() -> None:
    engines = [*Fleet().engines.values()]
    for engine, ttft_ms in zip(engines, (100.0, 300.0), strict=True):
        now = time.monotonic()
        engine.count([FirstTokenEvent(now, "r", ttft_ms, expected_ms=ttft_ms / 2) for _ in range(10)])
    engines[0].count([RejectedEvent(0.0, status, "full") for status in (429, 503)])
    (found,) = class_figures(engines).values()
    assert (found.observed_ttft_p95_s, found.expected_ttft_p95_s, found.shed) == (0.3, 0.15, 1)
    (alone,) = class_figures(engines[:1]).values()
    assert alone.observed_ttft_p95_s is None, "of ten there is no P95"


@in_loop
async def test_a_first_token_says_when_it_was_expected() -> None:
    fleet = Fleet("a")
    await fleet.start()
    fleet.router.decision = ToEngine("a")
    await texts(fleet, fleet.job())
    for _ in range(FEWEST):
        await texts(fleet, fleet.job())
    events = fleet.bus.settled(lambda: [each for each in fleet.events if isinstance(each, FirstTokenEvent)])
    assert [event.expected_ms > 0.0 for event in events] == [False] * FEWEST + [True]


@in_loop
async def test_a_class_may_be_called_default() -> None:
    """What was refused for other reasons is not its own."""
    plan = make_plan(slo=SloSettings({"default": SloClass(500.0)}))
    engine = EngineHandle("a", plan, ScriptedClient(), make_tokenizer())
    engine.count([RejectedEvent(0.0, 429, "late", slo_class="default"), RejectedEvent(0.0, 429, "full")])
    assert class_figures([engine])["default"].shed == 1
