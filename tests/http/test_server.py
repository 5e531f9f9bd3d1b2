"""Connections, refusals, death and shutdown of a listening server."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from dataclasses import replace
from typing import Any

import pytest
import structlog

from engine.contracts.events import RejectedEvent, RequestEvent
from engine.contracts.router import Answer, Reject, ToUrl
from engine.http import bodies
from engine.http.server import Server
from engine.loop.messages import CauseOfDeath, Failed
from engine.machine import MachineTimes, Meter
from engine.service.parsing import parse_messages

from ..service.fakes import (
    MAX_LEN,
    MODEL,
    TEMPLATE,
    DirectRouter,
    MemoryExporter,
    ScriptedClient,
    in_loop,
    make_plan,
    make_tokenizer,
    says,
)
from .fakes import Running, chat, completion, events_of, running

CHAT = "/v1/chat/completions"
ROUTES = [
    ("POST", CHAT),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/resp_1"),
    ("DELETE", "/v1/responses/resp_1"),
    ("GET", "/v1/responses/resp_1/input_items"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/api/chat"),
    ("POST", "/api/generate"),
    ("POST", "/api/show"),
    ("GET", "/api/tags"),
    ("GET", "/api/version"),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/engine/plan"),
    ("GET", "/engine/latency"),
    ("GET", "/engine/history"),
    ("GET", "/engine/stats"),
    ("GET", "/engine/expert_load"),
    ("GET", "/engine/fleet"),
    ("POST", "/engine/fleet/drain"),
    ("POST", "/engine/fleet/undrain"),
    ("POST", "/engine/fleet/restart"),
    ("POST", "/engine/fleet/resize"),
    ("GET", "/engine/findings"),
    ("POST", "/engine/findings/doctor"),
    ("GET", "/ui"),
    ("GET", "/ui/"),
    ("GET", "/ui/app.js"),
]


async def open_stream(server: Running, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.server.port)
    data = json.dumps(body).encode()
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    return reader, writer


def error_of(data: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(data)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@in_loop
async def test_a_stream_has_the_headers_that_proxies_need_and_no_ids() -> None:
    async with running() as server:
        status, headers, data = await server.post(CHAT, chat(stream=True), "X-Request-Id: my-id\tx")
        assert status == 200
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert (headers["x-accel-buffering"], headers["cache-control"]) == ("no", "no-cache")
        assert headers["x-request-id"] == "my-idx"
        assert b"\nid:" not in data and not data.startswith(b"id:")
        events = events_of(data)
        assert [e["choices"][0]["delta"].get("role") for e in events].count("assistant") == 1
        assert data.count(b"[DONE]") == 1


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_a_client_that_goes_away_aborts_all_its_sequences(stream: bool) -> None:
    async with running() as server:
        server.client.hold_before = 3
        _, writer = await open_stream(server, chat(stream=stream, n=2))
        await server.client.holding.wait()
        writer.transport.abort()
        while len(server.client.aborted) < 2:
            server.client.abort_seen.clear()
            await server.client.abort_seen.wait()
        assert {name for name, _ in server.client.aborted} == {r.request_id for r in server.client.requests}
        assert await server.server.state.admission.until_idle(5)
        events = server.server.state.bus.settled(lambda: list(server.exporter.events))
        assert [e.finish_reason for e in events if isinstance(e, RequestEvent)] == ["abort", "abort"]
        assert server.router.answers == []


@in_loop
async def test_silence_is_filled_with_comments() -> None:
    async with running(keepalive_s=0.01) as server:
        server.client.hold_before = 0
        reader, writer = await open_stream(server, chat(stream=True))
        await reader.readuntil(b": keepalive\n")
        await reader.readuntil(b": keepalive\n")
        server.client.proceeding.set()
        await reader.readuntil(b"data: [DONE]\n\n")
        writer.close()


@in_loop
async def test_a_full_server_refuses_before_it_reads_and_says_when_to_come_back() -> None:
    async with running(max_queue=1) as server:
        server.client.hold_before = 1
        first = asyncio.create_task(server.post(CHAT, chat()))
        await server.client.holding.wait()
        status, headers, data = await server.post(CHAT, b"not even json")
        assert status == 429 and 1 <= int(headers["retry-after"]) <= 30
        assert error_of(data)["type"] == "rate_limit_error"
        events = server.server.state.bus.settled(lambda: list(server.exporter.events))
        assert [(e.status, e.reason) for e in events if isinstance(e, RejectedEvent)] == [(429, "queue_full")]
        server.client.proceeding.set()
        assert (await first)[0] == 200
        assert (await server.post(CHAT, chat()))[0] == 200


@in_loop
async def test_every_route_but_health_needs_the_key() -> None:
    async with running(api_key="sésame") as server:
        good = "Authorization: Bearer " + "sésame".encode().decode("latin-1")
        own = "x-api-key: " + "sésame".encode().decode("latin-1")
        wrong = [
            "X-None: 1",
            "Authorization: Bearer",
            "Authorization: Bearer sesame",
            "Authorization: Bearer s\u00ff",
            "Authorization: bearer s",
            good + "x",
            good + "\r\n" + good,
            "x-api-key: sesame",
            "x-api-key: Bearer " + "sésame".encode().decode("latin-1"),
            own + "\r\n" + own,
            own + "\r\n" + good + "\r\n" + good,
            "Host: x/health?",
        ]
        for method, path in [*ROUTES, ("GET", "/nowhere"), ("PUT", CHAT), ("GET", "//v1/models"), ("GET", "/health/")]:
            for header in wrong:
                status, _, data = await server.post(path, b"", header, method=method)
                why = b"authentication_error" if path.startswith("/v1/messages") else b'"code":"invalid_api_key"'
                why = b"API key" if path.startswith("/api") else why
                assert status == 401 and why in data, (path, header)
            for right in (good, own, own + "\r\n" + good, own + "\r\nAuthorization: Bearer of-a-gateway"):
                assert (await server.post(path, b"", right, method=method))[0] != 401
        assert (await server.get("/health"))[0] == (await server.get("/ready"))[0] == (await server.get("/"))[0] == 200


@in_loop
async def test_a_keyless_loopback_server_answers_to_local_names_only() -> None:
    async with running() as server:
        for host in (
            "evil.example",
            "localhost:80.evil.com",
            "localhost.evil.com",
            "127.0.0.1.evil.com",
            "[::1].evil.com",
        ):
            assert (await server.get("/v1/models", f"Host: {host}"))[0] == 403, host
        assert (await server.get("/v1/models", "Host: 127.0.0.1:1"))[0] == 200
        for host in ("[::1]:1", "localhost:1", "a.localhost"):
            assert (await server.get("/v1/models", f"Host: {host}"))[0] == 200, host


@in_loop
async def test_wrong_requests_get_json_errors() -> None:
    async with running(max_body_bytes=1000) as server:
        cases = [
            (await server.get("/nowhere"), 404),
            (await server.get(CHAT), 405),
            (await server.post(CHAT, b"x" * 1001), 413),
            (await server.post(CHAT, chat(), "Content-Encoding: gzip"), 415),
            (await server.post(CHAT, chat(), "Origin: http://x", "Content-Type: text/plain"), 415),
            (await server.post(CHAT, b"{"), 400),
        ]
        for (status, headers, data), expected in cases:
            assert status == expected
            assert headers["content-type"].startswith("application/json") and error_of(data)["message"]
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += b"Transfer-Encoding: chunked\r\n\r\n"
        reply = await server.raw(head + b"800\r\n" + b"x" * 2048 + b"\r\n0\r\n\r\n")
        assert b" 413 " in reply.split(b"\r\n")[0]


@in_loop
async def test_text_becomes_tokens_and_back() -> None:
    async with running() as server:
        _, _, data = await server.post("/tokenize", {"prompt": "hé"})
        tokens = json.loads(data)
        assert (tokens["count"], tokens["tokens"]) == (3, list("hé".encode()))
        assert tokens["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
        _, _, data = await server.post("/detokenize", {"tokens": tokens["tokens"]})
        assert json.loads(data) == {"prompt": "hé"}
        assert (await server.post("/detokenize", {"tokens": [10**6]}))[0] == 400
        assert (await server.post("/tokenize", {}))[0] == 400
        _, _, data = await server.post("/tokenize", {"messages": chat()["messages"]})
        assert json.loads(data)["count"] == len(make_tokenizer().encode_chat_now(parse_messages(chat()["messages"])))


@in_loop
async def test_the_server_says_what_clients_look_for_at_first() -> None:
    async with running() as server:
        for method in ("GET", "HEAD"):
            assert (await server.post("/", b"", method=method))[0] == 200
        _, _, data = await server.get("/version")
        assert json.loads(data) == {"version": "0"}
        _, _, data = await server.get("/tokenizer_info")
        found = json.loads(data)
        assert found.items() >= {
            "eos_token": "<|end|>", "bos_token": None, "chat_template": TEMPLATE, "model_max_length": MAX_LEN,
        }.items()  # fmt: skip


@in_loop
async def test_observability_routes_answer_and_hide_the_key() -> None:
    async with running(api_key="hush") as server:
        key = "Authorization: Bearer hush"
        assert (await server.post(CHAT, chat(), key))[0] == 200
        status, headers, data = await server.get("/metrics", key)
        # 12 tokens: one first, eleven later, one request.
        assert (status, data) == (200, b"engine_events_total 13\n") and headers["content-type"].startswith("text/plain")
        _, _, data = await server.get("/engine/plan", key)
        assert b"hush" not in data and json.loads(data)["plan"]["settings"]["server"]["api_key"] == "***"
        assert json.loads(data)["engine"]["block_size"] == 16
        _, _, data = await server.get("/engine/latency", key)
        assert json.loads(data)["ttft_ms"]["count"] == 1


@in_loop
async def test_whatever_is_said_of_an_engine_names_it() -> None:
    async with running() as server:
        assert (await server.post(CHAT, chat()))[0] == 200

        async def said(path: str) -> Any:
            return json.loads((await server.get(path))[2])

        for path in ("/ready", "/engine/stats", "/engine/latency", "/engine/history", "/engine/counters"):
            assert (await said(path))["engine"] == "default", path
        assert (await said("/engine/plan"))["id"] == "default"
        (request,) = (await said("/engine/requests"))["requests"]
        (sequence,) = (await said(f"/engine/requests/{request['request_id']}"))["sequences"]
        assert request["engine"] == sequence["engine"] == "default"


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("rank_failed", "A rank of the engine failed"),
        ("device_failed", "The engine's device failed"),
        ("plugin_failed", "A plugin of the engine failed"),
        ("engine_stalled", "The engine hung and was ended"),
    ],
)
@in_loop
async def test_clients_hear_what_an_engine_died_of_and_nothing_of_its_innards(cause: CauseOfDeath, words: str) -> None:
    async with running() as server:
        server.client.hold_before = 3
        reader, _ = await open_stream(server, chat(stream=True))
        await server.client.holding.wait()
        server.client.deliver(Failed("rank 1 (pid 4711) ended with signal 9", cause=cause))
        rest = await reader.readuntil(b"data: [DONE]\n\n")
        assert f'"message":"{words} while it worked on this request; it is being restarted."'.encode() in rest
        assert f'"code":"{cause}"'.encode() in rest and b"4711" not in rest


@in_loop
async def test_the_engine_dies_under_a_stream_and_the_listener_stays() -> None:
    async with running() as server:
        server.client.hold_before = 3
        reader, writer = await open_stream(server, chat(stream=True))
        await server.client.holding.wait()
        await reader.readuntil(b'"content":"e"')
        whole = asyncio.create_task(server.post(CHAT, chat()))
        while len(server.client.requests) < 2:
            await asyncio.sleep(0)
        watch = asyncio.create_task(server.server.state.engine.supervisor.watch())
        server.client.die()
        rest = await reader.readuntil(b"data: [DONE]\n\n")
        assert b'"code":"engine_dead"' in rest and b'finish_reason":"stop' not in rest
        status, headers, data = await whole
        assert (status, error_of(data)["code"]) == (503, "engine_dead") and "retry-after" in headers
        assert (await server.get("/ready"))[0] == 503
        assert (await server.get("/health"))[0] == 200
        assert (await server.post(CHAT, chat()))[0] == 503
        server.client.hold_before = None
        while not server.client.alive:
            await asyncio.sleep(0.01)
        assert (await server.post(CHAT, chat()))[0] == 200
        watch.cancel()
        writer.close()


async def signalled_server(**settings: float) -> tuple[Running, asyncio.Task[int], list[str]]:
    lines: list[str] = []
    client, router, exporter = ScriptedClient(), DirectRouter(), MemoryExporter()
    plan = make_plan(**settings)
    server = Server(plan, {"default": client}, router, [exporter], make_tokenizer(), say=lines.append)
    task = asyncio.create_task(server.run())
    while not any(line.startswith("ready") for line in lines):
        await asyncio.sleep(0.001)
    return Running(server, client, router, exporter), task, lines


@in_loop
async def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones() -> None:
    server, task, lines = await signalled_server(drain_s=10)
    assert lines[0] == "starting: engine process" and lines[1].startswith("starting: loading weights")
    server.client.hold_before = 2
    running_request = asyncio.create_task(server.post(CHAT, chat()))
    await server.client.holding.wait()
    signal.raise_signal(signal.SIGTERM)
    while not server.server.state.admission.draining:
        await asyncio.sleep(0)
    status, headers, data = await server.post(CHAT, chat())
    assert (status, error_of(data)["code"]) == (503, "draining") and "retry-after" in headers
    assert headers["connection"] == "close"
    assert (await server.get("/ready"))[0] == 503
    server.client.proceeding.set()
    status, _, data = await running_request
    assert status == 200 and json.loads(data)["choices"][0]["message"]["content"] == "Hello world"
    assert await task == 0 and server.exporter.closed


@in_loop
async def test_a_lame_duck_is_not_ready_and_takes_requests_until_it_drains() -> None:
    server, task, lines = await signalled_server(drain_s=10, lame_duck_s=0.3)
    server.client.hold_before = 2
    running_request = asyncio.create_task(server.post(CHAT, chat()))
    await server.client.holding.wait()
    signal.raise_signal(signal.SIGTERM)
    while not server.server.state.admission.lame_duck:
        await asyncio.sleep(0)
    status, headers, data = await server.get("/ready")
    assert (status, headers["connection"]) == (503, "close") and "draining" in error_of(data)["message"]
    assert (await server.get("/health"))[0] == 200
    server.client.hold_before = None
    status, headers, data = await server.post(CHAT, chat())
    assert (status, headers["connection"]) == (200, "close")
    assert json.loads(data)["choices"][0]["message"]["content"] == "Hello world"
    assert not server.server.state.admission.draining, "that was within the time"
    while not server.server.state.admission.draining:
        await asyncio.sleep(0.01)
    assert error_of((await server.post(CHAT, chat()))[2])["code"] == "draining"
    assert (await server.get("/ready"))[0] == 503
    server.client.proceeding.set()
    assert (await running_request)[0] == 200
    assert await task == 0
    said = [line.split(":")[0] for line in lines]
    assert said[-2:] == ["lame duck", "draining"]


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)])
@in_loop
async def test_a_second_signal_waits_for_nothing(signals: tuple[signal.Signals, ...]) -> None:
    server, task, _ = await signalled_server(drain_s=60, lame_duck_s=60)
    server.client.hold_before = 2
    running_request = asyncio.create_task(server.post(CHAT, chat()))
    await server.client.holding.wait()
    for number in signals:
        signal.raise_signal(number)
        await asyncio.sleep(0.01)
    status, _, data = await running_request
    assert (status, error_of(data)["code"]) == (503, "shutdown")
    assert await task == 0


@in_loop
async def test_ctrl_c_waits_for_what_runs_and_takes_nothing_more() -> None:
    server, task, _ = await signalled_server(drain_s=60, lame_duck_s=60)
    server.client.hold_before = 2
    running_request = asyncio.create_task(server.post(CHAT, chat()))
    await server.client.holding.wait()
    signal.raise_signal(signal.SIGINT)
    while not server.server.state.admission.draining:
        await asyncio.sleep(0)
    assert error_of((await server.post(CHAT, chat()))[2])["code"] == "draining"
    server.client.proceeding.set()
    assert (await running_request)[0] == 200
    assert await task == 0


READINGS = {
    True: MachineTimes(10.0, 2, ran_s=6.0, waited_s=4.0, others_s=10.0, stolen_s=0.0),
    False: MachineTimes(10.0, 2, ran_s=9.9, waited_s=0.1, others_s=10.0, stolen_s=0.0),
}


@pytest.mark.parametrize("is_busy", [True, False])
@in_loop
async def test_a_start_on_a_busy_machine_says_so(is_busy: bool) -> None:
    readings = iter([MachineTimes(0.0, 2, 0.0, 0.0, 0.0, 0.0), READINGS[is_busy]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Meter, "read", lambda meter: next(readings))
        _, task, lines = await signalled_server(drain_s=1)
    note = "note: this machine is busy: while it started, the engine spent 40% of its time without a core, others used "
    assert [line for line in lines if "busy" in line] == [f"{note}1.0 of 2 CPUs"] * is_busy
    signal.raise_signal(signal.SIGTERM)
    assert await task == 0


@in_loop
async def test_the_engines_state_tells_what_its_threads_waited() -> None:
    async with running() as server:
        stats = json.loads((await server.get("/engine/stats"))[2])
        said = stats["machine"]
        assert said["cpus"] >= 1 and said["ran_s"] > 0.0 and said["waited_s"] >= 0.0 and said["at_s"] > 0.0


@pytest.mark.parametrize("second_signal", [True, False])
@in_loop
async def test_what_does_not_finish_in_time_ends_in_an_error_event(second_signal: bool) -> None:
    server, task, _ = await signalled_server(drain_s=60 if second_signal else 0.01)
    server.client.hold_before = 2
    reader, writer = await open_stream(server, chat(stream=True))
    await reader.readuntil(b'"content":"e"')
    whole = asyncio.create_task(server.post(CHAT, chat()))
    while len(server.client.requests) < 2:
        await asyncio.sleep(0)
    signal.raise_signal(signal.SIGTERM)
    if second_signal:
        signal.raise_signal(signal.SIGTERM)
    rest = await reader.readuntil(b"data: [DONE]\n\n")
    assert b'"code":"shutdown"' in rest
    assert (await whole)[0] == 503
    assert await task == 0
    assert {reason for _, reason in server.client.aborted} == {"abort"}
    writer.close()


@in_loop
async def test_an_engine_that_hangs_gets_no_request() -> None:
    async with running() as server:
        assert (await server.post(CHAT, chat()))[0] == 200
        supervisor = server.server.state.engine.supervisor
        supervisor._silent_s = 60.0  # the engine process is there, and answers nothing
        status, headers, data = await server.post(CHAT, chat())
        assert (status, error_of(data)["code"]) == (503, "not_ready") and "retry-after" in headers
        assert len(server.client.requests) == 1


@in_loop
async def test_an_engine_that_cannot_start_ends_the_server_with_its_words() -> None:
    lines: list[str] = []
    client = ScriptedClient()
    client.fail_starts = 1
    server = Server(make_plan(), {"default": client}, DirectRouter(), [], make_tokenizer(), say=lines.append)
    assert await server.run() == 1
    assert "no memory left" in lines[-1]


@in_loop
async def test_a_port_in_use_is_named() -> None:
    async with running() as other:
        lines: list[str] = []
        plan = make_plan(port=other.server.port)
        assert (
            await Server(
                plan, {"default": ScriptedClient()}, DirectRouter(), [], make_tokenizer(), say=lines.append
            ).run()
            == 1
        )
        assert f"server.port={other.server.port}" in lines[0] and lines[0].endswith("Choose another server.port.")


@in_loop
async def test_a_host_that_is_not_here_is_named() -> None:
    lines: list[str] = []
    plan = make_plan(host="192.0.2.1", api_key="k")
    assert (
        await Server(plan, {"default": ScriptedClient()}, DirectRouter(), [], make_tokenizer(), say=lines.append).run()
        == 1
    )
    assert "server.host=192.0.2.1" in lines[0] and lines[0].endswith("Choose another server.host.")


@in_loop
async def test_a_stored_answer_is_served_like_the_generated_one() -> None:
    async with running() as server:
        for fields in ({}, {"stop": "wor"}, {"stream": True}):
            body = completion(logprobs=1, n=2, **fields)
            server.router.decision = type(server.router)().decision
            _, _, generated = await server.post("/v1/completions", body)
            sent = len(server.client.requests)
            server.router.decision = server.router.answers[-1]
            assert isinstance(server.router.decision, Answer)
            status, _, stored = await server.post("/v1/completions", body)
            assert status == 200 and len(server.client.requests) == sent
            assert texts(stored) == texts(generated)


def texts(data: bytes) -> dict[int, tuple[str, str]]:
    bodies = events_of(data) if data.startswith(b"data:") else [json.loads(data)]
    found: dict[int, tuple[str, str]] = {}
    for choice in (choice for body in bodies for choice in body["choices"]):
        text, reason = found.get(choice["index"], ("", ""))
        found[choice["index"]] = (text + choice["text"], reason + (choice["finish_reason"] or ""))
    return found


@in_loop
async def test_a_router_can_refuse_and_its_failure_is_only_this_request() -> None:
    async with running() as server:
        server.router.decision = Reject(429, "over quota", 300)
        status, headers, data = await server.post(CHAT, chat())
        assert (status, headers["retry-after"], error_of(data)["message"]) == (429, "30", "over quota")
        server.router.decision = ValueError("/secret/path")
        status, _, data = await server.post(CHAT, chat())
        assert status == 500 and b"secret" not in data


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_a_request_routed_elsewhere_is_passed_through(stream: bool) -> None:
    async with running(says("from afar")) as other, running() as server:
        for base in (other.url, other.url + "/v1/"):
            server.router.decision = ToUrl(base)
            status, headers, data = await server.post(CHAT, chat(stream=stream))
            assert status == 200 and (b"data: [DONE]" in data) == stream
            assert headers["content-type"].startswith("text/event-stream" if stream else "application/json")
        status, _, data = await server.post(CHAT, chat(temperature=1, max_tokens=200, stream=stream))
        other.client.hold_before = 1
        other.client.holding.clear()
        task = asyncio.create_task(server.post(CHAT, chat(stream=stream)))
        await other.client.holding.wait()
        other.client.die()
        status, _, data = await task
        assert b"engine_dead" in data and (stream or status == 503)
        server.router.decision = ToUrl("http://127.0.0.1:1")
        status, _, data = await server.post(CHAT, chat(stream=stream))
        assert (status, error_of(data)["code"]) == (502, "bad_gateway")


@pytest.mark.parametrize(
    ("path", "body", "ends"),
    [
        ("/v1/responses", {"input": "hi"}, "response.completed"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}, "message_stop"),
    ],
)
@in_loop
async def test_every_api_is_passed_through_to_its_own_path(path: str, body: dict[str, Any], ends: str) -> None:
    async with running(says("from afar")) as other, running() as server:
        for base in (other.url, other.url + "/v1/"):
            server.router.decision = ToUrl(base)
            status, _, data = await server.post(path, body)
            assert status == 200 and b"from afar" in data
            status, headers, data = await server.post(path, body | {"stream": True})
            assert headers["content-type"].startswith("text/event-stream")
            assert f"event: {ends}\ndata: ".encode() in data
        other.client.hold_before = 1
        other.client.holding.clear()
        task = asyncio.create_task(server.post(path, body | {"stream": True}))
        await other.client.holding.wait()
        other.client.die()
        _, _, data = await task
        assert b"event: error\ndata: " in data or b"event: response.failed\ndata: " in data
        server.router.decision = ToUrl("http://127.0.0.1:1")
        status, _, data = await server.post(path, body)
        assert status == 502 and b"did not answer" in data


@in_loop
async def test_a_stream_of_lines_is_passed_through_and_ends_in_a_line_when_it_breaks_off() -> None:
    async with running(says("from afar")) as other, running() as server:
        server.router.decision = ToUrl(other.url + "/v1")
        _, headers, data = await server.post("/api/generate", {"prompt": "hi"})
        assert headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in data.splitlines()]
        assert "".join(line["response"] for line in lines) == "from afar" and lines[-1]["done"]
        server.router.decision = ToUrl("http://127.0.0.1:1")
        status, _, data = await server.post("/api/generate", {"prompt": "hi"})
        assert (status, json.loads(data).keys()) == (502, {"error"})


@in_loop
async def test_an_engine_that_dies_after_a_comment_ends_the_stream_with_an_error() -> None:
    async with running(keepalive_s=0.01) as server:
        server.client.hold_before = 0
        reader, writer = await open_stream(server, chat(stream=True))
        await reader.readuntil(b": keepalive\n")
        server.client.die()
        assert b'"code":"engine_dead"' in await reader.readuntil(b"data: [DONE]\n\n")
        writer.close()


@in_loop
async def test_a_body_that_does_not_arrive_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.02)
    async with running() as server:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 100\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", server.server.port)
        writer.write(head.encode() + b"{")
        assert b" 408 " in await reader.readline()
        writer.close()


@in_loop
async def test_logs_hold_neither_prompts_nor_what_clients_make_up() -> None:
    with structlog.testing.capture_logs() as logs:
        async with running() as server:
            await server.post(CHAT, chat("SECRET"), "X-Request-Id: a\t{\xe9}SECRET2")
            await server.post("/v1/completions", completion("SECRET", SECRET=1))
            await server.get("/SECRET%0a")
            server.client.fail_request = "SECRET"
            await server.post(CHAT, chat("SECRET", stream=True))
    assert len([line for line in logs if line["event"] == "request"]) == 4
    assert "SECRET" not in str(logs).replace("aSECRET2", "")
    assert logs[0]["request_id"] == "aSECRET2"


@in_loop
async def test_nothing_is_left_after_a_mix_of_finished_aborted_and_refused_requests() -> None:
    dice = random.Random(0)

    async def one(server: Running) -> None:
        kind = dice.choice(["whole", "stream", "gone", "bad"])
        if kind == "gone":
            reader, writer = await open_stream(server, chat(stream=True, n=dice.randint(1, 3)))
            await reader.readuntil(b"data: ")
            writer.transport.abort()
        else:
            body = chat(stream=kind == "stream", n=dice.randint(1, 3), stop=dice.choice([None, "wor"]))
            status, _, _ = await server.post(CHAT, body | ({"top_p": 7} if kind == "bad" else {}))
            assert status == (400 if kind == "bad" else 200)

    async with running() as server:
        await asyncio.gather(*(one(server) for _ in range(60)))
        state = server.server.state
        assert await state.admission.until_idle(5)
        assert state.admission.in_flight == 0
        ended = state.bus.settled(lambda: [e for e in server.exporter.events if isinstance(e, RequestEvent)])
        assert sorted(e.request_id for e in ended) == sorted(r.request_id for r in server.client.requests)


def counting(server: Running) -> None:
    """Its engine counts experts, as far as the server knows."""
    engine = server.server.state.engine
    choice = engine.plan.choice("parallelism")
    counts = replace(choice, config={**choice.config, "count_experts": True})
    engine.plan = replace(engine.plan, slots={**engine.plan.slots, "parallelism": (counts,)})


@in_loop
async def test_the_load_of_experts_is_served_where_they_are_counted() -> None:
    async with running() as server:
        status, _, data = await server.get("/engine/expert_load")
        assert status == 404 and "start the engine with parallelism.count_experts=true" in error_of(data)["message"]
        counting(server)
        server.client.counts = {3: (6, 0, 0), 4: (0, 0, 0)}
        status, _, data = await server.get("/engine/expert_load")
        assert status == 200
        assert json.loads(data) == {
            "layers": {"3": [6, 0, 0], "4": [0, 0, 0]},
            "busiest_over_mean": {"3": 3.0, "4": 0.0},
        }


@in_loop
async def test_who_asks_for_the_load_of_an_engine_that_dies_is_told() -> None:
    async with running() as server:
        counting(server)
        asked = [asyncio.create_task(server.get("/engine/expert_load")) for _ in range(2)]
        while server.client.num_asked == 0:
            await asyncio.sleep(0)
        server.client.die()
        for status, _, data in await asyncio.gather(*asked):
            assert status == 503 and error_of(data)["code"] == "not_ready"
