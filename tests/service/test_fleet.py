"""Engines are drained, restarted, stopped and started behind a listener: nothing that has not begun is lost, what has
begun ends, and counts are zero afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from msgspec import structs

from engine.contracts.router import Attempts
from engine.service import fleet as module
from engine.service.errors import ApiError
from engine.service.fleet import Change, Fleet
from engine.service.sending import OTHER_IDENTITY

from .fakes import in_loop
from .test_dispatch import Fleet as Engines
from .test_dispatch import texts
from .test_sending import nothing_is_left

BOTH = Attempts(("a", "b"), "because")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.001)


@asynccontextmanager
async def watched(drain_s: float = 10.0) -> AsyncIterator[tuple[Engines, Fleet]]:
    engines = Engines()
    engines.router.decision = BOTH
    await engines.start()
    for engine in engines.engines.values():
        engine.supervisor._poll_s = engine.supervisor._backoff_s = 0.001
    fleet = Fleet(engines.engines, drain_s)
    watching = asyncio.create_task(fleet.watch())
    yield engines, fleet
    await fleet.close()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def until(seen: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not seen():
            await asyncio.sleep(0.001)


async def done(change: Change) -> list[tuple[str, str]]:
    """Its steps."""
    await until(lambda: change.state != "running")
    return [(step.engine, step.step) for step in change.steps]


def other_software(engines: Engines) -> None:
    """Engine b's answers are not those of a."""
    client = engines.clients["b"]
    assert client.info is not None
    client.info = structs.replace(client.info, identity="another")


def all_of(engines: Engines) -> list[module.EngineHandle]:
    return list(engines.engines.values())


ROLLING = [(name, step) for name in "ab" for step in ("draining", "restarting", "ready")]


@in_loop
async def test_engines_are_restarted_one_at_a_time_and_nothing_fails_meanwhile() -> None:
    async with watched() as (engines, fleet):
        answers, ended = list[str](), asyncio.Event()

        async def load() -> None:
            while not ended.is_set():
                answers.extend(await texts(engines, engines.job(n=2)))

        crowd = [asyncio.create_task(load()) for _ in range(8)]
        await until(lambda: answers)
        change = fleet.restart(all_of(engines))
        assert await done(change) == ROLLING and change.state == "done"
        ended.set()
        await asyncio.gather(*crowd)
        assert set(answers) <= {"I am a", "I am b"} and engines.clients["b"].requests
        assert [engine.supervisor.starts for engine in all_of(engines)] == [2, 2] and nothing_is_left(engines)
        assert all(engine.takes_requests for engine in all_of(engines))


@in_loop
async def test_what_cannot_move_on_ends_before_its_engine_does_and_the_rest_moves_on() -> None:
    async with watched() as (engines, fleet):
        client = engines.clients["a"]
        client.hold_before = 1
        other_software(engines)
        staying = asyncio.create_task(texts(engines, engines.job()))
        await client.holding.wait()
        client.hold_before, client.holding = 0, asyncio.Event()
        moving = asyncio.create_task(texts(engines, engines.job()))
        await client.holding.wait()
        change = fleet.restart([engines.engines["a"]])
        assert await moving == ["I am b"]
        (draining,) = change.steps
        assert (draining.step, draining.sequences, draining.staying) == ("draining", 2, {OTHER_IDENTITY: 1})
        client.proceeding.set()
        assert await staying == ["I am a"]
        assert await done(change) == ROLLING[:3]


@in_loop
async def test_what_takes_too_long_ends_with_an_error_that_says_why() -> None:
    async with watched(drain_s=0.01) as (engines, fleet):
        client = engines.clients["a"]
        client.hold_before = 1
        other_software(engines)
        running = asyncio.create_task(texts(engines, engines.job()))
        await client.holding.wait()
        steps = await done(fleet.restart([engines.engines["a"]]))
        assert [step for _, step in steps] == ["draining", "aborting", "restarting", "ready"]
        with pytest.raises(ApiError, match="ended by an operator while it worked on this request; send") as failed:
            await running
        assert failed.value.code == "engine_closed" and engines.clients["b"].requests == [] and nothing_is_left(engines)


