"""Passing a request on to another server with the same API, byte by byte."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

import aiohttp
import structlog
from aiohttp import web

from engine.contracts.events import ProxiedEvent
from engine.http.compression import accepted
from engine.http.errors import HttpError, status_of
from engine.http.format import Format
from engine.http.state import ServerState
from engine.service.admission import Flight
from engine.service.errors import ApiError
from engine.service.job import Job
from engine.service.trace_context import TraceContext

CONNECT_S = 10.0
SILENCE_S = 300.0
PASSED_ON = ("Retry-After", "Content-Encoding", "Vary")
log = structlog.get_logger("engine.proxy")


async def answer(
    http: web.Request, state: ServerState, flight: Flight, job: Job, base_url: str, body: bytes, form: type[Format]
) -> web.StreamResponse:
    """Answer with :func:`forward`, and report it to exporters."""
    arrival, status = job.arrival, 499
    try:
        response = await forward(http, state, flight, base_url, body, job.api.stream, arrival.trace, form)
        status = response.status
        return response
    except ApiError as error:
        status = status_of(error)
        raise
    except Exception as error:
        status = 499 if isinstance(error, ConnectionError) else 500
        raise
    finally:
        now_s, trace = time.monotonic(), arrival.trace
        total_ms = (now_s - arrival.received_s) * 1e3
        name, kind, server = job.api.request_id, job.api.kind, urlsplit(base_url).netloc.rpartition("@")[2]
        ended = ProxiedEvent(now_s, name, kind, server, status, total_ms, trace.parent, trace.span_id)
        state.bus.publish((ended,))


async def forward(
    http: web.Request,
    state: ServerState,
    flight: Flight,
    base_url: str,
    body: bytes,
    stream: bool,
    trace: TraceContext,
    form: type[Format],
) -> web.StreamResponse:
    """Send ``body`` to the same endpoint below ``base_url`` and its answer back as it comes.

    This server's own key is not passed on; a client's trace is, with the span here as parent. Raises :class:`ApiError`
    502 when the other server cannot be reached; a stream that breaks off ends with an error as ``form`` has it.
    """
    assert state.session is not None
    response = web.StreamResponse()
    timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=SILENCE_S)
    # What the client accepts, since the answer is passed on as it comes. An error event may have to follow the other
    # server's in a stream, so that is asked for as it is.
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity" if stream else accepted(http)}
    headers |= trace.headers()
    try:
        async with state.session.post(
            target(base_url, http.path), data=body, headers=headers, timeout=timeout
        ) as reply:
            response.set_status(reply.status)
            response.headers["Content-Type"] = reply.headers.get("Content-Type", "application/json")
            response.headers["X-Accel-Buffering"] = "no"
            for name in PASSED_ON:
                if name in reply.headers:
                    response.headers[name] = reply.headers[name]
            await response.prepare(http)
            async for piece in reply.content.iter_any():
                await response.write(piece)
        await response.write_eof()
        return response
    except (aiohttp.ClientConnectionResetError, asyncio.CancelledError) as gone:
        if flight.failure is None:
            raise
        if isinstance(gone, asyncio.CancelledError):
            flight.task.uncancel()
        failure = flight.failure
    except (aiohttp.ClientError, TimeoutError) as error:
        log.error("proxied request failed", error=type(error).__name__)
        failure = HttpError(502, "The server this request was routed to did not answer.", code="bad_gateway")
    if not response.prepared:
        raise failure
    if not stream or "Content-Encoding" in response.headers:
        # A part of a body is out that nothing can be added to: only breaking the connection says that it is not whole.
        if http.transport is not None:
            http.transport.abort()
        return response
    await response.write(form.gap + form.broken(failure))
    await response.write_eof()
    return response


def new_session() -> aiohttp.ClientSession:
    """A client of other servers, with as many connections as there are requests. Call inside a running event loop."""
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())


def target(base_url: str, path: str) -> str:
    """``base_url`` may end in ``/v1`` or not, as clients' base URLs do."""
    return base_url.rstrip("/").removesuffix("/v1") + path
