"""Routers and exporters that break their contract: what they spoil is their own request or page."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import structlog

from engine.contracts.events import Event
from engine.contracts.router import Answer, Reject, ToEngine, ToUrl
from engine.http import state
from engine.service import bus

from ..service.fakes import in_loop
from .fakes import Running, chat, running

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "route",
    [
        None,
        "default",
        {"engine_id": "default"},
        ToEngine,
        ToEngine("elsewhere"),
        ToEngine(None),  # type: ignore[arg-type]
        Answer(()),
        Answer(({},)),
        Answer((None,)),  # type: ignore[arg-type]
        Answer(({"tokens": None, "finish_reason": "stop"},)),
        Reject("no", 7),  # type: ignore[arg-type]
        Reject(200, "fine"),
        ToUrl(None),  # type: ignore[arg-type]
        ToUrl("not a url"),
        OSError("/secret/path at 0xdeadbeef"),
    ],
)
@in_loop
async def test_what_is_no_route_fails_the_request_and_no_other(route: Any, stream: bool) -> None:
    async with running() as server:
        right = server.router.decision
        server.router.decision = route
        status, _, data = await server.post(CHAT, chat(stream=stream))
        assert status in (500, 502) and b"secret" not in data and b"deadbeef" not in data, data
        assert set(json.loads(data)["error"]) == {"message", "type", "param", "code"}
        server.router.decision = right
        assert (await server.post(CHAT, chat(stream=stream)))[0] == 200
        assert len(server.client.requests) == 1 and server.server.state.admission.in_flight == 0


@in_loop
async def test_a_router_that_blocks_is_named_in_the_log() -> None:
    with structlog.testing.capture_logs() as logs:
        async with running() as server:
            route = server.router.place

            def slow(request: Any, fleet: Any) -> Any:
                time.sleep(0.06)  # it must not, and nothing else shows that it did
                return route(request, fleet)

            server.router.place = slow  # type: ignore[method-assign]
            assert (await server.post(CHAT, chat()))[0] == 200
    (line,) = [line for line in logs if line["event"] == "router blocked the server"]
    assert line["ms"] >= 60 and line["request_id"].startswith("chatcmpl-")


@contextmanager
def blocked(server: Running) -> Iterator[threading.Event]:
    """The exporter does not return until the end; the event says that it was called."""
    entered, release = threading.Event(), threading.Event()

    def export(events: Sequence[Event]) -> None:
        entered.set()
        release.wait()

    server.exporter.export = export  # type: ignore[method-assign]
    try:
        yield entered
    finally:
        release.set()


@in_loop
async def test_an_exporter_that_does_not_return_keeps_only_readers_of_exporters_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "READ_S", 0.05)
    async with running() as server:
        with blocked(server) as entered:
            assert (await server.post(CHAT, chat()))[0] == 200
            await asyncio.to_thread(entered.wait)
            # More readers than there are threads in a pool.
            pages = await asyncio.gather(*(server.get("/metrics") for _ in range(40)), server.get("/engine/latency"))
            assert {status for status, _, _ in pages} == {503}
            assert {json.loads(data)["error"]["code"] for _, _, data in pages} == {"exporter_blocked"}
            assert (await server.post("/tokenize", {"prompt": "hi"}))[0] == 200
            assert (await server.post(CHAT, chat(stream=True)))[0] == 200
        assert (await server.get("/metrics"))[0] == 200


@in_loop
async def test_a_server_ends_while_an_exporter_does_not_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus, "CLOSE_S", 0.05)
    with structlog.testing.capture_logs() as logs:
        async with running() as server:
            with blocked(server) as entered:
                assert (await server.post(CHAT, chat()))[0] == 200
                await asyncio.to_thread(entered.wait)
                await server.server.close()
                assert not server.exporter.closed
    assert any("does not return" in line["event"] for line in logs)
