"""Engine clients: the same answers in a thread and in a process; death is noticed, reported and survived."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.assembly.assemble import assemble
from engine.assembly.plan import EnginePlan
from engine.contracts.request import EngineRequest, SamplingParams, TokensOut
from engine.http import server
from engine.loop.client import EngineDead, EngineRefused, OutputStream
from engine.loop.messages import EngineInfo, Heartbeat, Progress
from engine.startup import engine_process, process
from engine.startup.inprocess import InprocessEngineClient
from engine.startup.process import ProcessEngineClient
from tests.selection import few

PROMPT = tuple(range(5, 40))
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def plan() -> EnginePlan:
    return assemble(["device=cpu", "model.max_len=2048", "exporter=[]", "threads=1", "scheduler.token_budget=2048"])


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """One for all tests of a client that is kept."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def client(loop: asyncio.Runner, plan: EnginePlan) -> Iterator[ProcessEngineClient]:
    """Of a process that a test finds as the one before left it: see :func:`started`."""
    client = ProcessEngineClient(plan)
    yield client
    loop.run(client.close())


async def started(client: ProcessEngineClient | InprocessEngineClient) -> EngineInfo:
    """What is known of the engine; it is started where it does not run."""
    if client.alive and client.info is not None:
        return client.info
    phases: list[Progress] = []
    info = await client.start(phases.append)
    assert phases
    return info


async def collect(stream: OutputStream) -> list[TokensOut]:
    return [out async for out in stream]


def test_pings_are_answered_while_a_step_runs_and_say_how_long_it_has(
    client: ProcessEngineClient, loop: asyncio.Runner
) -> None:
    async def scenario() -> list[Heartbeat]:
        await started(client)
        stream = client.submit(EngineRequest("a", tuple(range(5, 1900)), GREEDY))
        first, beats = asyncio.ensure_future(anext(stream)), []
        while not first.done():
            client.ping()
            await asyncio.sleep(0.01)
            beats.append(client.heartbeat)
        stream.abort()
        await collect(stream)
        return beats

    stepping = [beat for beat in loop.run(scenario()) if beat.step_s]
    assert len({beat.step_s for beat in stepping}) > 3
    assert stepping[-1].expected_s > 0.0  # known from warming up, before any step was measured


def test_a_process_and_a_thread_give_the_same_tokens(
    plan: EnginePlan, client: ProcessEngineClient, loop: asyncio.Runner
) -> None:
    async def tokens(client: ProcessEngineClient | InprocessEngineClient) -> tuple[int, ...]:
        info = await started(client)
        assert client.alive and info.max_len == 2048
        outputs = await collect(client.submit(EngineRequest("a", PROMPT, GREEDY)))
        assert outputs[-1].finish_reason == "length" and outputs[-1].timings is not None
        return tuple(token for out in outputs for token in out.tokens)

    thread = InprocessEngineClient(plan)
    in_process, in_thread = loop.run(tokens(client)), loop.run(tokens(thread))
    loop.run(thread.close())
    assert not thread.alive
    assert len(in_process) == 12
    assert in_process == in_thread


def test_aborting_a_stream_ends_it_and_frees_its_blocks(plan: EnginePlan) -> None:
    async def scenario() -> None:
        client = InprocessEngineClient(plan)
        await client.start()
        stream = client.submit(EngineRequest("a", PROMPT, SamplingParams(max_tokens=200, temperature=0.0)))
        await anext(stream)
        stream.abort("stop")
        outputs = await collect(stream)
        assert outputs[-1].finish_reason == "stop"
        while client.stats.blocks_leased:
            await asyncio.wait_for(collect(client.submit(EngineRequest("b", PROMPT, GREEDY))), 30)
        await client.close()

    asyncio.run(scenario())


