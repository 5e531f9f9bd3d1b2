"""A sequence goes on to the next engine until one has begun with it, and is counted where it is."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from engine.contracts.config import SloClass
from engine.contracts.events import RequestEvent
from engine.contracts.request import EngineRequest, TokensOut
from engine.contracts.router import Attempts
from engine.loop.messages import EngineStats, StepOutputs
from engine.service import sending
from engine.service.engines import EngineHandle
from engine.service.errors import ApiError
from engine.service.load import Load
from engine.service.promises import Promise

from .fakes import ScriptedClient, ids, in_loop, make_plan, make_tokenizer, says
from .test_dispatch import BOTH, Fleet, texts


def replace_in(request: EngineRequest, prompt_logprobs: int | None, **changed: Any) -> EngineRequest:
    sampling = structs.replace(request.sampling, prompt_logprobs=prompt_logprobs)
    return structs.replace(request, sampling=sampling, **changed)


def nothing_is_left(fleet: Fleet) -> bool:
    engines = fleet.engines.values()
    return all(engine.load == Load() and not engine.sendings and not engine.forecast._waiting for engine in engines)


@in_loop
async def test_a_sequence_without_a_token_moves_on_from_an_engine_that_dies() -> None:
    fleet = Fleet()
    await fleet.start()
    fleet.router.decision, client = BOTH, fleet.clients["a"]
    client.hold_before = 0
    running = asyncio.create_task(texts(fleet, fleet.job(n=2)))
    await client.holding.wait()
    assert fleet.engines["a"].load == Load(sequences=2, queued_tokens=4)
    client.die()
    assert await running == ["I am b"] * 2
    assert nothing_is_left(fleet) and fleet.router.told == ["a", "b"]


@in_loop
async def test_a_sequence_without_a_token_waits_for_an_engine_that_starts_again() -> None:
    fleet = Fleet()
    await fleet.start()
    fleet.router.decision = BOTH
    a, b = (fleet.clients[name] for name in "ab")
    b.die()
    a.hold_before = 0
    running = asyncio.create_task(texts(fleet, fleet.job()))
    await a.holding.wait()
    a.die()
    await asyncio.sleep(0.1)
    assert not running.done()
    await b.start()
    assert await running == ["I am b"]
    assert nothing_is_left(fleet)


@in_loop
async def test_a_sequence_does_not_wait_for_an_engine_that_was_given_up() -> None:
    fleet = Fleet()
    await fleet.start()
    fleet.router.decision = BOTH
    fleet.clients["b"].die()
    fleet.engines["b"].supervisor.state = "failed"
    fleet.clients["a"].hold_before = 0
    running = asyncio.create_task(texts(fleet, fleet.job()))
    await fleet.clients["a"].holding.wait()
    fleet.clients["a"].die()
    with pytest.raises(ApiError):
        await running
    assert nothing_is_left(fleet)


@in_loop
async def test_a_sequence_with_two_engines_that_died_fails_and_ends_no_third() -> None:
    fleet = Fleet("abc")
    await fleet.start()
    fleet.router.decision = Attempts(("a", "b", "c"))
    for name in "ab":
        fleet.clients[name].hold_before = 0
    running = asyncio.create_task(texts(fleet, fleet.job()))
    for name in "ab":
        await fleet.clients[name].holding.wait()
        fleet.clients[name].die()
    with pytest.raises(ApiError) as failed:
        await running
    assert failed.value.code == "engine_dead" and fleet.clients["c"].requests == []
    assert nothing_is_left(fleet)


@in_loop
async def test_a_sequence_that_waits_follows_a_rolling_restart_there_and_back() -> None:
    fleet = Fleet()
    await fleet.start()
    fleet.router.decision = BOTH
    a, b = (fleet.engines[name] for name in "ab")
    for client in fleet.clients.values():
        client.hold_before = 0
    running = asyncio.create_task(texts(fleet, fleet.job()))
    await fleet.clients["a"].holding.wait()
    a.drain()
    await fleet.clients["b"].holding.wait()
    a.draining, fleet.clients["a"].hold_before = False, None
    b.drain()
    assert await running == ["I am a"]
    assert fleet.router.told == ["a", "b"] and nothing_is_left(fleet)


@in_loop
async def test_a_sequence_that_has_begun_goes_on_at_another_engine_when_its_own_dies() -> None:
    fleet = Fleet()
    await fleet.start()
    fleet.router.decision, client = BOTH, fleet.clients["a"]
    client.hold_before = 2
    running = asyncio.create_task(texts(fleet, fleet.job()))
    await client.holding.wait()
    assert fleet.engines["a"].load == Load(sequences=1, running_tokens=4)
    client.die()
    assert await running == ["I am b"]
    (sent,) = fleet.clients["b"].requests
    assert sent.output == tuple(ids("I ")) and nothing_is_left(fleet)
    (event,) = [each for each in fleet.bus.settled(lambda: list(fleet.events)) if isinstance(each, RequestEvent)]
    assert (event.engine, event.attempts, event.output_tokens) == ("b", 1, 7)


@in_loop
async def test_an_answer_that_has_met_its_stop_string_is_whole_though_its_engine_dies() -> None:
    fleet = Fleet()
    await fleet.start()
    fleet.router.decision, client = BOTH, fleet.clients["a"]
    client.slow_to_abort = asyncio.Event()
    job = fleet.job(stop=["m"])

    async def dies() -> None:
        await client.abort_seen.wait()
        client.die()

    death = asyncio.create_task(dies())
    async with fleet.dispatcher.generate(job, BOTH) as generation:
        deltas = [delta async for delta in generation]
        await death
        assert ("".join(delta.text for delta in deltas), deltas[-1].finish_reason) == ("I a", "stop")
        assert generation.usage().output_tokens == 4
    assert client.aborted == [(client.requests[0].request_id, "stop")]
    assert fleet.clients["b"].requests == [] and nothing_is_left(fleet)


@in_loop
async def test_a_sequence_that_has_begun_ends_with_its_engine_where_no_other_one_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "WAIT_S", 0.1)
    fleet = Fleet()
    await fleet.start()
    fleet.router.decision, client, other = BOTH, fleet.clients["a"], fleet.clients["b"]
    assert other.info is not None
    other.info = structs.replace(other.info, identity="new")
    client.hold_before = 2
    running = asyncio.create_task(texts(fleet, fleet.job()))
    await client.holding.wait()
    client.die()
    with pytest.raises(ApiError) as failed:
        await running
    assert failed.value.code == "engine_dead" and other.requests == [] and nothing_is_left(fleet)


@in_loop
async def test_what_a_drained_engine_has_goes_on_at_another_one() -> None:
    fleet = Fleet()
    await fleet.start()
    fleet.router.decision, client, other = BOTH, fleet.clients["a"], fleet.clients["b"]
    client.hold_before, other.script = 0, says("He is b")
    waiting = asyncio.create_task(texts(fleet, fleet.job()))
    await client.holding.wait()
    client.hold_before, client.holding, other.hold_before = 3, asyncio.Event(), 5
    begun = asyncio.create_task(texts(fleet, fleet.job(max_tokens=9, logprobs=1, echo=True)))
    await client.holding.wait()
    fleet.engines["a"].drain()
    while len(other.requests) < 2:
        await asyncio.sleep(0)
    assert (fleet.engines["a"].load, fleet.engines["b"].load.sequences) == (Load(), 2)
    (sent,) = [request for request in other.requests if request.output]
    assert sent == replace_in(client.requests[1], output=tuple(ids("I a")), prompt_logprobs=None, prefilled=True)
    other.proceeding.set()
    assert await waiting == ["He is b"] and await begun == ["I ais b"]
    assert nothing_is_left(fleet)
    accounts = [event for event in fleet.bus.settled(lambda: list(fleet.events)) if isinstance(event, RequestEvent)]
    figures = sorted((each.engine, each.output_tokens, each.cached_tokens, each.attempts) for each in accounts)
    assert figures == [("b", 8, 4, 1), ("b", 8, 4, 2)]


@in_loop
async def test_an_engine_with_other_software_or_less_room_goes_on_with_nothing() -> None:
    fleet = Fleet()
    await fleet.start()
    fleet.router.decision, client, other = BOTH, fleet.clients["a"], fleet.clients["b"]
    client.hold_before = 1
    begun = asyncio.create_task(texts(fleet, fleet.job()))
    await client.holding.wait()
    assert other.info is not None
    for changed, why in (
        ({"identity": "new"}, "the others have other weights, settings or software"),
        ({"max_len": 8}, "the others have no room for so many tokens"),
    ):
        kept, other.info = other.info, structs.replace(other.info, **changed)
        fleet.engines["a"].drain()
        assert not client.aborted and fleet.engines["a"].staying == {why: 1}
        other.info = kept
    client.proceeding.set()
    assert await begun == ["I am a"] and nothing_is_left(fleet)


@in_loop
async def test_the_next_engine_goes_on_after_tokens_that_come_while_a_sequence_leaves() -> None:
    fleet = Fleet()
    await fleet.start()
    fleet.router.decision, client = BOTH, fleet.clients["a"]
    client.hold_before, client.slow_to_abort = 0, asyncio.Event()
    running = asyncio.create_task(texts(fleet, fleet.job()))
    await client.holding.wait()
    fleet.engines["a"].drain()
    (request,) = client.requests
    client.deliver(StepOutputs((TokensOut(request.request_id, tuple(ids("no"))),), (), EngineStats()))
    client.slow_to_abort.set()
    assert await running == ["noam b"]
    assert nothing_is_left(fleet)


@in_loop
async def test_without_another_engine_a_drained_one_ends_what_waits_there() -> None:
    fleet = Fleet()
    await fleet.start()
    fleet.router.decision, client = Attempts(("a",)), fleet.clients["a"]
    client.hold_before = 0
    running = asyncio.create_task(texts(fleet, fleet.job()))
    await client.holding.wait()
    fleet.engines["a"].drain()
    client.proceeding.set()
    assert await running == ["I am a"]


@in_loop
async def test_what_lets_go_in_vain_stays_where_it_was() -> None:
    fleet = Fleet()
    await fleet.start()
    fleet.router.decision, client = BOTH, fleet.clients["a"]
    client.hold_before, client.slow_to_abort = 0, asyncio.Event()
    running = asyncio.create_task(texts(fleet, fleet.job()))
    await client.holding.wait()
    fleet.engines["a"].drain()
    fleet.clients["b"].die()
    client.hold_before = None
    client.slow_to_abort.set()
    assert await running == ["I am a"]
    assert len(client.requests) == 2 and nothing_is_left(fleet)


@in_loop
async def test_what_is_let_go_while_all_engines_die_waits_for_one_that_starts_again() -> None:
    fleet = Fleet()
    await fleet.start()
    fleet.router.decision, (a, b) = BOTH, fleet.clients.values()
    a.hold_before, a.slow_to_abort = 2, asyncio.Event()
    running = asyncio.create_task(texts(fleet, fleet.job()))
    await a.holding.wait()
    fleet.engines["a"].drain()
    a.deliver(StepOutputs((TokensOut(a.requests[0].request_id, finish_reason="abort"),), (), EngineStats()))
    a.die()
    b.die()
    await asyncio.sleep(0.1)
    assert not running.done()
    await b.start()
    assert await running == ["I am b"]
    assert nothing_is_left(fleet)


@in_loop
async def test_what_ends_before_the_next_engine_has_it_has_the_times_of_the_first() -> None:
    fleet = Fleet()
    await fleet.start()
    fleet.router.decision, (a, b) = BOTH, fleet.clients.values()
    a.hold_before, b.hold_before, b.slow_to_abort = 2, 3, asyncio.Event()
    running = asyncio.create_task(texts(fleet, fleet.job()))
    await a.holding.wait()
    fleet.engines["a"].drain()
    await b.holding.wait()
    running.cancel()
    await b.abort_seen.wait()
    b.deliver(StepOutputs((TokensOut(b.requests[0].request_id, finish_reason="abort"),), (), EngineStats()))
    with suppress(asyncio.CancelledError):
        await running
    (event,) = [each for each in fleet.bus.settled(lambda: list(fleet.events)) if isinstance(each, RequestEvent)]
    assert (event.finish_reason, event.queue_ms, event.decode_ms) == ("abort", 0.25, 0.125)
    assert nothing_is_left(fleet)


@in_loop
async def test_an_engine_that_was_down_when_a_sequence_was_placed_takes_it_over() -> None:
    fleet = Fleet()
    await fleet.start()
    fleet.router.decision, client = Attempts(("a",)), fleet.clients["a"]
    client.hold_before = 0
    fleet.engines["b"].draining = True
    running = asyncio.create_task(texts(fleet, fleet.job()))
    await client.holding.wait()
    fleet.router.decision = Attempts(("b", "a"))
    fleet.engines["a"].drain()
    assert not client.aborted, "there is no other"
    fleet.engines["b"].draining = False
    fleet.engines["a"].drain()
    assert await running == ["I am b"]
    assert nothing_is_left(fleet) and fleet.router.told == ["a", "b"]


@in_loop
async def test_what_ends_two_engines_is_sent_to_no_third() -> None:
    fleet = Fleet()
    fleet.clients["c"] = ScriptedClient(says("I am c"))
    fleet.engines["c"] = EngineHandle("c", make_plan(), fleet.clients["c"], make_tokenizer())
    await fleet.start()
    fleet.router.decision = Attempts(("a", "b", "c"))
    for client in fleet.clients.values():
        client.hold_before = 0
    running = asyncio.create_task(texts(fleet, fleet.job()))
    for name in "ab":
        client = fleet.clients[name]
        await client.holding.wait()
        client.die()
        await client.start()
    with pytest.raises(ApiError) as failed:
        await running
    assert failed.value.code == "engine_dead"
    assert [len(client.requests) for client in fleet.clients.values()] == [1, 1, 0] and nothing_is_left(fleet)


@in_loop
async def test_counts_return_to_zero_after_any_mix_of_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "WAIT_S", 0.1)  # where one engine is dead, the other may drain
    fleet = Fleet()
    await fleet.start()
    rng = random.Random(0)

    async def one() -> None:
        fleet.router.decision = Attempts(tuple(rng.sample("ab", 2)), cached_tokens=(rng.randrange(4),))
        job = fleet.job(n=rng.randint(1, 3))
        with suppress(ApiError, asyncio.CancelledError):
            route = fleet.dispatcher.place(job.api)
            assert isinstance(route, Attempts)
            async with fleet.dispatcher.generate(job, route) as generation:
                async for _ in generation:
                    if rng.random() < 0.1:
                        raise asyncio.CancelledError
                    await asyncio.sleep(0)

    for turn in range(30):
        crowd = [asyncio.create_task(one()) for _ in range(rng.randint(1, 8))]
        await asyncio.sleep(0)
        victim = fleet.clients[rng.choice("ab")]
        if turn % 3 == 0:
            victim.die()
            await victim.start()
        elif turn % 3 == 1:
            for task in rng.sample(crowd, len(crowd) // 2):
                task.cancel()
        for name in rng.choices("ab", k=3):
            await asyncio.sleep(0)
            for engine in fleet.engines.values():
                engine.draining = False
            fleet.engines[name].drain()
        await asyncio.gather(*crowd, return_exceptions=True)
        assert nothing_is_left(fleet), [engine.load for engine in fleet.engines.values()]


@in_loop
async def test_a_sequence_that_is_aborted_while_it_waits_for_an_engine_is_sent_to_none() -> None:
    fleet = Fleet()
    await fleet.start()
    a, b = (fleet.clients[name] for name in "ab")
    b.die()
    a.hold_before = 0
    job = replace(fleet.job(), promise=Promise("chat", SloClass(200.0, cancel_late=True)))
    job = replace(job, arrival=replace(job.arrival, received_s=time.monotonic()))
    fleet.router.decision = BOTH
    running = asyncio.create_task(texts(fleet, job))
    await a.holding.wait()
    a.die()
    with pytest.raises(ApiError) as failed:
        await running
    assert failed.value.code == "late" and nothing_is_left(fleet)
    await b.start()
    await asyncio.sleep(0.1)
    assert b.requests == []
