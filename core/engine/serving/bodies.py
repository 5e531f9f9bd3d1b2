"""Reading requests and writing JSON, with this server's limits instead of aiohttp's."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from engine.serving.errors import ApiError

BODY_S = 30.0


async def read_body(request: web.Request, limit: int) -> bytes:
    """The whole body. Raises :class:`ApiError` 408, 413 or 415."""
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(415, "Content-Encoding is not supported; send the body as it is.", code="unsupported_encoding")
    if "Origin" in request.headers and request.content_type != "application/json":
        # What a web page can send without asking this server first must not reach it.
        raise ApiError(415, "Content-Type must be application/json.", code="unsupported_media_type")
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.content.iter_any():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {BODY_S:.0f} s.", code="body_timeout") from None
    return b"".join(parts)


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error_response(error: ApiError) -> web.Response:
    return web.Response(
        body=error.body(), status=error.status, headers=error.headers(), content_type="application/json"
    )


def http_error_response(error: web.HTTPException, method: str) -> web.Response:
    """What aiohttp refuses by itself, as this server's errors look."""
    if error.status == 404:
        shown = ApiError(404, "There is no such path on this server.", code="not_found")
    elif error.status == 405:
        shown = ApiError(405, f"This path does not take {method[:16]}.", code="method_not_allowed")
    elif error.status == 417:
        shown = ApiError(417, "The only Expect header supported is 100-continue.", code="expectation_failed")
    else:
        shown = ApiError(error.status, error.reason or "The request failed.", code="http_error")
    response = error_response(shown)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body is larger than {limit} bytes (server.max_body_bytes).", code="request_too_large")
