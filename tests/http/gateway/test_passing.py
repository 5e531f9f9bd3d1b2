"""The way of a request through a gateway whose targets work: where it goes, what is sent along, what moves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from engine.contracts.router import Answer, ApiRequest, Attempts, EngineView, Reject, Route, ToUrl
from engine.http.gateway.passing import COMMENTS
from engine.testing.context import build_context
from engine_plugins.router.prefix import PrefixConfig, PrefixRouter

from ...service.fakes import MemoryExporter, in_loop
from .fakes import APIS, CHAT, RESPONSES, Backend, Exchange, before, body_for, hang, request_bytes, until


async def begun_and_kept(exchange: Exchange) -> None:
    """A stream that begins and goes on until the gateway hangs up."""
    await exchange.begin()
    await exchange.pieces(*exchange.stream[:3])
    await exchange.until_gone()


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@in_loop
async def test_an_answer_is_passed_on_byte_by_byte(path: str, stream: bool) -> None:
    a = Backend("a")
    async with before(a) as client:
        outcome = await client.ask(path, stream)
        said = Exchange.of(path, "a")
        assert outcome.body == (b"".join(said.stream) if stream else said.whole)
        assert (outcome.kind, outcome.headers["x-target"], outcome.headers["x-attempt"]) == ("answer", a.id, "1")
        assert (a.asked[0].path, json.loads(a.asked[0].body)) == (path, body_for(path, stream))


@in_loop
async def test_an_ollama_request_streams_unless_it_says_otherwise() -> None:
    async with before(Backend("a")) as client:
        body = {"model": "tiny:latest", "messages": [{"role": "user", "content": "hi"}]}
        status, headers, _ = await client.request("POST", "/api/chat", body)
        assert (status, headers["content-type"]) == (200, "application/x-ndjson")


@in_loop
async def test_a_target_gets_its_own_key_and_never_the_one_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TARGETS_KEY", "sesame")
    a, b = Backend("a"), Backend("b")
    async with before(a, b, key_env="TARGETS_KEY", server={"api_key": "for-clients"}) as client:
        assert (await client.ask()).status == 401
        for lines in (["Authorization: Bearer for-clients"], ["X-Api-Key: for-clients"]):
            assert (await client.ask(CHAT, True, *lines, "Cookie: a=b")).words == a.words
        sent = [*a.asked, *a.probed, *b.probed]
        assert {one.headers["authorization"] for one in sent} == {"Bearer sesame"}
        assert not any("for-clients" in value or "a=b" in value for one in sent for value in one.headers.values())


@in_loop
async def test_without_a_key_none_is_sent() -> None:
    a = Backend("a")
    async with before(a) as client:
        await client.ask(CHAT, True, "Authorization: Bearer of-the-client")
        assert "authorization" not in a.asked[0].headers


@in_loop
async def test_a_target_that_refuses_the_key_is_not_the_clients_fault() -> None:
    async def refuses(exchange: Exchange) -> None:
        await exchange.refuse(401, "invalid_api_key")

    async with before(Backend("a", [refuses])) as client:
        outcome = await client.ask()
        assert outcome.status == 502 and b"key_env" in outcome.body


@in_loop
async def test_the_name_and_the_trace_of_a_request_are_passed_on() -> None:
    exporter = MemoryExporter()
    a = Backend("a")
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with before(a, exporters=[exporter]) as client:
        await client.ask(CHAT, True, "X-Request-Id: mine", f"traceparent: {parent}")
        headers = a.asked[0].headers
        assert headers["x-request-id"] == "mine"
        assert headers["traceparent"].split("-")[1] == parent.split("-")[1]
        assert headers["traceparent"].split("-")[2] != parent.split("-")[2], "the target's parent is the gateway"


@in_loop
async def test_a_response_that_goes_on_from_a_stored_one_needs_one_target() -> None:
    a, b = Backend("a"), Backend("b")
    async with before(a, b) as client:
        outcome = await client.ask(RESPONSES, True, previous_response_id="resp_1")
        assert outcome.status == 400 and b"previous_response_id" in outcome.body
        assert (await client.ask(RESPONSES, True, previous_response_id=None)).words == a.words
    async with before(a) as client:
        assert (await client.ask(RESPONSES, True, previous_response_id="resp_1")).words == a.words


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@in_loop
async def test_draining_moves_what_has_not_begun(stream: bool) -> None:
    a, b = Backend("a", then=hang), Backend("b")
    async with before(a, b) as client:
        asked = [asyncio.create_task(client.ask(stream=stream)) for _ in range(3)]
        await until(lambda: len(a.asked) == 3)
        assert client.loads[0][0] == 3 and client.loads[0][1] > 0
        status, state = await client.post(f"/engine/fleet/drain?engine={a.id}")
        assert (status, [each["state"] for each in state["engines"]]) == (200, ["draining", "ready"])
        for outcome in await asyncio.gather(*asked):
            assert (outcome.kind, outcome.words, outcome.headers["x-attempt"]) == ("answer", b.words, "2")
        assert client.target(a).breaker.failures == 0, "it did not fail"


@in_loop
async def test_draining_leaves_what_has_begun_where_it_is() -> None:
    going_on = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.pieces(*exchange.stream[:3])
        await going_on.wait()
        await exchange.pieces(*exchange.stream[3:])
        await exchange.end()

    a, b = Backend("a", [slow]), Backend("b")
    async with before(a, b) as client:
        asked = asyncio.create_task(client.ask())
        await until(lambda: client.loads[0][2] > 0)  # it has a token
        assert (await client.post(f"/engine/fleet/drain?engine={a.id}"))[0] == 200
        going_on.set()
        assert (await asked).words == a.words and not b.asked


@in_loop
async def test_what_waits_at_the_last_target_is_not_taken_from_it() -> None:
    going_on = asyncio.Event()

    async def late(exchange: Exchange) -> None:
        await going_on.wait()
        await exchange.answer()

    a = Backend("a", then=late)
    async with before(a) as client:
        asked = asyncio.create_task(client.ask())
        await until(lambda: bool(a.asked))
        client.target(a).drain()
        going_on.set()
        outcome = await asked
        assert (outcome.words, outcome.headers["x-attempt"], len(a.asked)) == (a.words, "1", 1)


@in_loop
async def test_what_begins_while_it_is_told_to_leave_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaving:
        """A drain between the arrival of the first content and the request's own turn."""

        def fullmatch(self, piece: bytes) -> None:
            client.target(a).drain()

    async def cut_later(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.pieces(*exchange.stream[:3])
        exchange.cut()

    a, b = Backend("a", [cut_later]), Backend("b")
    async with before(a, b) as client:
        monkeypatch.setattr("engine.http.gateway.passing.COMMENTS", Leaving())
        outcome = await client.ask()
        assert (outcome.kind, outcome.words) == ("error", a.words[:2]) and not b.asked
        assert client.target(a).draining


@in_loop
async def test_a_shutdown_adds_nothing_to_a_stream_that_is_whole() -> None:
    async def stays_open(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.pieces(*exchange.stream)
        await exchange.until_gone()

    a = Backend("a", then=stays_open)
    async with before(a) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.gateway.port)
        writer.write(request_bytes("POST", CHAT, body_for(CHAT, True)))
        await reader.readuntil(b"[DONE]\n\n\r\n")
        client.gateway.signalled()
        client.gateway.signalled()
        await client.gateway._drain()
        assert await reader.read() == b"0\r\n\r\n"
        writer.close()


@in_loop
async def test_requests_in_flight_are_told_when_the_gateway_ends() -> None:
    a = Backend("a", then=begun_and_kept)
    async with before(a) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.gateway.port)
        writer.write(request_bytes("POST", CHAT, body_for(CHAT, True)))
        await reader.readuntil(b"a1")
        client.gateway.signalled()
        client.gateway.signalled()
        await client.gateway._drain()
        rest = await reader.read()
        assert b'"code":"shutdown"' in rest and rest.endswith(b"0\r\n\r\n")
        writer.close()


