"""Answers in a coding that the client accepts, against a listening server."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict
from openai import AsyncOpenAI

from engine.contracts.config import ServerSettings
from engine.contracts.router import Reject, ToUrl
from engine.http import compression
from engine.http.compression import CODINGS, INLINE_BYTES, StreamCoder, accepted, compressed, negotiated
from engine.http.state import LISTENER
from tests.needs import needs

from ..service.fakes import MODEL, in_loop, says
from .fakes import Running, chat, events_of, running

CHAT = "/v1/chat/completions"
LONG = "What is a list? " * 200
GZIP = "Accept-Encoding: gzip"


def no_zstd() -> str:
    return "" if "zstd" in CODINGS else "no zstd: neither Python 3.14 nor backports.zstd"


EACH_CODING = ["gzip", pytest.param("zstd", marks=needs(no_zstd))]


def unpacked(headers: dict[str, str], body: bytes) -> bytes:
    """The body as it was, by the coding that its header names."""
    match headers.get("content-encoding"):
        case None:
            return body
        case "gzip":
            return zlib.decompress(body, 31)
        case "zstd":
            from aiohttp.compression_utils import ZstdDecompressor

            return bytes(ZstdDecompressor().decompress(body))
    raise AssertionError(headers)


def shows(server: Running, page: str) -> None:
    """``/metrics`` is this page."""
    server.exporter.render = lambda: page  # type: ignore[method-assign]


@pytest.mark.parametrize("coding", EACH_CODING)
@in_loop
async def test_an_answer_is_the_same_in_every_coding(coding: str) -> None:
    async with running(says(LONG)) as server:
        asked = chat(max_tokens=200, n=4)
        _, headers, plain = await server.post(CHAT, asked)
        assert "content-encoding" not in headers and headers["vary"] == "Accept-Encoding"
        status, headers, data = await server.post(CHAT, asked, f"Accept-Encoding: {coding}", "X-Request-Id: mine")
        assert (status, headers["content-encoding"], headers["vary"]) == (200, coding, "Accept-Encoding")
        assert int(headers["content-length"]) == len(data) < len(plain)
        assert (headers["content-type"], headers["x-request-id"]) == ("application/json", "mine")
        content = [json.loads(body)["choices"] for body in (plain, unpacked(headers, data))]
        assert content[0] == content[1] and len(content[0][0]["message"]["content"]) == 200


@pytest.mark.parametrize(("size", "coded"), [(1023, False), (1024, True)])
@in_loop
async def test_pages_of_metrics_are_coded_from_1024_bytes_on(size: int, coded: bool) -> None:
    async with running() as server:
        shows(server, "x" * size)
        _, headers, data = await server.get("/metrics", GZIP)
        assert unpacked(headers, data) == b"x" * size
        assert ("content-encoding" in headers, "vary" in headers) == (coded, coded)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ("", None),
        ("gzip", "gzip"),
        ("gzip, deflate, br", "gzip"),
        ("gzip, deflate, br, zstd", "zstd"),
        ("zstd;q=0.5, gzip", "gzip"),
        ("gzip;q=0.5, zstd;q=0.501", "zstd"),
        ("gzip;q=0", None),
        ("gzip;q=0, *", "zstd"),
        ("*", "zstd"),
        ("gzip;q=1.0, *;q=1", "gzip"),
        ("*;q=0", None),
        ("gzip, *;q=0", "gzip"),
        ("deflate, br", None),
        ("identity", None),
        ("identity, gzip", "gzip"),
        ("identity, gzip;q=0.5", None),
        ("identity;q=0.5, gzip;q=0.5", "gzip"),
        ("gzip ; q=0.25 , identity;q=0.1", "gzip"),
        ("gzip;q=2", None),
        ("gzip;q=-1", None),
        ("gzip;q=", None),
        ("gzip;level=9", None),
        (";q=1,,gzip", "gzip"),
        ("x" * 8000, None),
    ],
)
def test_the_client_is_given_what_it_likes_best(sent: str, expected: str | None) -> None:
    assert negotiated(sent, ("zstd", "gzip"))[0] == expected


@pytest.mark.parametrize(
    ("sent", "refused"),
    [
        ("gzip", False),
        ("gzip, identity;q=0", True),
        ("gzip, identity;q=0.000", True),
        ("gzip, *;q=0", True),
        ("gzip, *;q=0, identity;q=0.1", False),
        ("*;q=0.5", False),
        ("identity;q=0", False),
        ("*;q=0", False),
    ],
)
def test_a_client_may_refuse_what_is_not_coded_where_it_accepts_a_coding(sent: str, refused: bool) -> None:
    assert negotiated(sent, ("gzip",))[1] == refused


@in_loop
async def test_what_a_client_refuses_uncoded_is_coded_whatever_its_size() -> None:
    async with running() as server:
        _, headers, data = await server.get("/v1/models", "Accept-Encoding: gzip", "Accept-Encoding: Identity;Q=0")
        assert headers["content-encoding"] == "gzip" and json.loads(unpacked(headers, data))["data"][0]["id"] == MODEL
        assert (headers["vary"], int(headers["content-length"])) == ("Accept-Encoding", len(data))
        status, headers, data = await server.get("/v1/models", "Accept-Encoding: *;q=0")
        assert (status, json.loads(data)["data"][0]["id"]) == (200, MODEL) and "content-encoding" not in headers


@pytest.mark.parametrize("sent", ["", "deflate", "gzip;q=0", "gzip\xff", "\xe4"])
@in_loop
async def test_a_client_that_accepts_no_coding_gets_the_answer_as_it_is(sent: str) -> None:
    async with running() as server:
        shows(server, "x" * 5000)
        status, headers, data = await server.get("/metrics", f"Accept-Encoding: {sent}")
        assert (status, data) == (200, b"x" * 5000) and "content-encoding" not in headers


def test_a_header_that_is_no_text_accepts_nothing() -> None:
    assert accepted(request_of(sent="GZIP;Q=1")) == "gzip;q=1"
    assert accepted(request_of(sent="gzip, \udcff")) == ""


@in_loop
async def test_errors_are_coded_the_same_way() -> None:
    async with running() as server:
        server.router.decision = Reject(429, "come back later " * 200)
        status, headers, data = await server.post(CHAT, chat(), GZIP)
        assert (status, headers["content-encoding"]) == (429, "gzip")
        assert set(json.loads(unpacked(headers, data))["error"]) == {"message", "type", "param", "code"}


@in_loop
async def test_a_head_says_what_an_uncoded_answer_would_say() -> None:
    async with running() as server:
        shows(server, "x" * 5000)
        status, headers, data = await server.post("/metrics", b"", GZIP, method="HEAD")
        assert (status, headers["content-length"], data) == (200, "5000", b"")
        assert "content-encoding" not in headers


def request_of(method: str = "GET", sent: str = "gzip") -> web.Request:
    state = SimpleNamespace(settings=ServerSettings())
    return cast(
        web.Request,
        SimpleNamespace(method=method, headers=CIMultiDict({"Accept-Encoding": sent}), app={LISTENER: state}),
    )


@pytest.mark.parametrize(
    "response",
    [
        lambda: web.Response(status=204),
        lambda: web.Response(status=304, body=b"x" * 5000),
        lambda: web.Response(body=b"x" * 5000, headers={"Content-Encoding": "br"}),
        lambda: web.StreamResponse(),
    ],
)
@in_loop
async def test_what_has_no_body_or_is_coded_already_is_left_alone(response: Callable[[], web.Response]) -> None:
    given = response()
    headers, body = dict(given.headers), getattr(given, "body", None)
    assert await compressed(request_of(), given) is given
    assert (dict(given.headers), getattr(given, "body", None)) == (headers, body)


@in_loop
async def test_what_does_not_shrink_stays_as_it_is() -> None:
    noise = random.Random(1).randbytes(2000)
    assert (await compressed(request_of(), web.Response(body=noise))).headers.get("Content-Encoding") is None
    forced = await compressed(request_of(sent="gzip, identity;q=0"), web.Response(body=noise))
    assert forced.headers["Content-Encoding"] == "gzip"


@in_loop
async def test_it_can_be_switched_off() -> None:
    async with running(compression=False) as server:
        shows(server, "x" * 5000)
        _, headers, data = await server.get("/metrics", "Accept-Encoding: gzip, identity;q=0")
        assert data == b"x" * 5000 and not {"content-encoding", "vary"} & set(headers)


def test_streams_are_not_compressed_where_nothing_is() -> None:
    with pytest.raises(ValueError, match=r"server\.compress_streams=true needs server\.compression=true"):
        ServerSettings(compression=False, compress_streams=True)


@in_loop
async def test_large_answers_are_coded_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def coding(body: bytes) -> bytes:
        threads.append(threading.current_thread() is threading.main_thread())
        return zlib.compress(body, 1, 31)

    monkeypatch.setitem(CODINGS, "gzip", coding)
    async with running() as server:
        for size in (INLINE_BYTES, INLINE_BYTES + 1, 10 * INLINE_BYTES):
            shows(server, "x" * size)
            _, headers, data = await server.get("/metrics", GZIP)
            assert unpacked(headers, data) == b"x" * size
    assert threads == [True, False, False]


@in_loop
async def test_a_client_that_goes_away_while_its_answer_is_coded_disturbs_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, release = threading.Event(), threading.Event()

    def coding(body: bytes) -> bytes:
        begun.set()
        release.wait(10)
        return zlib.compress(body, 1, 31)

    async with running() as server:
        shows(server, "x" * (INLINE_BYTES + 1))
        monkeypatch.setitem(CODINGS, "gzip", coding)
        _, writer = await ask(server, "GET /metrics")
        await asyncio.to_thread(begun.wait, 10)
        writer.transport.abort()
        assert (await server.post(CHAT, chat()))[0] == 200
        release.set()
        _, headers, data = await server.get("/metrics", GZIP)
        assert len(unpacked(headers, data)) == INLINE_BYTES + 1


@in_loop
async def test_a_client_that_goes_away_while_it_reads_disturbs_nobody() -> None:
    noise = random.Random(1).randbytes(2**21).hex()
    async with running() as server:
        shows(server, noise)
        reader, writer = await ask(server, "GET /metrics")
        assert b"Content-Encoding: gzip" in await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()
        _, headers, data = await server.get("/metrics", GZIP)
        assert unpacked(headers, data) == noise.encode()


async def ask(
    server: Running, line: str, body: Any = None, sent: str = "gzip"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    data = b"" if body is None else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.server.port)
    head = f"{line} HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: {sent}\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


@in_loop
async def test_streams_are_left_alone_unless_asked() -> None:
    async with running() as server:
        _, headers, data = await server.post(CHAT, chat(stream=True), "Accept-Encoding: gzip, identity;q=0")
        assert not {"content-encoding", "vary"} & set(headers) and events_of(data)


class Unpacking:
    """Reads a stream in gzip, chunk by chunk as they arrive."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._unpack = zlib.decompressobj(31)
        self.text = b""

    async def head(self) -> bytes:
        return await self._reader.readuntil(b"\r\n\r\n")

    async def until(self, part: bytes) -> bytes:
        while part not in self.text:
            size = int(await self._reader.readline(), 16)
            assert size, "the stream ended"
            self.text += self._unpack.decompress(await self._reader.readexactly(size))
            await self._reader.readexactly(2)
        return self.text

    @property
    def whole(self) -> bool:
        return self._unpack.eof


