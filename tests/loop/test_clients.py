"""Engine clients: the same answers in a thread and in a process; death is noticed, reported and survived."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from engine.assembly.assemble import assemble
from engine.assembly.plan import EnginePlan
from engine.contracts.request import EngineRequest, SamplingParams, TokensOut
from engine.loop.client import EngineDead, EngineRefused, OutputStream
from engine.loop.messages import Progress
from engine.serving import server
from engine.startup import process
from engine.startup.inprocess import InprocessEngineClient
from engine.startup.process import ProcessEngineClient

PROMPT = tuple(range(5, 40))
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def plan() -> EnginePlan:
    return assemble(["device=cpu", "model.max_len=256", "exporter=[]", "threads=1"])


async def collect(stream: OutputStream) -> list[TokensOut]:
    return [out async for out in stream]


def test_a_process_and_a_thread_give_the_same_tokens(plan: EnginePlan) -> None:
    async def tokens(client: ProcessEngineClient | InprocessEngineClient) -> tuple[int, ...]:
        phases: list[Progress] = []
        info = await client.start(phases.append)
        assert client.alive and info.max_len == 256 and phases
        outputs = await collect(client.submit(EngineRequest("a", PROMPT, GREEDY)))
        await client.close()
        assert not client.alive
        assert outputs[-1].finish_reason == "length" and outputs[-1].timings is not None
        return tuple(token for out in outputs for token in out.tokens)

    in_process = asyncio.run(tokens(ProcessEngineClient(plan)))
    in_thread = asyncio.run(tokens(InprocessEngineClient(plan)))
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


def test_a_killed_engine_fails_its_streams_and_can_be_started_again(plan: EnginePlan) -> None:
    async def scenario() -> None:
        client = ProcessEngineClient(plan)
        info = await client.start()
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
        await client.close()

    asyncio.run(scenario())


def test_closing_a_stuck_engine_kills_it(plan: EnginePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert process.CLOSE_TIMEOUT_S < server.CLOSE_S / 2
    monkeypatch.setattr(process, "CLOSE_TIMEOUT_S", 0.2)

    async def scenario() -> int:
        client = ProcessEngineClient(plan)
        info = await client.start()
        os.kill(info.pid, signal.SIGSTOP)
        stream = client.submit(EngineRequest("a", PROMPT, GREEDY))
        await client.close()
        with pytest.raises(EngineDead):
            await collect(stream)
        return info.pid

    pid = asyncio.run(scenario())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_engine_that_cannot_start_says_why_in_one_message(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        broken = assemble(["device=cpu", "memory.kv_tokens=100000000000", "exporter=[]"])
        client = ProcessEngineClient(broken)
        with pytest.raises(EngineRefused, match=r"does not fit .* GiB(?s:.*)memory\.kv_tokens="):
            await client.start()
        await client.close()

    asyncio.run(scenario())
    assert "Traceback" not in capfd.readouterr().err


def test_the_engine_process_ends_when_its_parent_does(plan: EnginePlan) -> None:
    script = (
        "import asyncio, os, sys\n"
        "from engine.assembly.plan import EnginePlan\n"
        "from engine.startup.process import ProcessEngineClient\n"
        "async def main():\n"
        "    client = ProcessEngineClient(EnginePlan.from_json(sys.stdin.buffer.read()))\n"
        "    print((await client.start()).pid, flush=True)\n"
        "    os._exit(0)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=plan.to_json(), capture_output=True, timeout=120, check=True
    )
    pid = int(done.stdout)
    subprocess.run(
        ["timeout", "30", "tail", f"--pid={pid}", "-f", "/dev/null"], check=True
    )  # returns as soon as the process is gone
