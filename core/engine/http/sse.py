"""A stream of server-sent events.

The response starts with the first event or, if none comes, with the first keep-alive comment: until then an error can
still be a plain HTTP error. Events never carry ``id:``, which makes clients treat comments as events.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from types import TracebackType

from aiohttp import web

from engine.http.compression import for_stream
from engine.service.timings import Written

WRITE_TIMEOUT_S = 60.0
"""A client that reads nothing for so long is cut off."""
EVENTS = "text/event-stream; charset=utf-8"
LINES = "application/x-ndjson"
"""A JSON object to a line: no events, and nowhere to put a comment."""
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
    "Connection": "keep-alive",
}
KEEPALIVE = b": keepalive\n"
DONE = b"data: [DONE]\n\n"
RWND_LIMITED = 176
"""Where ``tcpi_rwnd_limited``, microseconds in 64 bits, is in Linux' ``struct tcp_info``."""


def event(data: bytes, name: str = "") -> bytes:
    """The bytes of one event. ``data`` is JSON, so it holds no line break."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"


def unread_s(transport: asyncio.BaseTransport | None) -> float:
    """Seconds that a connection had something to send and its client's receive buffer was full, since it was made; 0
    where the system does not count them."""
    sock = transport and transport.get_extra_info("socket")
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RWND_LIMITED + 8) if sock else b""
    except (OSError, AttributeError):  # closed, no TCP, no Linux
        return 0.0
    return float(struct.unpack_from("Q", info, RWND_LIMITED)[0]) / 1e6 if len(info) == RWND_LIMITED + 8 else 0.0


class DeferredHeaders(web.StreamResponse):
    _send_headers_immediately = False
    """Does nothing: headers leave with the first event, in one packet."""


class EventStream:
    """Use as an async context manager; a stream of events has comments while the body is silent for ``keepalive_s``."""

    def __init__(self, request: web.Request, keepalive_s: float, content_type: str = EVENTS) -> None:
        self._request = request
        self._keepalive_s = keepalive_s if content_type == EVENTS else 0.0
        self._coder, coding = for_stream(request)
        self._response = DeferredHeaders(headers=HEADERS | {"Content-Type": content_type} | coding)
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._written_at = self._loop.time()
        self._pulse: asyncio.Task[None] | None = None
        self._write_s = self._last_write_s = 0.0
        self._unread_s = unread_s(request.transport)

    async def __aenter__(self) -> EventStream:
        if self._keepalive_s > 0:
            self._pulse = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pulse is not None:
            self._pulse.cancel()

    @property
    def written(self) -> Written:
        """What waiting for the client took."""
        unread = max(0.0, unread_s(self._request.transport) - self._unread_s)
        return Written(self._write_s * 1e3, self._last_write_s * 1e3, unread * 1e3)

    @property
    def started(self) -> bool:
        """Whether the 200 is out; from then on errors are events."""
        return self._response.prepared

    async def write(self, events: bytes) -> None:
        """Send events in one write. Raises ``ConnectionError`` when the client is gone or stuck."""
        await self._send(events)

    async def finish(self, events: bytes) -> web.StreamResponse:
        """End the stream with these last events."""
        if self._pulse is not None:
            self._pulse.cancel()
        await self._send(events, last=True)
        return self._response

    async def _send(self, data: bytes, *, last: bool = False) -> None:
        self._written_at = begun_s = self._loop.time()
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S), self._lock:
                if not self._response.prepared:
                    await self._response.prepare(self._request)
                if self._coder is not None:
                    data = await self._coder.coded(data, last=last)
                await (self._response.write_eof if last else self._response.write)(data)
        except TimeoutError:
            raise ConnectionResetError("the client does not read its stream") from None
        finally:
            took = self._loop.time() - begun_s
            self._write_s += took
            self._last_write_s = took * last

    async def _keep_alive(self) -> None:
        while True:
            wait = self._written_at + self._keepalive_s - self._loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
                continue
            try:
                await self._send(KEEPALIVE)
            except ConnectionError:
                return  # the request's own task notices and cleans up
