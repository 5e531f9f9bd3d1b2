"""Open connections: bounded below the limit on open files, idle ones shed first, dead ones noticed at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import socket
from collections.abc import Iterator
from typing import cast

from aiohttp import web

from engine.http.errors import HttpError, error_body, error_response, http_error_response
from engine.service.errors import ApiError
from engine.service.logs import Repeated, http_logger

HEADER_S = 10.0
"""A new connection must have sent its first request's header by then."""
IDLE_S = 75.0
UNREAD_S = 60.0
LEAST_READ = 48 * 1024
"""In each :data:`UNREAD_S` a client must read so many bytes of what waits for it, or all: else it is cut off. It counts
once more waits than aiohttp buffers, or the connection is being closed."""
ACCEPTED_AT_ONCE = 16
"""asyncio accepts so many connections before any of them is looked at."""
SPARE_FILES = 48
"""Open files that are kept for the engine process, proxied requests and files, and for connections that were just
accepted or are being refused."""
MOST_FILES = 2**16
"""More open files than this are not asked for."""
MOST_REFUSALS = 16
"""Refused connections that may wait for their answer to be read; further ones are reset."""
REFUSAL_S = 1.0
BACKLOG = 1024

_refused = Repeated("connections refused")


class TooFewFiles(RuntimeError):
    """The limit on open files leaves no room for connections; the message says what would."""


def most_connections(asked: int | None, files_each: int = 1) -> int:
    """How many connections the limit on open files allows, which is raised as far as it goes. ``asked``: fewer.
    ``files_each``: what each of them may take.

    Raises :class:`TooFewFiles`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = MOST_FILES if soft == resource.RLIM_INFINITY else soft
    taken = len(os.listdir("/proc/self/fd")) + SPARE_FILES if os.path.isdir("/proc/self/fd") else 2 * SPARE_FILES
    if (most := (files - taken) // files_each) < 1:
        raise TooFewFiles(f"the limit on open files is {files}; expected more than {taken} (ulimit -n)")
    return most if asked is None else min(asked, most)


class Connections:
    """The protocol factory of the listener: one :class:`Connection` for each client, or a refusal."""

    def __init__(self, server: web.Server, limit: int) -> None:
        """``limit``: most connections at a time. Call inside a running event loop."""
        self.server = server
        self.limit = limit
        self.open: set[Connection] = set()
        self.idle: dict[Connection, None] = {}
        """Connections that are not being answered, the one that has been idle for longest first."""
        self.refusing: set[_Refusal] = set()
        self.hang_ups = HangUps()

    def __call__(self) -> asyncio.Protocol:
        if len(self.open) >= self.limit and not self._shed():
            _refused.warning(limit=self.limit)
            return _Refusal(self.refusing)
        return cast(asyncio.Protocol, Connection(self))

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Open the listener. Raises ``OSError``."""
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(self, host, port, backlog=ACCEPTED_AT_ONCE)
        for opened in listener.sockets:
            # asyncio accepts as many connections at a time as may wait; the kernel lets more wait.
            with socket.socket(fileno=os.dup(opened.fileno())) as same:
                same.listen(BACKLOG)
        return listener

    def close(self) -> None:
        self.hang_ups.close()

    def _shed(self) -> bool:
        """Close the connection that has been idle for longest; False: none is idle."""
        for connection in self.idle:
            connection.shed()
            return True
        return False