@in_loop
async def test_every_event_of_a_compressed_stream_leaves_at_once() -> None:
    async with running(compress_streams=True, keepalive_s=0.01) as server:
        server.client.hold_before = 3
        reader, writer = await ask(server, f"POST {CHAT}", chat(stream=True))
        stream = Unpacking(reader)
        head = await stream.head()
        assert b"Content-Encoding: gzip" in head and b"Vary: Accept-Encoding" in head
        await stream.until(b'"content":"l"')
        await stream.until(b": keepalive\n")
        assert not server.client.proceeding.is_set() and not stream.whole
        server.client.proceeding.set()
        text = await stream.until(b"data: [DONE]\n\n")
        assert stream.whole
        events = events_of(text)
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == "Hello world"
        writer.close()


@in_loop
async def test_a_compressed_stream_that_fails_ends_in_an_error_event() -> None:
    async with running(compress_streams=True) as server:
        server.client.hold_before = 3
        reader, writer = await ask(server, f"POST {CHAT}", chat(stream=True))
        stream = Unpacking(reader)
        await stream.head()
        await server.client.holding.wait()
        server.client.die()
        assert b'"code":"engine_dead"' in await stream.until(b"data: [DONE]\n\n")
        assert stream.whole
        writer.close()


@pytest.mark.parametrize("sent", ["", "zstd", "gzip;q=0", "identity"])
@in_loop
async def test_a_stream_for_a_client_that_does_not_accept_gzip_is_not_compressed(sent: str) -> None:
    async with running(compress_streams=True) as server:
        _, headers, data = await server.post(CHAT, chat(stream=True), f"Accept-Encoding: {sent}")
        assert "content-encoding" not in headers and headers["vary"] == "Accept-Encoding" and events_of(data)