class Recorded:
    """A router that sends requests where it is told to, and keeps what it was shown."""

    def __init__(self, route: Route | None = None) -> None:
        self.route = route
        self.requests: list[ApiRequest] = []
        self.fleets: list[tuple[EngineView, ...]] = []
        self.sent: list[str] = []

    def place(self, request: ApiRequest, fleet: tuple[EngineView, ...]) -> Route:
        self.requests.append(request)
        self.fleets.append(fleet)
        return self.route or Attempts((fleet[-1].engine_id,), "the\nlast")

    def begun(self, request: ApiRequest, engine_id: str) -> None:
        self.sent.append(engine_id)

    def finished(self, request: ApiRequest, answer: Answer) -> None: ...


@in_loop
async def test_the_router_decides_and_is_told_where_a_request_went() -> None:
    router = Recorded()

    async def full(exchange: Exchange) -> None:
        await exchange.refuse(503, "full")

    a, b = Backend("a"), Backend("b", [full])
    async with before(a, b, make_router=lambda: router) as client:
        outcome = await client.ask(temperature=0.5, n=2, user="me")
        assert (outcome.headers["x-target"], router.sent) == (a.id, [b.id, a.id])
        assert "x-route-reason" not in outcome.headers, "the reason was for the other one"
        outcome = await client.ask()
        assert (outcome.headers["x-target"], outcome.headers["x-route-reason"]) == (b.id, "the last")
        request = router.requests[0]
        assert (request.kind, request.model, request.n, request.stream) == ("chat", "tiny", 2, True)
        assert request.fields["temperature"] == 0.5 and "messages" not in request.fields
        assert [view.engine_id for view in router.fleets[0]] == [a.id, b.id]


