from __future__ import annotations

import asyncio
import re
import time

import pytest
from tests.lab.bench.test_main import event

from engine_lab.bench.options import base_url
from engine_lab.bench.quirks import api_of
from engine_lab.bench.target import HttpSender, Target, open_session
from engine_lab.bench.workload import BenchRequest


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("http://a:8000", "http://a:8000/v1/completions"),
        ("http://a:8000/v1/", "http://a:8000/v1/completions"),
        ("http://a:8000/v3", "http://a:8000/v3/completions"),
        ("https://a/openai/v1", "https://a/openai/v1/completions"),
    ],
)
def test_the_api_is_where_the_url_says(url, asked):
    assert Target(base_url(url), "m", "completions").url == f"{api_of(base_url(url))}/completions" == asked


def test_a_request_sent_into_a_connection_that_the_server_has_closed_is_sent_again():
    answer = event(choices=[{"text": "x", "finish_reason": "stop"}])

    async def serve(reader, writer):
        """Takes a request, answers it, and closes at the next one."""
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        (length,) = re.findall(rb"content-length: (\d+)", head)
        await reader.readexactly(int(length))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(answer), answer))
        await reader.read(1)
        writer.transport.abort()

    async def run():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, open_session(10) as session:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            send = HttpSender(session, Target(url, "m", "completions"), time.perf_counter)
            return [await send(BenchRequest(i, "x", 1), time.perf_counter()) for i in range(4)]

    assert [record.error for record in asyncio.run(run())] == [""] * 4