@in_loop
async def test_an_error_before_the_first_event_is_no_stream() -> None:
    async with running(compress_streams=True) as server:
        status, headers, data = await server.post(CHAT, chat(stream=True, temperature=-1), GZIP)
        assert status == 400 and "content-encoding" not in headers and json.loads(data)["error"]


@in_loop
async def test_a_piece_that_was_lost_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    coder, large = StreamCoder(), b"x" * (INLINE_BYTES + 1)
    unpack = zlib.decompressobj(31)
    assert unpack.decompress(await coder.coded(large)) == large
    begun = asyncio.Event()

    async def never(*args: Any) -> bytes:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(compression.asyncio, "to_thread", never)
    task = asyncio.create_task(coder.coded(large))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ConnectionError):
        await coder.coded(b"data: [DONE]\n\n", last=True)


@pytest.mark.parametrize("compress_streams", [True, False])
@in_loop
async def test_the_official_client_reads_whole_answers_and_streams_event_by_event(compress_streams: bool) -> None:
    async with (
        running(says(LONG), compress_streams=compress_streams) as server,
        AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=10) as client,
    ):
        hi: Any = [{"role": "user", "content": "hi"}]
        raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=hi, max_tokens=200, n=4)
        assert raw.headers["content-encoding"] in CODINGS
        whole = raw.parse().choices[0].message.content
        server.client.hold_before = 3
        stream = await client.chat.completions.create(model=MODEL, messages=hi, max_tokens=200, stream=True)
        assert (stream.response.headers.get("content-encoding") == "gzip") == compress_streams
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if len(text) == 3:
                assert not server.client.proceeding.is_set()
                server.client.proceeding.set()
        assert text == whole and len(text) == 200


