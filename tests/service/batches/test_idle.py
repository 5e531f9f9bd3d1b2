"""When lines of batches may begin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from engine.loop.messages import EngineStats, GroupBlocks, StepOutputs
from engine.service.admission import Admission
from engine.service.batches.idle import Idle
from engine.service.engines import EngineHandle

from ..fakes import ScriptedClient, in_loop, make_plan, make_tokenizer


@asynccontextmanager
async def idle_engine(
    most: int | None = None, quiet_s: float = 0.0
) -> AsyncIterator[tuple[Idle, EngineHandle, Admission]]:
    engine, admission = EngineHandle("default", make_plan(), ScriptedClient(), make_tokenizer()), Admission(8)
    await engine.supervisor.start()
    try:
        yield Idle({"default": engine}, admission, most, quiet_s), engine, admission
    finally:
        await engine.supervisor.stop()


async def begins(idle: Idle, tenant: str = "", most: int | None = None) -> bool:
    try:
        async with asyncio.timeout(0.1):
            await idle.enter(tenant, most)
    except TimeoutError:
        return False
    return True


@in_loop
async def test_an_eighth_of_the_rows_is_for_lines() -> None:
    async with idle_engine() as (idle, engine, _):
        rows = engine.plan.scheduler.max_requests
        assert [await begins(idle) for _ in range(rows // 8)] == [True] * (rows // 8)
        assert not await begins(idle)
        waiting = asyncio.create_task(idle.enter("", None))
        await asyncio.sleep(0)
        idle.leave("")
        await waiting
        assert idle.in_flight == rows // 8


@in_loop
async def test_no_line_begins_beside_a_client_nor_for_a_moment_after() -> None:
    async with idle_engine(quiet_s=0.3) as (idle, _, admission):
        assert await begins(idle)
        with admission.enter("a client", 1):
            assert not await begins(idle)
        assert not await begins(idle)
        await idle.enter("", None)
        admission.lame_duck = True
        assert not await begins(idle)


@in_loop
async def test_no_line_begins_while_the_engine_queues_or_its_cache_is_half_in_use_or_it_is_gone() -> None:
    async with idle_engine(most=100) as (idle, engine, _):
        for stats in (
            EngineStats(waiting=1),
            EngineStats(blocks=(GroupBlocks("full", 10, 4, 0, 6),)),
        ):
            engine.client.deliver(StepOutputs((), (), stats))
            assert not await begins(idle)
            engine.client.deliver(StepOutputs((), (), replace(stats, waiting=0, blocks=())))
            assert await begins(idle)
        engine.draining = True
        assert not await begins(idle)


@in_loop
async def test_a_line_of_many_sequences_counts_as_many() -> None:
    async with idle_engine(most=4) as (idle, _, _):
        await idle.enter("a", 3)
        await idle.grow("a", 3, 1, 3)
        assert not await begins(idle, "a", 3) and await begins(idle, "b", 3)
        assert not await begins(idle, "b", 3)
        idle.leave("a", 3)
        assert idle.in_flight == 1 and await begins(idle, "a", 3)


@in_loop
async def test_lines_that_grow_wait_for_each_other_and_never_exceed_what_a_tenant_may_have() -> None:
    async with idle_engine(most=8) as (idle, _, _):
        for _ in range(4):
            await idle.enter("a", 4)
        growing = {asyncio.create_task(idle.grow("a", 4, 1, 3)) for _ in range(4)}
        for number in range(3):
            done, growing = await asyncio.wait(growing, return_when=asyncio.FIRST_COMPLETED)
            assert (len(done), idle.in_flight) == (1, 3)
            assert not await begins(idle, "a", 4) and await begins(idle, "b", 4)
            idle.leave("b")
            if number < 2:
                idle.leave("a", 3)
        (last,) = growing
        last.cancel()
        await asyncio.gather(last, return_exceptions=True)
        assert await begins(idle, "a", 4), "nobody grows any more"
        idle.leave("a", 4)
        assert idle.in_flight == 0


@in_loop
async def test_one_line_begins_where_an_engine_starts_for_whoever_comes() -> None:
    engines = {"default": EngineHandle("default", make_plan(), ScriptedClient(), make_tokenizer())}
    assert not await begins(Idle(engines, Admission(8), None, 0.0))
    admission = Admission(8)
    idle = Idle(engines, admission, None, 0.0, lambda: True)
    with admission.enter("a client", 1):
        assert not await begins(idle)
    assert await begins(idle) and not await begins(idle)