class Connection(web.RequestHandler):
    """aiohttp's connection with this server's limits and error bodies."""

    def __init__(self, connections: Connections) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(
            connections.server,
            loop=loop,
            keepalive_timeout=IDLE_S,
            access_log=None,  # type: ignore[arg-type]
            logger=http_logger(),
        )
        self._connections = connections
        self._watched: int | None = None
        self._link: asyncio.Transport | None = None
        """Also while it is being closed, when ``transport`` is gone."""
        self._unread_timer: asyncio.TimerHandle | None = None
        self._header_timer = loop.call_later(HEADER_S, self.force_close)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """A request of this connection is being answered: it is not idle."""
        self._header_timer.cancel()
        self._connections.idle.pop(self, None)
        try:
            yield
        finally:
            if self in self._connections.open:
                self._connections.idle[self] = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connections.open.add(self)
        self._connections.idle[self] = None
        self._link = cast(asyncio.Transport, transport)
        self._watched = self._connections.hang_ups.watch(self._link)
        super().connection_made(transport)

    async def start(self) -> None:
        """Answer requests until the connection is to be closed."""
        try:
            await super().start()
        finally:
            self._watch_unread()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._link is not None and not self._link.is_closing():
            self._unwatch_unread()

    def connection_lost(self, error: BaseException | None) -> None:
        self._header_timer.cancel()
        self._unwatch_unread()
        self._link = None
        self._connections.hang_ups.forget(self._watched)
        self._connections.open.discard(self)
        self._connections.idle.pop(self, None)
        super().connection_lost(error)

    def force_close(self) -> None:
        self._connections.idle.pop(self, None)
        super().force_close()
        self._watch_unread()

    def shed(self) -> None:
        """Close now, whatever the client has not read: somebody else needs the file."""
        self.force_close()
        if self._link is not None and self._link.get_write_buffer_size():
            self._link.abort()

    def _watch_unread(self) -> None:
        """Closing a transport waits until its client has read all, for as long as that takes."""
        if self._link is not None and self._unread_timer is None and (left := self._link.get_write_buffer_size()):
            self._unread_timer = self._loop.call_later(UNREAD_S, self._cut_off, left)

    def _unwatch_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _cut_off(self, before: int) -> None:
        assert self._link is not None
        self._unread_timer = None
        left = self._link.get_write_buffer_size()
        if left and before - left < LEAST_READ:
            self._link.abort()
        else:
            self._watch_unread()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Refusals that no middleware has seen get the same JSON as other errors."""
        if isinstance(resp, web.HTTPException):
            resp = http_error_response(resp, request.method)
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is not HTTP, or failed outside every handler: the same JSON as other errors, and the end of the
        connection. Raises ``ConnectionError`` when part of an answer is out."""
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer is out already")
        if status >= 500:
            self.log_exception("request failed outside its handler", exc_info=exc)
            response = error_response(HttpError(status, "The server failed on this request.", code="internal_error"))
        else:
            response = error_response(HttpError(status, f"Not a valid HTTP request: {_reason(message)}.", code="http"))
        response.force_close()
        return response


class HangUps:
    """Notices clients that hang up while nothing is read from them: after requests that wait for their turn, the end
    of the stream is not read, so aiohttp alone would answer all of them first."""

    def __init__(self) -> None:
        self._watched: dict[int, asyncio.Transport] = {}
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        if self._epoll is not None:
            asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._notice)

    def watch(self, transport: asyncio.Transport) -> int | None:
        """Abort ``transport`` when its peer hangs up. Returns what :meth:`forget` takes."""
        peer = transport.get_extra_info("socket")
        if self._epoll is None or peer is None:
            return None
        number: int = peer.fileno()
        self._epoll.register(number, select.EPOLLRDHUP)
        self._watched[number] = transport
        return number

    def forget(self, number: int | None) -> None:
        if self._epoll is not None and number is not None and self._watched.pop(number, None) is not None:
            self._epoll.unregister(number)

    def close(self) -> None:
        if self._epoll is not None:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

    def _notice(self) -> None:
        assert self._epoll is not None
        for number, _ in self._epoll.poll(0):
            transport = self._watched[number]
            self.forget(number)
            transport.abort()


class _Refusal(asyncio.Protocol):
    """Answers 503 to whatever comes, and closes."""

    def __init__(self, refusing: set[_Refusal]) -> None:
        self._refusing = refusing
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if len(self._refusing) >= MOST_REFUSALS:
            self._transport.abort()
            return
        self._refusing.add(self)
        self._transport.write(_REFUSED)
        # Closing at once would reset the connection under the answer if the client has sent something meanwhile.
        self._transport.write_eof()
        self._timer = asyncio.get_running_loop().call_later(REFUSAL_S, self._transport.abort)

    def connection_lost(self, error: BaseException | None) -> None:
        if self in self._refusing:
            self._refusing.discard(self)
            self._timer.cancel()


def _refusal() -> bytes:
    error = ApiError(
        "unavailable",
        "The server has as many connections as it can hold.",
        code="too_many_connections",
        retry_after_s=2,
    )
    body = error_body(error)
    return (
        f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Retry-After: {error.retry_after_s}\r\nConnection: close\r\n\r\n"
    ).encode() + body


_REFUSED = _refusal()


def _reason(message: str | None) -> str:
    """The first line of what the parser said, without the bytes it met."""
    line = (message or "it cannot be parsed").strip().splitlines()[0]
    return line.rstrip(":. ")[:200]
