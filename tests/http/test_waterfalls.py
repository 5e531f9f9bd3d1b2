"""``/engine/requests``, over a scripted engine."""

from __future__ import annotations

import json
import select
import socket
import time
from types import SimpleNamespace

import pytest

from engine.contracts.events import ProxiedEvent, RequestEvent, RequestParameters
from engine.contracts.router import ToUrl
from engine.http.sse import RWND_LIMITED, unread_s
from engine.service.timings import SPANS
from engine.service.trace_context import trace_context
from tests.http.fakes import chat, running
from tests.http.test_openai_client import in_loop
from tests.service.strict_chrome_trace import read

CHAT = "/v1/chat/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@in_loop
async def test_a_request_is_found_by_the_id_of_its_response() -> None:
    async with running() as server:
        _, _, data = await server.post(CHAT, chat())
        name = json.loads(data)["id"]
        status, _, shown = await server.get(f"/engine/requests/{name}")
        (sequence,) = json.loads(shown)["sequences"]
        assert status == 200 and sequence["request_id"] == f"{name}-0"
        assert tuple(span["name"] for span in sequence["spans"]) == SPANS
        total = sum(span["ms"] for span in sequence["spans"]) + sequence["unattributed_ms"]
        assert total == pytest.approx(sequence["total_ms"], abs=0.01)
        _, _, listed = await server.get("/engine/requests?count=1")
        (one,) = json.loads(listed)["requests"]
        assert one["request_id"] == f"{name}-0" and set(one["spans"]) == set(SPANS)
        _, _, trace = await server.get(f"/engine/requests/{name}?format=chrome")
        assert len(read(trace)) == 1, "the scripted engine has no steps"


@in_loop
async def test_a_stream_counts_what_writing_took() -> None:
    async with running() as server:
        await server.post(CHAT, chat(stream=True))
        events = server.server.state.bus.settled(lambda: list(server.exporter.events))
        (request,) = [event for event in events if isinstance(event, RequestEvent)]
        assert request.write_ms >= request.last_write_ms > 0


def test_a_client_that_does_not_read_is_seen_though_nothing_waits_in_the_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.getsockname())
        connection, _ = server.accept()
        with connection:
            counts = len(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RWND_LIMITED + 8))
            if counts < RWND_LIMITED + 8:
                pytest.skip("the system does not count how long a receive buffer was full")
            transport = SimpleNamespace(get_extra_info={"socket": connection}.get)
            before = unread_s(transport)  # type: ignore[arg-type]
            connection.sendall(b"x" * 65536)  # returns at once: the system takes it
            until = time.monotonic() + 10.0
            while unread_s(transport) == before and time.monotonic() < until:  # type: ignore[arg-type]
                select.select([], [], [], 0.01)
            assert unread_s(transport) > before == 0.0  # type: ignore[arg-type]
    assert unread_s(None) == 0.0


@in_loop
async def test_a_trace_context_travels_with_the_event() -> None:
    async with running() as server:
        await server.post(CHAT, chat(), f"traceparent: {PARENT}")
        await server.post(CHAT, chat(), "traceparent: 00-nonsense")
        events = server.server.state.bus.settled(lambda: list(server.exporter.events))
        found = [event.traceparent for event in events if isinstance(event, RequestEvent)]
        assert found == [PARENT, ""]


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/engine/requests/cmpl-unknown", 404, "No request of this id"),
        ("/engine/requests?count=0", 400, "count='0': expected a number from 1 to 1024"),
        ("/engine/requests?count=9999", 400, "count='9999': expected a number"),
        ("/engine/requests?count=%C2%B2", 400, "expected a number"),
        ("/engine/requests/cmpl-a?format=otlp", 400, "format='otlp': expected json or chrome"),
    ],
)
@in_loop
async def test_what_makes_no_sense_is_refused(path: str, status: int, says: str) -> None:
    async with running() as server:
        found, _, data = await server.get(path)
        assert found == status and says in json.loads(data)["error"]["message"]