@in_loop
async def test_what_waits_at_an_engine_that_is_ended_goes_to_one_that_is_back() -> None:
    async with watched(drain_s=5.0) as (engines, fleet):
        client = engines.clients["a"]
        client.hold_before = 0
        engines.engines["b"].draining, engines.router.decision = True, Attempts(("a",))
        running = asyncio.create_task(texts(engines, engines.job()))
        await client.holding.wait()
        change = fleet.restart([engines.engines["a"]], force=True)
        engines.engines["b"].draining, engines.router.decision = False, BOTH
        assert await running == ["I am b"]
        assert [step for _, step in await done(change)] == ["draining", "restarting", "ready"]


@in_loop
async def test_one_change_at_a_time() -> None:
    async with watched() as (engines, fleet):
        a, b = all_of(engines)
        engines.clients["a"].slow_to_close = asyncio.Event()
        change = fleet.restart([a, b])
        for another in (
            lambda: fleet.restart([b]),
            lambda: fleet.drain(b),
            lambda: fleet.undrain(a),
            lambda: fleet.resize(1),
        ):
            with pytest.raises(ApiError, match="A restart is running") as refused:
                another()
            assert refused.value.kind == "conflict"
        engines.clients["a"].slow_to_close.set()
        assert await done(change) == ROLLING
        fleet.drain(b)


@in_loop
async def test_the_last_engine_that_takes_requests_is_not_taken_away_unless_forced() -> None:
    async with watched() as (engines, fleet):
        a, b = all_of(engines)
        fleet.drain(b)
        assert await texts(engines, engines.job()) == ["I am a"]
        for refused in (lambda: fleet.drain(a), lambda: fleet.restart([a]), lambda: fleet.restart([a, b])):
            with pytest.raises(ApiError, match="a is the only engine that takes requests") as raised:
                refused()
            assert raised.value.code == "only_engine"
        assert await done(fleet.restart([b])) == ROLLING[3:]
        assert b.draining, "what was drained stays so"
        assert await done(fleet.restart([a], force=True)) == ROLLING[:3]
        fleet.undrain(b)
        fleet.drain(a)
        assert await texts(engines, engines.job()) == ["I am b"]


@in_loop
async def test_a_restart_waits_for_another_engine_and_leaves_the_rest_alone_when_one_does_not_start() -> None:
    async with watched() as (engines, fleet):
        a, b = all_of(engines)
        engines.clients["a"].fail_starts = 2
        change = fleet.restart([a, b])
        assert await done(change) == [("a", "draining"), ("a", "restarting"), ("a", "failed")]
        assert change.state == "failed" and change.error == "a did not start: no memory left"
        assert not a.draining and b.supervisor.starts == 1 and b.takes_requests
        await until(lambda: a.takes_requests)
        b.supervisor._backoff_s = 0.05
        change = fleet.restart([a])
        engines.clients["b"].die()
        assert (await done(change))[0] == ("a", "waiting") and change.state == "done" and b.supervisor.starts == 2


@in_loop
async def test_fewer_engines_and_more_of_them() -> None:
    async with watched() as (engines, fleet):
        a, b = all_of(engines)
        assert await done(fleet.resize(1)) == [("b", "draining"), ("b", "stopping"), ("b", "stopped")]
        assert (b.state, b.takes_requests, b.why_not) == ("stopped", False, "engine stopped")
        assert await texts(engines, engines.job()) == ["I am a"]
        assert await done(fleet.resize(1)) == []
        with pytest.raises(ApiError, match="only engine"):
            fleet.restart([a, b])
        assert await done(fleet.resize(2)) == [("b", "restarting"), ("b", "ready")]
        assert b.takes_requests and b.supervisor.starts == 2
        with pytest.raises(ApiError, match=r"start it with fleet.replicas=3") as refused:
            fleet.resize(3)
        assert refused.value.kind == "invalid"
        with pytest.raises(ApiError, match="at least 1"):
            fleet.resize(0)


@in_loop
async def test_a_server_that_ends_begins_no_restart_and_breaks_off_one() -> None:
    async with watched() as (engines, fleet):
        client = engines.clients["a"]
        other_software(engines)
        client.hold_before = 1
        running = asyncio.create_task(texts(engines, engines.job()))
        await client.holding.wait()
        change = fleet.restart(all_of(engines))
        fleet.closing = True
        with pytest.raises(ApiError, match="shutting down"):
            fleet.undrain(engines.engines["a"])
        client.proceeding.set()
        assert await running == ["I am a"]
        assert await done(change) == [("a", "draining")] and "shutting down" in change.error
        assert engines.engines["a"].takes_requests and client.starts == 1
