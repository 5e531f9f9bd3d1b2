"""A server with two engines: what it says of each, and that one of them is enough."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from msgspec.structs import replace

from engine.contracts.command import CommandProvider
from engine.contracts.config import AutoscaleSettings, FleetSettings, SlotConfig
from engine.contracts.events import Chunk
from engine.contracts.findings import EngineReader, Finding, Findings
from engine.contracts.router import Router
from engine.counters.fleet import STATE
from engine.http.routes.fleet import _is_local
from engine.http.routes.scale import read_scale
from engine.http.server import Server
from engine.loop.messages import StepOutputs
from engine.testing.context import build_context
from engine.testing.exporter import step_event
from engine_plugins.exporter.config import PrometheusConfig
from engine_plugins.exporter.prometheus import PrometheusExporter
from engine_plugins.router.direct import DirectRouter

from ...service.fakes import DirectRouter as Told
from ...service.fakes import MemoryExporter, ScriptedClient, in_loop, make_plan, make_tokenizer, says
from ..fakes import Running, chat, events_of

CHAT = "/v1/chat/completions"


@asynccontextmanager
async def two(**settings: Any) -> AsyncIterator[tuple[Running, dict[str, ScriptedClient]]]:
    """A server, and its engines ``a`` and ``b``, which say their names."""
    clients = {name: ScriptedClient(says(f"I am {name}")) for name in "ab"}
    router: Router = DirectRouter(SlotConfig(), build_context())
    exporter: Any = PrometheusExporter(PrometheusConfig(), build_context())
    server = Server(make_plan(**settings), clients, router, [exporter], make_tokenizer(), say=lambda line: None)
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


async def changed(server: Running, path: str, *headers: str) -> tuple[int, Any]:
    """The status, and what was answered."""
    status, _, body = await server.post(f"/engine/fleet/{path}", b"", *headers)
    return status, json.loads(body)


async def counted(server: Running) -> str:
    """The page without the figures of the moment, which are at its end."""
    return (await server.get("/metrics"))[2].decode().partition(f"# HELP {STATE.name} ")[0]


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
        assert (a["id"], a["state"], a["ready"], a["starts"]) == ("a", "ready", True, 1)
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
        assert (await read(server, "/health"))["engine"] == "ready"
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
    asked = Running(server, clients["a"], Told(), MemoryExporter())
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


@in_loop
async def test_engines_are_drained_and_restarted_through_the_listener() -> None:
    async with two() as (server, clients):
        status, state = await changed(server, "drain?engine=a")
        assert (status, [each["state"] for each in state["engines"]]) == (200, ["draining", "ready"])
        assert (await said(server), state["change"]) == ("I am b", None)
        status, refusal = await changed(server, "drain?engine=b")
        assert (status, refusal["error"]["code"]) == (409, "only_engine") and "force=1" in refusal["error"]["message"]
        status, state = await changed(server, "undrain?engine=a")
        assert status == 200 and state["engines"][0]["ready"]
        clients["a"].slow_to_close = asyncio.Event()
        status, state = await changed(server, "restart")
        assert (status, state["change"]["state"], state["change"]["engines"]) == (202, "running", ["a", "b"])
        status, refusal = await changed(server, "restart?engine=b")
        assert (status, "A restart is running" in refusal["error"]["message"]) == (409, True)
        clients["a"].slow_to_close.set()
        while (state := await read(server, "/engine/fleet"))["change"]["state"] == "running":
            await asyncio.sleep(0.01)
        assert [each["starts"] for each in state["engines"]] == [2, 2] and state["change"]["state"] == "done"
        steps = [(each["engine"], each["step"]) for each in state["change"]["steps"]]
        assert steps == [(name, step) for name in "ab" for step in ("draining", "restarting", "ready")]


@in_loop
async def test_engines_are_stopped_and_started_and_their_counts_stay() -> None:
    async with two() as (server, _):
        await changed(server, "drain?engine=a")
        assert await said(server) == "I am b"
        await changed(server, "undrain?engine=a")
        page = await counted(server)
        for replicas, expected in ((1, ["ready", "stopped"]), (2, ["ready", "ready"])):
            status, state = await changed(server, f"resize?replicas={replicas}")
            while (state := await read(server, "/engine/fleet"))["change"]["state"] == "running":
                await asyncio.sleep(0.01)
            assert status == 202 and [each["state"] for each in state["engines"]] == expected
            assert await counted(server) == page, "what was counted stays"
            assert (await read(server, "/health"))["status"] == "ok" and await said(server) == "I am a"
            page = await counted(server)
        status, refusal = await changed(server, "resize?replicas=3")
        assert status == 400 and "fleet.replicas=3" in refusal["error"]["message"]


@in_loop
async def test_wrong_changes_are_refused_in_plain_words() -> None:
    async with two() as (server, _):
        for path, status, words in (
            ("drain", 400, "there are: a, b"),
            ("drain?engine=c", 404, "there are: a, b"),
            ("restart?engine=c", 404, "there are: a, b"),
            ("restart?force=yes", 400, "expected 1 or 0"),
            ("resize", 400, "expected a number of engines"),
            ("resize?replicas=-1", 400, "expected a number of engines"),
            ("resize?replicas=0", 400, "at least 1"),
        ):
            found, refusal = await changed(server, path)
            assert (found, words in refusal["error"]["message"]) == (status, True), (path, refusal)
        server.server.state.fleet.closing = True
        status, refusal = await changed(server, "undrain?engine=a")
        assert (status, refusal["error"]["code"]) == (503, "draining")


@in_loop
async def test_without_a_key_only_this_machine_may_change_engines() -> None:
    async with two() as (server, _):
        for header in ("X-Forwarded-For: 203.0.113.9", "Forwarded: for=203.0.113.9", "X-Real-IP: 203.0.113.9"):
            for path in ("restart", "drain?engine=a", "undrain?engine=a", "resize?replicas=1"):
                status, refusal = await changed(server, path, header)
                assert (status, refusal["error"]["code"]) == (403, "local_only")
                assert "server.api_key" in refusal["error"]["message"]
        assert (await changed(server, "undrain?engine=a", "Origin: http://evil.example"))[0] == 415
        assert (await changed(server, "undrain?engine=a"))[0] == 200
    async with two(api_key="sesame") as (server, _):
        assert (await changed(server, "undrain?engine=a"))[0] == 401
        key, forwarded = "Authorization: Bearer sesame", "X-Forwarded-For: 203.0.113.9"
        assert (await changed(server, "undrain?engine=a", key, forwarded))[0] == 200


@pytest.mark.parametrize(
    ("remote", "host", "local"),
    [
        ("127.0.0.1", "localhost:8000", True),
        ("::1", "[::1]:8000", True),
        ("::ffff:127.0.0.1", "127.0.0.1", True),
        ("10.0.0.1", "localhost", False),
        ("", "localhost", False),
        ("127.0.0.1", "evil.example", False),
    ],
)
def test_this_machine_is_known_by_its_address_and_name(remote: str, host: str, local: bool) -> None:
    assert _is_local(make_mocked_request("POST", "/", {"Host": host}).clone(remote=remote)) is local


@in_loop
async def test_what_says_how_many_engines_there_should_be() -> None:
    async with two() as (server, clients):
        found = await read(server, "/engine/scale")
        assert (found["desired"], found["ready"], found["reason"], found["autoscale"]) == (2, 2, "as started", False)
        assert (found["backlog_s"], found["saturation"], found["may_go"]) == (0, 0, ["b"])
        assert found.keys() == (await read_scale(server.server.state)).keys()
        assert found["classes"] == {
            "default": {"expected_ttft_p95_s": None, "observed_ttft_p95_s": None, "shed": 0},
        }
        assert [(each["id"], each["state"], each["starts"]) for each in found["engines"]] == [
            ("a", "ready", 1),
            ("b", "ready", 1),
        ]
        clients["a"].hold_before = 1
        asked = asyncio.create_task(server.post(CHAT, chat(n=2)))
        await clients["a"].holding.wait()
        found = await read(server, "/engine/scale")
        assert found["tokens_in_flight"]["running"] > 0 and found["saturation"] == 2 / 32 / 2
        assert found["may_go"] == ["b"], "a has more to do"
        clients["a"].proceeding.set()
        await asked
        await changed(server, "resize?replicas=1")
        while (await read(server, "/engine/fleet"))["change"]["state"] == "running":
            await asyncio.sleep(0.01)
        found = await read(server, "/engine/scale")
        assert (found["desired"], found["reason"], found["engines"][1]["state"]) == (1, "asked for", "stopped")
        page = (await server.get("/metrics"))[2].decode()
        assert any(line.endswith('engine="b",state="stopped"} 1.0') for line in page.splitlines())
        assert page.endswith('engine="a"} 1.0\n'), "engines that should be up, of the whole server"


@in_loop
async def test_a_server_without_engines_is_ready_and_holds_as_many_requests_as_its_queue_has_places() -> None:
    plan = make_plan(max_queue=2)
    fleet = FleetSettings(autoscale=AutoscaleSettings(min=0, max=1, down_after_s=1.0))
    plan = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, fleet=fleet))
    client = ScriptedClient(says("good morning"))
    router: Router = DirectRouter(SlotConfig(), build_context())
    server = Server(plan, {"a": client}, router, [], make_tokenizer(), say=lambda line: None)
    await server.listen()
    state, running = server.state, Running(server, client, Told(), MemoryExporter())
    await state.engine.supervisor.start()
    await state.engine.supervisor.stop()
    try:
        assert [(await running.get(path))[0] for path in ("/ready", "/health")] == [200, 200]
        asked = [asyncio.create_task(running.post(CHAT, chat())) for _ in range(2)]
        while state.scaler.held < 2:
            await asyncio.sleep(0.01)
        assert (await running.post(CHAT, chat()))[0] == 429, "the queue is full"
        found = await read(running, "/engine/scale")
        assert (found["held"], found["classes"]["default"]["shed"]) == (2, 1)
        scaling = asyncio.create_task(state.scaler.run())
        assert [status for status, _, _ in await asyncio.gather(*asked)] == [200, 200]
        assert (await read(running, "/engine/scale"))["reason"] == "2 requests wait for an engine"
        scaling.cancel()
    finally:
        await server.close()