@in_loop
async def test_the_requests_say_how_far_back_none_of_them_is_missing() -> None:
    async with running() as server:
        server.server.state.waterfalls._max_requests = 2
        covers = []
        for _ in range(4):
            assert (await server.post(CHAT, chat()))[0] == 200
            covers.append(json.loads((await server.get("/engine/requests?order=total&within_s=300"))[2]))
        assert [len(each["requests"]) for each in covers] == [1, 2, 2, 2]
        assert [each["covers_s"] is None for each in covers] == [True, True, False, False]
        assert all(each["ended_s_ago"] <= covers[-1]["covers_s"] for each in covers[-1]["requests"])


@in_loop
async def test_a_prompt_says_what_kept_it_out_of_the_prefix_cache() -> None:
    async with running() as server:
        names = []
        for time in ("09:15", "10:02"):
            _, _, data = await server.post(CHAT, chat(f"{time}. " + "The manual says this. " * 8))
            names.append(json.loads(data)["id"])
        shown = [json.loads((await server.get(f"/engine/requests/{name}"))[2])["sequences"][0] for name in names]
        assert shown[0]["prefix"] == {"kind": "first", "why": "no prompt of the same cache_salt came before it"}
        assert shown[1]["prefix"]["nearest"] == f"{names[0]}-0"
        assert shown[1]["prefix"]["why"].startswith("a number, date or time differs")


@in_loop
async def test_a_client_that_sent_a_trace_learns_which_span_is_its_request() -> None:
    async with running() as server:
        _, headers, _ = await server.post(CHAT, chat(n=2), f"traceparent: {PARENT}")
        events = server.server.state.bus.settled(lambda: list(server.exporter.events))
        spans = sorted(event.span_id for event in events if isinstance(event, RequestEvent))
        assert headers["traceresponse"] == f"{PARENT[:36]}{spans[1]}-01" and spans[0] == "" != spans[1]
        _, headers, _ = await server.post(CHAT, chat(), "traceparent: 00-nonsense")
        assert "traceresponse" not in headers


@in_loop
async def test_an_event_says_what_was_asked_for() -> None:
    async with running() as server:
        await server.post(CHAT, chat(stream=True, temperature=0.5, top_p=0.9, seed=3))
        events = server.server.state.bus.settled(lambda: list(server.exporter.events))
        (request,) = [event for event in events if isinstance(event, RequestEvent)]
        assert request.parameters == RequestParameters("chat", True, 1, 0.5, 0.9, 0, request.parameters.seed)


@in_loop
async def test_a_request_passed_on_is_the_parent_of_what_the_other_server_does() -> None:
    async with running() as other, running() as server:
        server.router.decision = ToUrl(f"http://user:key@127.0.0.1:{other.server.port}/v1")
        _, headers, _ = await server.post(CHAT, chat(), f"traceparent: {PARENT}", "tracestate: a=1,b=2")
        (passed,) = server.server.state.bus.settled(lambda: list(server.exporter.events))
        assert isinstance(passed, ProxiedEvent) and (passed.status, passed.traceparent) == (200, PARENT)
        assert passed.server == f"127.0.0.1:{other.server.port}" and passed.total_ms > 0
        events = other.server.state.bus.settled(lambda: list(other.exporter.events))
        (request,) = [event for event in events if isinstance(event, RequestEvent)]
        assert request.traceparent == headers["traceresponse"] == f"{PARENT[:36]}{passed.span_id}-01"


@pytest.mark.parametrize(
    ("sent", "passed_on"), [(["a=1", "b=2"], "a=1,b=2"), ([], ""), (["\udcff"], ""), (["x" * 513], "")]
)
def test_the_state_of_a_trace_is_passed_on_if_it_is_plain_text(sent: list[str], passed_on: str) -> None:
    assert trace_context([PARENT], sent).headers().get("tracestate", "") == passed_on
    assert trace_context([], sent).headers() == {}


@in_loop
async def test_a_request_that_cannot_be_passed_on_is_told_with_its_status() -> None:
    async with running() as server:
        server.router.decision = ToUrl("http://127.0.0.1:9")
        await server.post(CHAT, chat())
        (passed,) = [
            event
            for event in server.server.state.bus.settled(lambda: list(server.exporter.events))
            if isinstance(event, ProxiedEvent)
        ]
        assert (passed.status, passed.traceparent, passed.span_id) == (502, "", "")