def test_a_killed_engine_fails_its_streams_and_can_be_started_again(
    client: ProcessEngineClient, loop: asyncio.Runner
) -> None:
    async def scenario() -> None:
        info = await started(client)
        stream = client.submit(EngineRequest("a", PROMPT, SamplingParams(max_tokens=200, temperature=0.0)))
        await anext(stream)
        os.kill(info.pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match="signal 9"):
            await collect(stream)
        assert not client.alive and "signal 9" in client.cause_of_death
        with pytest.raises(EngineDead):
            client.submit(EngineRequest("b", PROMPT, GREEDY))
        again = await client.start()
        assert again.pid != info.pid
        outputs = await collect(client.submit(EngineRequest("a", PROMPT, GREEDY)))
        assert outputs[-1].finish_reason == "length"

    loop.run(scenario())


def test_closing_a_stuck_engine_kills_it(
    client: ProcessEngineClient, loop: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert process.CLOSE_TIMEOUT_S < server.CLOSE_S / 2
    monkeypatch.setattr(process, "CLOSE_TIMEOUT_S", 0.2)

    async def scenario() -> int:
        info = await started(client)
        os.kill(info.pid, signal.SIGSTOP)
        stream = client.submit(EngineRequest("a", PROMPT, GREEDY))
        await client.close()
        with pytest.raises(EngineDead):
            await collect(stream)
        assert not client.alive
        return info.pid

    pid = loop.run(scenario())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_engine_that_cannot_start_says_why_in_one_message(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        broken = assemble(["device=cpu", "memory.kv_tokens=100000000000", "exporter=[]"])
        client = ProcessEngineClient(broken)
        with pytest.raises(EngineRefused, match=r"does not fit .* GiB(?s:.*)memory\.kv_tokens="):
            await client.start()
        words = client.cause_of_death
        assert client._reading is not None
        await client._reading
        assert client.cause_of_death == words  # which the end of its process adds nothing to
        await client.close()

    asyncio.run(scenario())
    assert "Traceback" not in capfd.readouterr().err


def test_a_stopped_engine_answers_no_ping_and_is_killed_with_its_stacks(
    plan: EnginePlan, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        client = ProcessEngineClient(plan)
        info = await client.start()
        client.ping()
        heard = client.num_messages
        await until(lambda: client.num_messages > heard)
        stream = client.submit(EngineRequest("a", PROMPT, SamplingParams(max_tokens=200, temperature=0.0)))
        await anext(stream)
        os.kill(info.pid, signal.SIGSTOP)
        await asyncio.sleep(0.2)
        heard = client.num_messages
        client.ping()
        await asyncio.sleep(0.3)
        assert client.alive and client.num_messages == heard
        client.kill("it does not answer")
        with pytest.raises(EngineDead, match="it does not answer"):
            await asyncio.wait_for(collect(stream), engine_process.STACKS_S + 2)
        assert client.cause_of_death == "it does not answer"
        await client.close()

    asyncio.run(scenario())
    shown = capfd.readouterr().err
    assert "Fatal Python error: Aborted" in shown and "in drive" in shown


async def until(seen: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not seen():
            await asyncio.sleep(0.01)


@few(2)
@pytest.mark.parametrize(
    "phase", ["load weights", "import torch", pytest.param("plan memory", marks=pytest.mark.slow), "warm up", "ready"]
)
def test_the_engine_process_ends_with_its_parent_in_every_phase(plan: EnginePlan, phase: str) -> None:
    script = (
        "import asyncio, os, signal, sys\n"
        "from engine.assembly.plan import EnginePlan\n"
        "from engine.startup.process import ProcessEngineClient\n"
        "client = ProcessEngineClient(EnginePlan.from_json(sys.stdin.buffer.read()))\n"
        "def die(progress=None):\n"
        "    if progress is None or progress.phase == sys.argv[1]:\n"
        "        print(client._process.pid, flush=True)\n"
        "        os.kill(client._process.pid, signal.SIGSTOP)  # it can do nothing about it itself\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "async def main():\n"
        "    await client.start(die)\n"
        "    die()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", script, phase]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.write(plan.to_json())
        parent.stdin.close()
        child = int(parent.stdout.readline())
        try:
            assert parent.wait(60) == -signal.SIGKILL
            by = time.monotonic() + 2.0
            while not has_ended(child):
                assert time.monotonic() < by
                time.sleep(0.01)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or only waits for whoever inherited it to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
