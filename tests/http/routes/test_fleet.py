"""A server with two engines: what it says of each, and that one of them is enough."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from engine.contracts.command import CommandProvider
from engine.contracts.config import SlotConfig
from engine.contracts.events import Chunk
from engine.contracts.findings import EngineReader, Finding, Findings
from engine.contracts.router import Router
from engine.http.server import Server
from engine.loop.messages import StepOutputs
from engine.testing.context import build_context
from engine.testing.exporter import step_event
from engine_plugins.exporter.config import PrometheusConfig
from engine_plugins.exporter.prometheus import PrometheusExporter
from engine_plugins.router.direct import DirectRouter

from ...service.fakes import DirectRouter as Told
from ...service.fakes import ScriptedClient, in_loop, make_plan, make_tokenizer, says
from ..fakes import Running, chat, events_of

CHAT = "/v1/chat/completions"


@asynccontextmanager
async def two() -> AsyncIterator[tuple[Running, dict[str, ScriptedClient]]]:
    """A server, and its engines ``a`` and ``b``, which say their names."""
    clients = {name: ScriptedClient(says(f"I am {name}")) for name in "ab"}
    router: Router = DirectRouter(SlotConfig(), build_context())
    exporter: Any = PrometheusExporter(PrometheusConfig(), build_context())
    server = Server(make_plan(), clients, router, [exporter], make_tokenizer(), say=lambda line: None)
    await server.listen()
    for engine in server.state.engines.values():
        await engine.supervisor.start()
    try:
        yield Running(server, clients["a"], Told(), exporter), clients
    finally:
        await server.close()


async def read(server: Running, path: str) -> Any:
    status, _, body = await server.get(path)
    assert status == 200, body
    return json.loads(body)


async def said(server: Running) -> str:
    status, _, body = await server.post(CHAT, chat())
    assert status == 200, body
    return str(json.loads(body)["choices"][0]["message"]["content"])


@in_loop
async def test_the_fleet_says_of_each_engine_how_it_is_and_what_was_sent_there() -> None:
    async with two() as (server, clients):
        clients["a"].hold_before = 1
        running = asyncio.create_task(server.post(CHAT, chat(n=2)))
        await clients["a"].holding.wait()
        a, b = (await read(server, "/engine/fleet"))["engines"]
        assert (a["id"], a["state"], a["ready"], a["starts"]) == ("a", "serving", True, 1)
        assert a["load"]["sequences"] == 2 and a["load"]["running_tokens"] > 0
        assert b["load"] == {"sequences": 0, "queued_tokens": 0, "running_tokens": 0}
        clients["a"].proceeding.set()
        assert (await running)[0] == 200
        assert (await read(server, "/engine/fleet"))["engines"][0]["load"] == b["load"]


@in_loop
async def test_a_server_is_ready_and_healthy_while_one_engine_is() -> None:
    async with two() as (server, clients):
        assert (await said(server), (await read(server, "/ready"))["engine"]) == ("I am a", "a")
        clients["a"].die()
        assert (await said(server), (await read(server, "/ready"))["engine"]) == ("I am b", "b")
        assert (await read(server, "/health"))["engine"] == "serving"
        clients["b"].die()
        status, _, body = await server.get("/ready")
        assert status == 503 and b"a: engine dead, b: engine dead" in body
        assert (await server.get("/health"))[0] == 200, "they are started again"
        for engine in server.server.state.engines.values():
            engine.supervisor.state = "failed"
        assert (await server.get("/health"))[0] == 503


@in_loop
async def test_routes_about_an_engine_take_its_id() -> None:
    async with two() as (server, clients):
        clients["a"].die()
        await said(server)
        for path in ("stats", "counters", "latency"):
            assert (await read(server, f"/engine/{path}"))["engine"] == "a"
            assert (await read(server, f"/engine/{path}?engine=b"))["engine"] == "b"
        assert (await read(server, "/engine/plan?engine=b"))["id"] == "b"
        status, _, body = await server.get("/engine/stats?engine=c")
        assert status == 404 and b"there are: a, b" in body
        counted = {}
        for name in "ab":
            found = (await read(server, f"/engine/counters?engine={name}"))["metrics"]
            (ttft,) = [each for each in found if each["name"] == "engine_ttft_seconds"]
            counted[name] = sum(ttft["counts"])
        assert counted == {"a": 0, "b": 1}


@in_loop
async def test_a_request_that_moved_on_says_so_and_is_listed_with_the_engine_that_served_it() -> None:
    async with two() as (server, clients):
        await said(server)
        clients["a"].hold_before = 0
        asked = asyncio.create_task(server.post(CHAT, chat()))
        await clients["a"].holding.wait()
        clients["a"].die()
        answer = json.loads((await asked)[2])
        assert answer["timings"]["route"] == {"engine": "b", "attempt": 2, "reason": "the first"}
        (moved,) = (await read(server, f"/engine/requests/{answer['id']}"))["sequences"]
        assert (moved["engine"], moved["attempts"]) == ("b", 2)
        assert [span.get("attempts") for span in moved["spans"] if span["name"] == "route"] == [2]
        for query, engines in (("", ["b", "a"]), ("&engine=a", ["a"]), ("&engine=b", ["b"])):
            listed = (await read(server, f"/engine/requests?count=9{query}"))["requests"]
            assert [each["engine"] for each in listed] == engines
        assert (await server.get("/engine/requests?engine=c"))[0] == 404


@in_loop
async def test_a_prompt_that_begins_anew_at_another_engine_shows_what_that_one_had_cached() -> None:
    async with two() as (server, clients):
        a, b = clients.values()
        a.hold_before = b.hold_before = 0
        asked = asyncio.create_task(server.post(CHAT, chat("hello there", stream=True, return_progress=True)))
        await a.holding.wait()
        name = a.requests[0].request_id
        a.deliver(StepOutputs((), (step_event(), replace(step_event(), chunks=(Chunk(name, 4, 6),))), a.stats))
        await asyncio.sleep(0)
        a.die()
        await b.holding.wait()
        b.deliver(StepOutputs((), (replace(step_event(), chunks=(Chunk(name, 3, 1),)),), b.stats))
        await asyncio.sleep(0)
        b.proceeding.set()
        shown = [each["prompt_progress"] for each in events_of((await asked)[2]) if "prompt_progress" in each]
        assert [(each["cache"], each["processed"]) for each in shown] == [(6, 10), (1, 4)]


async def names_its_engine(engine: EngineReader) -> Findings:
    """What a command reads is of one engine, whatever it reads."""
    read = [await engine.json(f"/engine/{name}") for name in ("stats", "counters", "latency")]
    plan, listed = await engine.json("/engine/plan"), await engine.json("/engine/requests?count=9")
    served = {each["engine"] for each in listed["requests"]}
    return Findings([Finding(name, "") for name in sorted({each["engine"] for each in read} | {plan["id"]} | served)])


@in_loop
async def test_a_command_finds_what_is_wrong_with_the_engine_it_is_asked_about() -> None:
    async with two() as (server, clients):
        await said(server)
        clients["a"].die()
        await said(server)
        provider = CommandProvider("look", "x:y", "look", finds=f"{__name__}:names_its_engine")
        server.server.state.finders.commands = {"look": provider}
        for query, engine in (("", "a"), ("?engine=a", "a"), ("?engine=b", "b")):
            status, _, body = await server.post(f"/engine/findings/look{query}", b"")
            assert (status, [each["cause"] for each in json.loads(body)["findings"]]) == (200, [engine]), query
        assert (await server.post("/engine/findings/look?engine=c", b""))[0] == 404


@in_loop
async def test_a_scrape_has_each_metric_once_with_a_line_for_each_engine() -> None:
    async with two() as (server, _):
        page = (await server.get("/metrics"))[2].decode()
        assert page.count("# TYPE engine_ttft_seconds histogram") == 1
        assert page.count("engine_ttft_seconds_count{") == 2
        assert 'engine="a"' in page and 'engine="b"' in page


@in_loop
async def test_three_crashes_end_an_engine_and_the_last_one_ends_the_server() -> None:
    lines: list[str] = []
    clients = {name: ScriptedClient(says(f"I am {name}")) for name in "ab"}
    router: Router = DirectRouter(SlotConfig(), build_context())
    server = Server(make_plan(), clients, router, [], make_tokenizer(), say=lines.append)
    running = asyncio.create_task(server.run())
    while not any(line.startswith("ready") for line in lines):
        await asyncio.sleep(0.01)
    for engine in server.state.engines.values():
        engine.supervisor._poll_s = engine.supervisor._backoff_s = 0.001
    asked = Running(server, clients["a"], Told(), None)  # type: ignore[arg-type]
    for name, others in (("a", "I am b"), ("b", "")):
        client = clients[name]
        client.fail_starts = 2
        client.die()
        while server.state.engines[name].state != "failed":
            await asyncio.sleep(0.01)
        if others:
            assert await said(asked) == others and not running.done()
    assert await running == 1
    assert any("3 crashes within 60 s" in line for line in lines)
