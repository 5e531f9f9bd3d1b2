"""``/engine/findings``: commands of plugins that read the engine, run for the page."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from engine.contracts.command import CommandProvider
from engine.contracts.findings import EngineReader, Finding, Findings
from engine.service import findings

from ..service.fakes import in_loop
from .fakes import Running, chat, running
from .test_server import error_of

PATH = "/engine/findings/look"
HERE = "tests.http.test_findings"
begun = asyncio.Event()


async def looks(engine: EngineReader) -> Findings:
    read = [await engine.json(f"/engine/{name}") for name in ("plan", "stats", "counters", "latency")]
    recent = (await engine.json("/engine/requests?count=5"))["requests"]
    details = [await engine.json(f"/engine/requests/{each['request_id']}") for each in recent]
    assert all(read) and all(each["sequences"] for each in details)
    return Findings([Finding("it reads", f"{len(recent)} requests")])


async def finds_waiting_rows(engine: EngineReader) -> Findings:
    finding = Finding(
        "too_few_rows",
        "Rows wait.",
        evidence={"queue_ms": [477.3, 449, 501.5]},
        overrides=["scheduler.max_requests=16"],
        replaces=["scheduler.max_requests=2"],
        predicts="queue_ms of 0-95 instead of 476",
    )
    return Findings([finding], {"queue_ms": "mean of the span"}, ["One window is not enough."])


async def finds_nothing(engine: EngineReader) -> Findings:
    return Findings([])


async def fails(engine: EngineReader) -> Findings:
    await engine.json("/engine/requests/nobody")
    raise AssertionError("it was read")


async def returns_a_list(engine: EngineReader) -> Any:
    return []


async def waits(engine: EngineReader) -> Findings:
    begun.set()
    await asyncio.sleep(60)
    raise AssertionError("nobody ended it")


def offer(server: Running, function: str) -> None:
    provider = CommandProvider("look", "engine_mine:LOOK", "look at the engine", finds=f"{HERE}:{function}")
    server.server.state.finders.commands = {"look": provider}


@in_loop
async def test_a_command_reads_the_engine_in_its_server() -> None:
    async with running(api_key="secret") as server:
        offer(server, "looks")
        key = "Authorization: Bearer secret"
        assert (await server.post("/v1/chat/completions", chat(), key))[0] == 200
        _, _, listed = await server.get("/engine/findings", key)
        assert json.loads(listed) == {"commands": [{"name": "look", "doc": "look at the engine", "latest": None}]}
        status, _, found = await server.post(PATH, b"", key)
        (finding,) = json.loads(found)["findings"]
        assert (status, finding["cause"], finding["says"]) == (200, "it reads", "1 requests")


@in_loop
async def test_a_finding_says_when_it_was_first_and_last_seen_and_the_latest_are_kept() -> None:
    async with running() as server:
        offer(server, "finds_waiting_rows")
        finders = server.server.state.finders
        finders._clock = iter(range(1, 99)).__next__
        runs = [json.loads((await server.post(PATH, b""))[2]) for _ in range(2)]
        seen = [(each["findings"][0]["first_seen_s"], each["findings"][0]["last_seen_s"]) for each in runs]
        assert seen == [(1.0, 2.0), (1.0, 4.0)]
        assert [(each["began_s"], each["ended_s"]) for each in runs] == [(1.0, 2.0), (3.0, 4.0)]
        (listed,) = json.loads((await server.get("/engine/findings"))[2])["commands"]
        assert listed["latest"] == runs[1]
        offer(server, "finds_nothing")
        await server.post(PATH, b"")
        offer(server, "finds_waiting_rows")
        assert json.loads((await server.post(PATH, b""))[2])["findings"][0]["first_seen_s"] == 7.0, "it was gone"
        assert len(finders._latest) == 1


@in_loop
@pytest.mark.parametrize(
    ("path", "function", "status", "says"),
    [
        ("/engine/findings/other", "looks", 404, "No command 'other' has findings"),
        (PATH, "fails", 500, "engine look: ValueError: /engine/requests/nobody: No request of this id"),
        (PATH, "returns_a_list", 500, "engine look returned [], expected Findings"),
        (PATH, "is_not_there", 500, "engine look: AttributeError"),
    ],
)
async def test_what_goes_wrong_is_said(path: str, function: str, status: int, says: str) -> None:
    async with running() as server:
        offer(server, function)
        answered, _, data = await server.post(path, b"")
        assert answered == status and says in error_of(data)["message"]


@in_loop
async def test_a_page_of_another_server_starts_nothing() -> None:
    async with running() as server:
        offer(server, "looks")
        status, _, data = await server.post(PATH, b"", "Origin: http://other.example", "Content-Type: text/plain")
        assert status == 415 and "Content-Type" in error_of(data)["message"]


@in_loop
async def test_a_draining_server_starts_nothing() -> None:
    async with running() as server:
        offer(server, "looks")
        server.server.state.admission.draining = True
        status, _, data = await server.post(PATH, b"")
        assert status == 503 and error_of(data)["code"] == "draining"


@in_loop
async def test_a_command_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "LIMIT_S", 0.05)
    async with running() as server:
        offer(server, "waits")
        status, _, data = await server.post(PATH, b"")
        assert status == 500 and "did not end" in error_of(data)["message"]


@in_loop
async def test_one_command_runs_at_a_time_and_ends_with_who_asked() -> None:
    begun.clear()
    async with running() as server:
        offer(server, "waits")
        first = asyncio.create_task(server.post(PATH, b""))
        await begun.wait()
        status, _, data = await server.post(PATH, b"")
        assert status == 409 and "engine look is running already" in error_of(data)["message"]
        first.cancel()
        offer(server, "looks")
        while (await server.post(PATH, b""))[0] == 409:
            await asyncio.sleep(0.01)
        assert (await server.post(PATH, b""))[0] == 200