@in_loop
async def test_a_reason_that_no_header_can_have_is_left_out() -> None:
    a = Backend("a")
    async with before(a, make_router=lambda: Recorded(Attempts((a.id,), "odd\x00"))) as client:
        outcome = await client.ask()
        assert outcome.words == a.words and "x-route-reason" not in outcome.headers


@pytest.mark.parametrize(
    ("route", "status", "code"),
    [
        (Reject(429, "not now", 9), 429, None),
        (ToUrl("http://127.0.0.1:1"), 500, "router_failed"),
        (Attempts(("nobody",)), 500, "router_failed"),
    ],
)
@in_loop
async def test_what_a_router_refuses_or_gets_wrong_is_sent_nowhere(route: Any, status: int, code: str | None) -> None:
    a = Backend("a")
    async with before(a, make_router=lambda: Recorded(route)) as client:
        outcome = await client.ask()
        assert outcome.status == status and not a.asked
        assert code is None or json.loads(outcome.body)["error"]["code"] == code


@in_loop
async def test_equal_prompts_go_where_the_first_one_went() -> None:
    a, b = Backend("a"), Backend("b")

    def conversation(name: str, length: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{name} says something long " * 40} for _ in range(length)]

    async with before(a, b, make_router=lambda: PrefixRouter(PrefixConfig(), build_context())) as client:
        places = {}
        for name in ("anna", "ben", "clara", "dora"):
            places[name] = (await client.ask(messages=conversation(name, 1))).headers["x-target"]
        assert set(places.values()) == {a.id, b.id}, "they take turns"
        for length in (2, 3):
            for name, place in places.items():
                assert (await client.ask(messages=conversation(name, length))).headers["x-target"] == place


@pytest.mark.parametrize(
    ("piece", "only"),
    [
        (b": keepalive\n", True),
        (b": keepalive\n\n: keepalive\n\n", True),
        (b"\r\n", True),
        (b": keepal", False),
        (b": keepalive\n\ndata: {}\n\n", False),
        (b"data: {}\n\n", False),
        (b"", False),
    ],
)
def test_only_whole_comments_are_no_beginning(piece: bytes, only: bool) -> None:
    assert (COMMENTS.fullmatch(piece) is not None) is only
