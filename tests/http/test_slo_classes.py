"""Classes of requests over HTTP: who is of which, what is late, and what clients and operators are told of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.contracts.config import SloClass, SloSettings
from engine.contracts.events import RequestEvent
from engine.contracts.request import TokensOut
from engine.loop.messages import EngineStats, StepOutputs
from engine.service.promises import promise

from ..service.fakes import in_loop
from ..service.test_keys import entry, written
from .fakes import Running, chat, events_of, running

CHAT = "/v1/chat/completions"
CLASSES = {
    "chat": SloClass(5_000.0, itl_ms=50.0, refuse_late=True),
    "code": SloClass(50.0, cancel_late=True),
    "batch": SloClass(30_000.0),
}


@asynccontextmanager
async def classes(**server: Any) -> AsyncIterator[Running]:
    async with running(slo=SloSettings(CLASSES), **server) as found:
        yield found


def asks(name: str) -> str:
    return f"X-SLO-Class: {name}"


async def counts(server: Running) -> dict[str, float]:
    """Of the metrics of classes, those that are not 0."""
    _, _, data = await server.get("/engine/counters")
    return {
        f"{metric['name'].removeprefix('engine_slo_').removesuffix('_total')}.{name}": value
        for metric in json.loads(data)["metrics"]
        if metric["name"].startswith("engine_slo_")
        for name, value in metric["values"].items()
        if value
    }


@in_loop
async def test_the_engine_is_told_the_targets_of_the_class() -> None:
    async with classes() as server:
        for lines, ttft_ms, itl_ms in (([], 30_000.0, 0.0), ([asks("chat")], 5_000.0, 50.0)):
            assert (await server.post(CHAT, chat(), *lines))[0] == 200
            request = server.client.requests[-1]
            assert (request.ttft_ms, request.itl_ms) == (ttft_ms, itl_ms)


@in_loop
async def test_an_answer_says_its_class_and_whether_it_was_kept() -> None:
    async with classes() as server:
        _, _, data = await server.post(CHAT, chat(), asks("chat"))
        slo = json.loads(data)["timings"]["slo"]
        assert slo == {"class": "chat", "ttft_target_ms": 5_000.0, "expected_ttft_ms": None, "met": True}
        await server.server.state.read_exporters(lambda: None)
        (event,) = [event for event in server.exporter.events if isinstance(event, RequestEvent)]
        assert (event.slo_class, event.ttft_target_ms) == ("chat", 5_000.0)


@in_loop
async def test_without_classes_nothing_is_said_of_them() -> None:
    async with running() as server:
        _, _, data = await server.post(CHAT, chat())
        assert "slo" not in json.loads(data)["timings"] and server.client.requests[-1].ttft_ms == 0.0
        status, _, data = await server.post(CHAT, chat(), asks("chat"))
        assert status == 400 and "expected no such header" in json.loads(data)["error"]["message"]


@in_loop
async def test_the_header_is_for_keys_that_may_and_bodies_say_nothing(tmp_path: Path) -> None:
    entries = [entry("ann", "key-of-ann", slo=["chat", "batch"]), entry("eve", "key-of-eve")]
    async with classes(keys=written(tmp_path, entries)) as server:

        async def target(name: str, *lines: str, **fields: Any) -> float | int:
            status, _, _ = await server.post(CHAT, chat(**fields), f"Authorization: Bearer key-of-{name}", *lines)
            return server.client.requests[-1].ttft_ms if status == 200 else status

        assert await target("ann") == await target("ann", user="code") == 5_000.0
        assert await target("ann", asks("batch")) == await target("eve") == 30_000.0
        assert await target("ann", asks("code")) == await target("eve", asks("chat")) == 400


@in_loop
async def test_keys_of_classes_that_are_not_there_do_not_start_a_server(tmp_path: Path) -> None:
    path = written(tmp_path, [entry("ann", slo=["chat", "chatt"])])
    with pytest.raises(Exception, match=r"key ann: slo: 'chatt' is none of slo\.classes"):
        async with classes(keys=path):
            pass


@in_loop
async def test_a_first_token_that_is_late_ends_a_request_of_a_class_that_wants_it() -> None:
    async with classes() as server:
        server.client.hold_before = 0
        for stream in (False, True):
            status, headers, data = await server.post(CHAT, chat(stream=stream), asks("code"))
            assert (status, json.loads(data)["error"]["code"], headers["retry-after"]) == (429, "late", "1")
        assert len(server.client.aborted) == 2
        assert await counts(server) == {"missed.code": 2, "refused.code": 2}
        assert server.server.state.engine.load.sequences == 0


@in_loop
async def test_what_has_begun_in_time_is_not_ended() -> None:
    async with classes() as server:
        server.client.hold_before = 1
        answer = asyncio.create_task(server.post(CHAT, chat(stream=True), asks("code")))
        await server.client.holding.wait()
        await asyncio.sleep(0.1)
        server.client.proceeding.set()
        status, _, data = await answer
        assert status == 200 and events_of(data)
        assert await counts(server) == {"met.code": 1}


@in_loop
async def test_a_request_that_would_be_late_is_refused_before_the_engine_has_it() -> None:
    async with classes() as server:
        forecast = server.server.state.engine.forecast
        promised = promise(SloSettings(CLASSES), None, "chat")
        assert promised is not None
        for _ in range(40):  # a prompt token takes 100 ms
            forecast.sent(expected := forecast.expect(promised, 10))
            forecast.first_token(expected, expected.sent_s + 1.0)
            forecast.sent(expected := forecast.expect(promised, 40))
            forecast.first_token(expected, expected.sent_s + 4.0)
        assert (await server.post(CHAT, chat(), asks("chat")))[0] == 200
        forecast.sent(waits := forecast.expect(promised, 200))
        status, headers, data = await server.post(CHAT, chat(), asks("chat"))
        assert (status, json.loads(data)["error"]["code"]) == (429, "late") and int(headers["retry-after"]) > 10
        assert (await server.post(CHAT, chat(), asks("batch")))[0] == 200, "its class is never refused so"
        assert len(server.client.requests) == 2
        _, _, data = await server.get("/engine/latency")
        found = json.loads(data)["classes"]
        assert found["chat"]["error_p90_ms"] < 100 and found["chat"]["ttft_ms"]["count"] == 1 and "code" in found
        forecast.end(waits)
        assert (await server.post(CHAT, chat(), asks("chat")))[0] == 200


@in_loop
async def test_a_class_that_has_filled_its_queue_locks_no_other_class_out() -> None:
    async with classes(max_queue=2) as server:
        server.client.hold_before = 1
        waiting = [asyncio.create_task(server.post(CHAT, chat(), asks("batch"))) for _ in range(2)]
        while server.server.state.admission.in_flight < 2:
            await asyncio.sleep(0.01)
        status, _, data = await server.post(CHAT, chat(), asks("batch"))
        assert status == 429 and "2 sequences of class batch" in json.loads(data)["error"]["message"]
        waiting.append(asyncio.create_task(server.post(CHAT, chat(), asks("chat"))))
        while server.server.state.admission.in_flight < 3:
            await asyncio.sleep(0.01)
        server.client.proceeding.set()
        assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200, 200, 200]
        assert server.server.state.admission.in_flight == 0
        assert await counts(server) == {"met.batch": 2, "met.chat": 1, "refused.batch": 1}


@in_loop
async def test_a_token_that_comes_with_the_end_of_its_time_is_seen_by_nobody() -> None:
    """The answer is late as a whole: no stream breaks off after its first token."""
    async with classes() as server:
        server.client.hold_before, server.client.slow_to_abort = 0, asyncio.Event()
        answer = asyncio.create_task(server.post(CHAT, chat(stream=True), asks("code")))
        await server.client.abort_seen.wait()
        name = server.client.requests[-1].request_id
        server.client.deliver(StepOutputs((TokensOut(name, (104,)),), (), EngineStats(step=1)))
        server.client.slow_to_abort.set()
        status, _, data = await answer
        assert (status, json.loads(data)["error"]["code"]) == (429, "late")
