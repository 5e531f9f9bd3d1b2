"""An engine that dies or hangs is noticed, replaced, and in the end given up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest
from structlog.testing import capture_logs

from engine.loop.client import EngineDead
from engine.loop.messages import Heartbeat
from engine.service import supervisor as module
from engine.service.supervisor import MAX_CRASHES, Supervisor

from .fakes import ScriptedClient, in_loop


async def until(seen: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not seen():
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def watched(client: ScriptedClient, stall_s: float, poll_s: float = 0.001) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(client, stall_s, poll_s=poll_s, ping_s=0.001, backoff_s=0.0)
    assert supervisor.not_ready() == "engine loading"
    await supervisor.start()
    watch = asyncio.create_task(supervisor.watch())
    yield supervisor
    watch.cancel()


@in_loop
async def test_three_crashes_in_a_minute_are_the_end() -> None:
    client = ScriptedClient()
    supervisor = Supervisor(client, 30.0, poll_s=0.001, backoff_s=0.0)
    await supervisor.start()
    client.fail_starts = 2
    client.die()
    with pytest.raises(EngineDead, match="no memory left"):
        await supervisor.watch()
    assert supervisor.state == "failed" and client.starts == 3


@in_loop
async def test_an_engine_that_answers_no_ping_is_not_ready_then_killed_and_started_again() -> None:
    client = ScriptedClient()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "NOT_READY_S", 0.05)
        async with watched(client, stall_s=0.3) as supervisor:
            await until(lambda: client.num_messages > 20)
            assert supervisor.not_ready() is None and not client.killed
            client.silent = True
            await until(supervisor.not_ready)
            assert "engine stalled: no answer for" in (supervisor.not_ready() or "") and not client.killed
            await until(lambda: client.starts == 2 and supervisor.not_ready() is None)
    assert len(client.killed) == 1 and "no answer for" in client.killed[0]


@in_loop
async def test_an_engine_that_takes_its_time_to_die_is_killed_once() -> None:
    client = ScriptedClient()
    dies = client.kill
    client.kill = client.killed.append  # type: ignore[method-assign]
    async with watched(client, stall_s=0.02) as supervisor:
        client.silent = True
        await until(lambda: client.killed)
        await asyncio.sleep(0.02)  # some twenty more looks at it
        assert len(client.killed) == 1
        dies(client.killed.pop())
        await until(lambda: client.starts == 2 and supervisor.not_ready() is None)


@in_loop
async def test_what_is_ended_on_purpose_has_not_crashed() -> None:
    client = ScriptedClient()
    with capture_logs() as logs:
        async with watched(client, stall_s=30.0) as supervisor:
            for starts in range(2, 2 + 2 * MAX_CRASHES):
                await supervisor.restart()
                await asyncio.sleep(0.005)  # some looks at it
                assert (client.starts, supervisor.starts, supervisor.not_ready()) == (starts, starts, None)
            await supervisor.stop()
            await asyncio.sleep(0.005)
            assert supervisor.not_ready() == "engine stopped" and client.starts == starts
            await supervisor.restart()
            assert supervisor.not_ready() is None
    assert {line["log_level"] for line in logs} == {"info"}


@in_loop
async def test_an_engine_that_is_down_for_a_restart_is_not_started_by_who_watches_it() -> None:
    client = ScriptedClient()
    client.slow_to_close = asyncio.Event()
    async with watched(client, stall_s=30.0) as supervisor:
        restarting = asyncio.create_task(supervisor.restart())
        await until(supervisor.not_ready)
        client.alive = False
        await asyncio.sleep(0.005)
        assert supervisor.not_ready() == "engine restarting" and client.starts == 1
        client.slow_to_close.set()
        await restarting
        assert client.starts == supervisor.starts == 2


@in_loop
async def test_an_engine_that_was_given_up_can_be_restarted_and_is_watched_again() -> None:
    client = ScriptedClient()
    supervisor = Supervisor(client, 30.0, poll_s=0.001, backoff_s=0.0)
    await supervisor.start()
    client.fail_starts = 2
    client.die()
    with pytest.raises(EngineDead):
        await supervisor.watch()
    watch = asyncio.create_task(supervisor.watch())
    await asyncio.sleep(0.005)
    assert supervisor.state == "failed" and not watch.done()
    await supervisor.restart()
    client.die()
    await until(lambda: supervisor.starts == 3)
    watch.cancel()


@in_loop
async def test_an_engine_that_does_not_start_after_it_was_ended_on_purpose_is_tried_again() -> None:
    client = ScriptedClient()
    async with watched(client, stall_s=30.0) as supervisor:
        client.fail_starts = 1
        with pytest.raises(EngineDead, match="no memory left"):
            await supervisor.restart()
        await until(lambda: supervisor.not_ready() is None)
        assert client.starts == 3 and supervisor.starts == 2


@in_loop
async def test_an_engine_that_hangs_while_it_starts_is_killed() -> None:
    client = ScriptedClient()
    client.silent = True
    client.hang_at_start = asyncio.Event()
    supervisor = Supervisor(client, 0.1, poll_s=0.001, ping_s=0.001)
    with pytest.raises(EngineDead, match="no answer for"):
        await supervisor.start()
    assert supervisor.not_ready() == "engine loading"


@in_loop
async def test_a_step_far_longer_than_expected_is_a_stall_and_a_long_prompt_is_none() -> None:
    client = ScriptedClient()
    async with watched(client, stall_s=30.0) as supervisor:
        for beat, ready in (
            (Heartbeat(step_s=100.0, expected_s=20.0), True),
            (Heartbeat(step_s=3.0), True),
            (Heartbeat(step_s=8.0, expected_s=0.1), False),
            (Heartbeat(), True),
        ):
            client.next_heartbeat = beat
            await until(lambda beat=beat: client.heartbeat == beat)
            assert (supervisor.not_ready() is None) is ready, beat
        client.next_heartbeat = Heartbeat(step_s=32.0, expected_s=0.1)
        await until(lambda: client.killed)
    assert client.killed == ["engine stalled: a step has taken 32 s, 0.1 s were expected"]


@in_loop
async def test_what_this_process_missed_while_it_was_stopped_is_no_silence() -> None:
    client = ScriptedClient()
    async with watched(client, stall_s=0.3, poll_s=0.01) as supervisor:
        await until(lambda: client.num_messages > 3)
        stop_the_event_loop(0.5)
        assert supervisor.not_ready() is None
        await asyncio.sleep(0.05)
        assert supervisor.not_ready() is None and not client.killed


def stop_the_event_loop(seconds: float) -> None:
    time.sleep(seconds)
