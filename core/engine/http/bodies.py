"""Reading requests and writing JSON, with this server's limits instead of aiohttp's."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import StreamReader, web

from engine.http.errors import HttpError
from engine.service.addresses import network_of
from engine.service.errors import ApiError

BODY_S = 30.0
SMALL_BYTES = 64 * 1024
"""The first so many bytes of every body are not counted: large bodies never keep small ones out."""
LARGEST_AT_ONCE = 8
"""The bytes of all bodies together are limited to so many of the largest allowed; those of one address to half."""


class Body:
    """A request body that was read, counted until it is released."""

    __slots__ = ("_bodies", "client", "counted", "data")

    def __init__(self, bodies: Bodies, client: str) -> None:
        self._bodies = bodies
        self.client = client
        self.counted = 0
        self.data = b""

    def count(self, size: int) -> None:
        """Note that the body has ``size`` bytes so far. Raises :class:`ApiError` 429 when all bodies together have too
        many, or those of this client."""
        more = max(0, size - SMALL_BYTES) - self.counted
        self._bodies.take(self.client, more)
        self.counted += more

    def become(self, data: bytes) -> None:
        """Have these bytes from here on. Raises :class:`ApiError` as reading them would."""
        self.check_size(len(data))
        self.count(len(data))
        self.data = data

    def check_size(self, size: int) -> None:
        """Raises :class:`ApiError` 413 for more bytes than a body may have."""
        self._bodies.check_size(size)

    def forget(self) -> None:
        """Drop the bytes, which were parsed; what was made of them still counts."""
        self.data = b""

    def release(self, keeping: int = 0) -> None:
        """Drop the bytes, and count no more of them than ``keeping``, which what was made of them holds on to."""
        left = min(self.counted, max(0, keeping - SMALL_BYTES))
        self._bodies.take(self.client, left - self.counted)
        self.counted, self.data = left, b""


class Bodies:
    """Reads bodies of at most ``limit`` bytes each."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.taken = 0
        """Bytes of all bodies that are being read or were not released yet."""
        self._taken_by: Counter[str] = Counter()

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[Body]:
        """The whole body, released at the end at the latest. Raises :class:`ApiError` 408, 413, 415 or 429."""
        self._check_head(request)
        body = Body(self, network_of(request.remote or ""))
        try:
            await self._fill(body, request.content)
            yield body
        finally:
            body.release()

    def take(self, client: str, size: int) -> None:
        most = LARGEST_AT_ONCE * self._limit
        if size > 0 and (self.taken + size > most or self._taken_by[client] + size > most // 2):
            raise ApiError(
                "overloaded", "The server is reading too many large requests.", code="bodies_full", retry_after_s=1
            )
        self.taken += size
        self._taken_by[client] += size
        if not self._taken_by[client]:
            del self._taken_by[client]

    def _check_head(self, request: web.Request) -> None:
        check_encoding(request)
        if "Origin" in request.headers and request.content_type != "application/json":
            # What a web page can send without asking this server first must not reach it.
            raise HttpError(415, "Content-Type must be application/json.", code="unsupported_media_type")
        self.check_size(request.content_length or 0)

    async def _fill(self, body: Body, content: StreamReader) -> None:
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_S):
                async for part in content.iter_any():
                    size += len(part)
                    self.check_size(size)
                    body.count(size)
                    parts.append(part)
        except TimeoutError:
            raise HttpError(408, f"The body did not arrive within {BODY_S:.0f} s.", code="body_timeout") from None
        body.data = b"".join(parts)

    def check_size(self, size: int) -> None:
        """Raises :class:`ApiError` 413 for a body of more bytes than are taken."""
        if size > self._limit:
            message = f"The body is larger than {self._limit} bytes (server.max_body_bytes)."
            raise HttpError(413, message, code="request_too_large")


def check_encoding(request: web.Request) -> None:
    """Raises :class:`HttpError` 415 for a body that is compressed: few bytes may become very many."""
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise HttpError(415, "Content-Encoding is not supported; send the body as it is.", code="unsupported_encoding")


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