@in_loop
async def test_aiohttp_reads_a_compressed_stream_event_by_event() -> None:
    async with running(compress_streams=True) as server, aiohttp.ClientSession() as session:
        server.client.hold_before = 3
        async with session.post(server.url + CHAT, json=chat(stream=True)) as reply:
            assert reply.headers["Content-Encoding"] == "gzip"
            text = b""
            async for piece in reply.content.iter_any():
                text += piece
                if b'"content":"l"' in text:
                    server.client.proceeding.set()
        assert events_of(text)


@pytest.mark.parametrize("compress_streams", [True, False])
@in_loop
async def test_a_proxied_answer_is_passed_on_in_the_coding_it_came_in(compress_streams: bool) -> None:
    async with running(says(LONG), compress_streams=compress_streams) as other, running(compression=False) as server:
        server.router.decision = ToUrl(other.url)
        _, headers, data = await server.post(CHAT, chat(max_tokens=200, n=4), GZIP)
        assert (headers["content-encoding"], headers["vary"]) == ("gzip", "Accept-Encoding")
        assert len(json.loads(unpacked(headers, data))["choices"][0]["message"]["content"]) == 200
        _, headers, data = await server.post(CHAT, chat(max_tokens=200))
        assert "content-encoding" not in headers and json.loads(data)
        _, headers, data = await server.post(CHAT, chat(max_tokens=200), "Accept-Encoding: gzip\xff")
        assert "content-encoding" not in headers and json.loads(data)
        _, headers, data = await server.post(CHAT, chat(max_tokens=200, stream=True), GZIP)
        assert "content-encoding" not in headers and events_of(data)


@in_loop
async def test_nothing_is_added_to_a_proxied_stream_that_is_coded_and_breaks_off() -> None:
    coder = StreamCoder()
    first = await coder.coded(b"data: {}\n\n")

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        kind = b"Content-Type: text/event-stream\r\nContent-Encoding: gzip\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + kind + b"Content-Length: 999\r\n\r\n" + first)
        await writer.drain()
        writer.close()

    async with running() as server, await asyncio.start_server(half, "127.0.0.1", 0) as other:
        server.router.decision = ToUrl(f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}")
        reader, _ = await ask(server, f"POST {CHAT}", chat(stream=True))
        stream = Unpacking(reader)
        await stream.head()
        await stream.until(b"data: {}\n\n")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError, ValueError)):
            await stream.until(b"[DONE]\n\n")
