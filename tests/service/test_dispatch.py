"""Jobs run where the router sends them, on any of several engines, whatever transport they came by."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.contracts.events import FirstTokenEvent, RequestEvent, StoredAnswersEvent, TokensEvent
from engine.contracts.router import Answer, AnswerTally, Attempts, Reject, ToEngine, ToUrl
from engine.service.bus import EventBus
from engine.service.dispatch import Dispatcher
from engine.service.engines import EngineHandle
from engine.service.errors import ApiError, Rejected
from engine.service.job import Job, Prompts
from engine.service.placing import Placing, route_problem
from engine.service.prepare import make_job
from engine.service.protocol import CompletionOptions
from engine.service.timings import Arrival

from .fakes import END, DirectRouter, MemoryExporter, ScriptedClient, ids, in_loop, make_plan, make_tokenizer, says


class Fleet:
    """Engines that say their names."""

    def __init__(self, names: str = "ab") -> None:
        self.router = DirectRouter()
        self.clients = {name: ScriptedClient(says(f"I am {name}")) for name in names}
        self.engines = {
            name: EngineHandle(name, make_plan(), client, make_tokenizer()) for name, client in self.clients.items()
        }
        self.bus = EventBus([exporter := MemoryExporter()])
        self.events = exporter.events
        self.dispatcher = Dispatcher(Placing(self.router), self.engines, self.bus)

    async def start(self) -> None:
        for engine in self.engines.values():
            await engine.supervisor.start()

    def job(self, **options: Any) -> Job:
        prompts, arrival = Prompts((ids("hi"),)), Arrival(0.0, 0.0, 0.0)
        return make_job(self.engines["a"], CompletionOptions(**options), prompts, "someone", arrival)


async def texts(fleet: Fleet, job: Job) -> list[str]:
    route = fleet.dispatcher.place(job.api)
    assert not isinstance(route, ToUrl)
    found = [""] * job.num_sequences
    async with fleet.dispatcher.generate(job, route) as generation:
        async for delta in generation:
            found[delta.index] += delta.text
        assert generation.usage().output_tokens == sum(len(text) + 1 for text in found)
    return found


@in_loop
async def test_a_job_runs_on_the_engine_that_the_router_names() -> None:
    fleet = Fleet()
    await fleet.start()
    for name in "ba":
        fleet.router.decision = ToEngine(name)
        assert await texts(fleet, fleet.job(n=2)) == [f"I am {name}"] * 2
        assert len(fleet.clients[name].requests) == 2
    assert [len(answer.choices) for answer in fleet.router.answers] == [2, 2]


@in_loop
async def test_events_of_a_job_name_the_engine_that_it_ran_on() -> None:
    fleet = Fleet()
    await fleet.start()
    for name in "ba":
        fleet.router.decision = ToEngine(name)
        await texts(fleet, fleet.job())
    events = fleet.bus.settled(lambda: list(fleet.events))
    assert [event.engine for event in events if isinstance(event, RequestEvent)] == ["b", "a"]
    of_b = {type(event) for event in events if getattr(event, "engine", "") == "b"}
    assert of_b == {FirstTokenEvent, TokensEvent, RequestEvent}


@in_loop
async def test_who_leaves_early_ends_every_sequence_and_the_router_is_not_told() -> None:
    fleet = Fleet()
    await fleet.start()
    fleet.router.decision, client = ToEngine("b"), fleet.clients["b"]
    job = fleet.job(n=2)
    with pytest.raises(asyncio.CancelledError):
        async with fleet.dispatcher.generate(job, Attempts(("b",))) as generation:
            async for _ in generation:
                raise asyncio.CancelledError
    assert {name for name, _ in client.aborted} == {job.name(0), job.name(1)} and fleet.router.answers == []


@in_loop
async def test_an_engine_that_is_not_up_takes_no_job() -> None:
    fleet = Fleet()
    with pytest.raises(ApiError) as refused:
        async with fleet.dispatcher.generate(fleet.job(), Attempts(("b",))):
            pass
    assert (refused.value.kind, refused.value.code) == ("unavailable", "not_ready")


@in_loop
async def test_a_refusal_keeps_the_status_of_the_router() -> None:
    fleet = Fleet()
    fleet.router.decision = Reject(418, "no tea")
    with pytest.raises(Rejected, match="no tea") as refused:
        fleet.dispatcher.place(fleet.job().api)
    assert (refused.value.status, refused.value.kind) == (418, "invalid")


@in_loop
async def test_a_route_to_nowhere_is_none() -> None:
    engines = Fleet().engines
    assert "expected an engine of the fleet: 'a', 'b'" in route_problem(ToEngine("c"), 1, 1, engines)
    assert "of 1 choices, expected 2" in route_problem(Answer(({},)), 1, 2, engines)
    assert route_problem(ToEngine("b"), 1, 1, engines) == route_problem(ToUrl("http://a/v1"), 1, 1, engines) == ""


BOTH = Attempts(("a", "b"), "because")


@in_loop
async def test_timings_say_which_of_several_engines_answered_and_why() -> None:
    fleet = Fleet()
    await fleet.start()
    job = fleet.job()
    async with fleet.dispatcher.generate(job, BOTH) as generation:
        async for _ in generation:
            pass
        assert generation.account().public()["route"] == {"engine": "a", "attempt": 1, "reason": "because"}


@in_loop
async def test_attempts_name_engines_of_the_fleet_and_count_each_prompt() -> None:
    engines = Fleet().engines
    assert route_problem(BOTH, 1, 1, engines) == ""
    assert "at least one engine, each of the fleet" in route_problem(Attempts(()), 1, 1, engines)
    assert "at least one engine, each of the fleet" in route_problem(Attempts(("a", "c")), 1, 1, engines)
    assert "for each of 2 prompts" in route_problem(Attempts(("a",), cached_tokens=(1,)), 2, 2, engines)
    assert "from 0" in route_problem(Attempts(("a",), cached_tokens=(-1,)), 1, 1, engines)


@in_loop
async def test_timings_say_that_an_answer_was_stored() -> None:
    fleet = Fleet()
    await fleet.start()
    stored = Answer(({"tokens": (*ids("Hi"), END), "finish_reason": "stop", "stop_token": END},), "as before")
    job = fleet.job()
    async with fleet.dispatcher.generate(job, stored) as generation:
        assert "".join([delta.text async for delta in generation]) == "Hi"
        assert generation.account().public()["route"] == {"reason": "as before"}
    assert not any(client.requests for client in fleet.clients.values())


class Tallies(DirectRouter):
    """Stores answers, or says so."""

    said: Any = AnswerTally(hits=1, misses=2)

    def tally(self) -> Any:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


@in_loop
async def test_what_came_of_stored_answers_is_published_after_each_job() -> None:
    fleet = Fleet()
    router = Tallies()
    fleet.dispatcher = Dispatcher(Placing(router), fleet.engines, fleet.bus)
    await fleet.start()
    router.decision = ToEngine("b")
    for said in (router.said, None, ValueError("lost count"), AnswerTally(hits=5)):
        router.said = said
        assert await texts(fleet, fleet.job()) == ["I am b"]
    events = fleet.bus.settled(lambda: list(fleet.events))
    assert [event.tally.hits for event in events if isinstance(event, StoredAnswersEvent)] == [1, 5]
