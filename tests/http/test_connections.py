"""Connections are bounded, idle ones go first, dead ones are noticed, and what is not HTTP gets the usual error."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import subprocess
import sys
from typing import Any

import pytest
import structlog

from engine.http import connections
from engine.http.connections import TooFewFiles, most_connections
from engine.service.logs import Repeated, http_logger, on_loop_error

from ..service.fakes import in_loop
from .fakes import Running, chat, running

CHAT = "/v1/chat/completions"


def http(body: Any, path: str = CHAT) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def connect(server: Running, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.server.port)
    writer.write(sent)
    return reader, writer


async def status_of(reader: asyncio.StreamReader) -> int:
    return int((await reader.readline()).split()[1])


@in_loop
async def test_a_connection_that_never_sends_a_header_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_S", 0.02)
    async with running() as server:
        reader, writer = await connect(server, b"GET /health HTTP/1.1\r\nHo")
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


@in_loop
async def test_the_connection_that_was_idle_for_longest_makes_room_for_a_new_one() -> None:
    async with running(max_connections=2) as server:
        oldest, _ = await connect(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert await status_of(oldest) == 200
        newer, newer_writer = await connect(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert await status_of(newer) == 200
        newest, _ = await connect(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert await status_of(newest) == 200
        assert b"status" in await asyncio.wait_for(oldest.read(), 5)  # to its end: it was closed
        newer_writer.write(http(chat()))
        while await newer.readline() != b"\r\n":
            pass
        assert not newer.at_eof()


async def unread(server: Running) -> socket.socket:
    """A client that asks for far more than it reads. Returns once some of it waits in the server."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", server.server.port))
    while not server.server.connections.open:
        await asyncio.sleep(0)
    (connection,) = server.server.connections.open
    link = connection.transport
    assert isinstance(link, asyncio.Transport)
    link.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    link.set_write_buffer_limits(high=4096)
    await loop.sock_sendall(client, 400 * b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    async with asyncio.timeout(5):
        while not link.get_write_buffer_size() > 4096:
            await asyncio.sleep(0.01)
    return client


@in_loop
async def test_a_client_that_does_not_read_its_answers_makes_room_for_a_new_one_at_once() -> None:
    async with running(max_connections=1) as server:
        with await unread(server):
            newer, writer = await connect(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert await status_of(newer) == 200
            assert len(server.server.connections.open) == 1
            writer.close()


@in_loop
async def test_a_client_that_does_not_read_its_answers_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 0.05)
    async with running() as server:
        with await unread(server):
            async with asyncio.timeout(5):
                while server.server.connections.open:
                    await asyncio.sleep(0.01)


@in_loop
async def test_a_connection_whose_time_is_up_does_not_wait_for_a_client_that_reads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as server:
        with await unread(server):
            (connection,) = server.server.connections.open
            connection.resume_writing()  # as where less than the limit is left, which nobody waits for
            monkeypatch.setattr(connections, "UNREAD_S", 0.05)
            connection.force_close()
            async with asyncio.timeout(5):
                while server.server.connections.open:
                    await asyncio.sleep(0.01)


@in_loop
async def test_a_client_that_has_read_some_since_then_gets_as_much_time_again() -> None:
    async with running() as server:
        with await unread(server):
            (connection,) = server.server.connections.open
            left = connection._link.get_write_buffer_size()
            connection._unwatch_unread()
            connection._cut_off(left + connections.LEAST_READ)
            assert connection._unread_timer is not None and not connection._link.is_closing()
            connection._unwatch_unread()
            connection._cut_off(left + connections.LEAST_READ - 1)
            assert connection._unread_timer is None and connection._link.is_closing()


@in_loop
async def test_a_connection_too_many_is_refused_in_json_while_all_others_are_being_answered() -> None:
    async with running(max_connections=1) as server:
        server.client.hold_before = 1
        busy, kept = await connect(server, http(chat(stream=True)))
        await server.client.holding.wait()
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):
                reader, writer = await connect(server, http(chat()))
                head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 503 ") and b"Connection: close" in head and b"Retry-After" in head
                assert json.loads(body)["error"]["code"] == "too_many_connections"
                writer.close()
        assert len([line for line in logs if line["event"] == "connections refused"]) <= 1
        server.client.proceeding.set()
        assert b"[DONE]" in await asyncio.wait_for(busy.readuntil(b"[DONE]"), 5)
        kept.close()


@in_loop
async def test_a_client_that_hangs_up_after_pipelined_requests_is_noticed_at_once() -> None:
    async with running() as server:
        server.client.hold_before = 1
        _, writer = await connect(server, http(chat()) * 50)
        await server.client.holding.wait()
        writer.close()
        await asyncio.wait_for(server.client.abort_seen.wait(), 5)
        assert await server.server.state.admission.until_idle(5)
        assert len(server.client.requests) == 1


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 9000 + b"\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nExpect: the-moon\r\n\r\n", 417),
        (b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nExpect: the-moon\r\n\r\n", 417),
    ],
)
@in_loop
async def test_what_aiohttp_refuses_by_itself_is_the_usual_error_object(sent: bytes, status: int) -> None:
    async with running() as server:
        reader, writer = await connect(
            server, sent.replace(b"localhost\r\n\r\n", b"localhost\r\nConnection: close\r\n\r\n")
        )
        assert await status_of(reader) == status
        writer.write_eof()
        head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
        assert b"Content-Type: application/json" in head
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        assert len(error["message"]) < 300


def test_the_soft_limit_on_open_files_is_raised_and_connections_stay_below_it() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 256))\n"
        "from engine.http.connections import most_connections\n"
        "print(most_connections(None), most_connections(10), most_connections(None, 2))\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    most, asked, half, soft = map(int, done.stdout.replace("(", "").replace(",", "").split()[:4])
    assert 150 < most < 256 and (asked, half, soft) == (10, most // 2, 256)


def test_too_few_open_files_are_an_error_that_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (20, 20))
    with pytest.raises(TooFewFiles, match="limit on open files is 20"):
        most_connections(None)


def test_a_repeated_error_is_one_line_a_minute_with_a_count() -> None:
    now = 0.0
    error = Repeated("it failed", lambda: now)
    with structlog.testing.capture_logs() as logs:
        for _ in range(1000):
            error.warning()
        now = 60.0
        error.warning()
    assert [(line["event"], line["count"]) for line in logs] == [("it failed", 1), ("it failed", 1000)]


@in_loop
async def test_errors_of_asyncio_and_aiohttp_are_logged_once_a_minute() -> None:
    with structlog.testing.capture_logs() as logs:
        for number in range(1000):
            context = {"message": f"test: no more files 0x{number:x}", "exception": OSError()}
            on_loop_error(asyncio.get_running_loop(), context)
            http_logger().error("test: it failed for %s", number)
    assert [line["event"] for line in logs] == ["test: no more files", "test: it failed for %s"]
