"""Engines that a launcher starts and that connect to their server: how they begin, die, hang and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.assembly.assemble import assemble
from engine.assembly.plan import EnginePlan, SlotChoice
from engine.assembly.values import class_path, to_plain
from engine.contracts.model import DeviceFacts
from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.client import EngineDead, EngineRefused, OutputStream
from engine.loop.messages import EngineInfo
from engine.ranks.messages import Assignment
from engine.service.supervisor import Supervisor
from engine.startup import engine_process, process
from engine.startup.joined import Joined
from engine.startup.launching import alone, job_of
from engine.startup.process import ProcessEngineClient
from tests.startup.fake_launcher import FakeConfig

ROOT = Path(__file__).resolve().parents[2]
PROMPT = tuple(range(5, 40))
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
OVERRIDES = ["device=cpu", "model.max_len=512", "exporter=[]", "threads=1", "fleet.replicas=2"]


@pytest.fixture(scope="module")
def local() -> EnginePlan:
    return assemble(OVERRIDES)


@pytest.fixture(autouse=True)
def finds_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher is loaded by a process of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def launched(plan: EnginePlan, seen: Path, **config: Any) -> EnginePlan:
    values = to_plain(FakeConfig(seen=str(seen), **config))
    fake = "tests.startup.fake_launcher:FakeLauncher"
    choice = SlotChoice("parallelism", "fake", fake, class_path(FakeConfig), values, "tests 1", "fake")
    return replace(plan, launcher=choice)


def pid_in(seen: Path) -> int:
    return int((seen / "pid").read_text())


async def tokens_of(stream: OutputStream) -> tuple[int, ...]:
    return tuple([token async for out in stream for token in out.tokens])


async def until(seen: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not seen():
            await asyncio.sleep(0.02)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def test_it_is_alone_where_it_runs_and_takes_no_more_than_its_share_of_what_is_free(
    local: EnginePlan, tmp_path: Path
) -> None:
    plan = launched(local, tmp_path)
    assert alone(plan, None).memory_bytes is None
    for share, least, most in ((2**20, 2**20, 2**20), (2**50, 2**24, 2**50 - 1)):
        sent = alone(plan, share)
        assert sent.launcher is None and sent.settings.fleet.replicas == 1 and sent.memory_bytes == share
        with socket.socket() as connection:
            there = Joined(connection, "10.0.0.2", Assignment(0, sent.to_json(), 3, "10.0.0.2")).plan()
        assert there.memory_bytes is not None and least <= there.memory_bytes <= most
        assert there.settings.threads == 3 and there.ranks_here == 1


def test_a_gpu_is_asked_for_each_rank_unless_they_share_one(local: EnginePlan) -> None:
    config = local.choice("parallelism").config
    for tp, share, gpus in ((1, False, 1), (2, False, 2), (2, True, 1)):
        own = replace(local.choice("parallelism"), config={**config, "tp": tp, "share_devices": share})
        plan = replace(local, device=DeviceFacts("cuda"), slots={**local.slots, "parallelism": (own,)})
        assert (job_of(plan, 4, {}).gpus, job_of(plan, 4, {}).ranks) == (gpus, tp)
    assert job_of(local, 4, {}).gpus == 0


@pytest.fixture
def client(local: EnginePlan, tmp_path: Path) -> Iterator[ProcessEngineClient]:
    yield ProcessEngineClient(launched(local, tmp_path, memory_bytes=2**30))


def test_it_gives_the_tokens_of_a_local_one_dies_as_one_and_starts_again(
    local: EnginePlan, client: ProcessEngineClient, tmp_path: Path
) -> None:
    async def scenario() -> None:
        child = ProcessEngineClient(local)
        await child.start()
        expected = await tokens_of(child.submit(EngineRequest("a", PROMPT, GREEDY)))
        await child.close()

        info = await client.start(lambda progress: None)
        assert (info.host, info.pid) == ("127.0.0.1", pid_in(tmp_path))
        assert (tmp_path / "job").read_text() == "1 1 0"
        assert info.ledger is not None and info.ledger.total_bytes <= 2**30, "its share of that machine's memory"
        assert await tokens_of(client.submit(EngineRequest("a", PROMPT, GREEDY))) == expected
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", int((tmp_path / "port").read_text())))

        stream = client.submit(EngineRequest("b", PROMPT, LONG))
        await anext(stream)
        os.kill(info.pid, signal.SIGKILL)
        with pytest.raises(
            EngineDead, match=rf"the engine process \(pid {info.pid} on 127.0.0.1\) ended with signal 9"
        ):
            await tokens_of(stream)
        again = await client.start()
        assert again.pid != info.pid
        assert await tokens_of(client.submit(EngineRequest("a", PROMPT, GREEDY))) == expected
        began = time.monotonic()
        await client.close()
        assert time.monotonic() - began < process.CLOSE_TIMEOUT_S / 2 and client.cause_of_death == process.CLOSED
        assert has_ended(again.pid)

    asyncio.run(scenario())


def test_one_that_hangs_writes_its_stacks_and_is_killed(
    client: ProcessEngineClient, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        info = await client.start()
        stream = client.submit(EngineRequest("a", PROMPT, LONG))
        await anext(stream)
        os.kill(info.pid, signal.SIGSTOP)
        client.kill("it does not answer")
        with pytest.raises(EngineDead, match="it does not answer"):
            await asyncio.wait_for(tokens_of(stream), engine_process.STACKS_S + 2)
        await client.close()
        assert has_ended(info.pid)

    asyncio.run(scenario())
    shown = capfd.readouterr().err
    assert "Fatal Python error: Aborted" in shown and "in drive" in shown


def test_one_whose_machine_is_gone_is_given_up_though_its_connection_says_nothing(
    client: ProcessEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that had it started is stopped, and so is the engine: nobody answers, and nobody can be told."""
    monkeypatch.setattr(engine_process, "STACKS_S", 0.2)

    async def scenario() -> EngineInfo:
        info = await client.start()
        assert client._process is not None
        os.kill(client._process.pid, signal.SIGSTOP)
        os.kill(info.pid, signal.SIGSTOP)
        supervisor = Supervisor(client, 0.5, poll_s=0.05, ping_s=0.1)
        supervisor.state = "serving"
        async with asyncio.timeout(5):
            while client.alive:
                supervisor._check()
                await asyncio.sleep(0.05)
        assert client.cause_of_death.startswith("engine stalled: no answer for")
        await client.close()
        return info

    info = asyncio.run(scenario())
    with contextlib.suppress(ProcessLookupError):
        os.kill(info.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("refuses", "^fleet.launch.address=nowhere: nothing answers there$"),
        ("other version", r"the engine at pid \d+ on 127.0.0.1 has engine 0.0.1, and this server has engine \d"),
        (
            "no checkpoint",
            r"the engine at pid \d+ on 127.0.0.1 finds checkpoint no files in model.path=/.*, and this s",
        ),
        ("token", "the engine ended with exit code 1 before it connected"),
    ],
)
def test_what_does_not_go_together_is_refused_and_leaves_nothing_behind(
    local: EnginePlan, wrong: str, why: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        client = ProcessEngineClient(launched(local, tmp_path, wrong=wrong))
        with pytest.raises(EngineRefused, match=why):
            await asyncio.wait_for(client.start(), 60)
        await client.close()
        assert wrong == "refuses" or has_ended(pid_in(tmp_path))

    asyncio.run(scenario())


def test_a_close_while_it_is_waited_for_leaves_nothing_behind(local: EnginePlan, tmp_path: Path) -> None:
    async def scenario() -> None:
        client = ProcessEngineClient(launched(local, tmp_path))
        starting = asyncio.create_task(client.start())
        await until(lambda: (tmp_path / "pid").exists(), 30)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        began = time.monotonic()
        await client.close()
        assert time.monotonic() - began < process.CLOSE_TIMEOUT_S / 2
        await until(lambda: has_ended(pid_in(tmp_path)))

    asyncio.run(scenario())


SERVES = """
import asyncio, sys
from engine.assembly.plan import EnginePlan
from engine.startup.process import ProcessEngineClient
client = ProcessEngineClient(EnginePlan.from_json(sys.stdin.buffer.read()))
async def main():
    await client.start()
    print(client._process.pid, client.info.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["server", "launching"])
def test_it_ends_with_its_server_and_with_what_had_it_started(local: EnginePlan, victim: str, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SERVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(launched(local, tmp_path).to_json())
        server.stdin.close()
        launching, engine = map(int, server.stdout.readline().split())
        os.kill({"server": server.pid, "launching": launching}[victim], signal.SIGKILL)
        try:
            asyncio.run(until(lambda: has_ended(launching) and has_ended(engine)))
        finally:
            server.kill()
