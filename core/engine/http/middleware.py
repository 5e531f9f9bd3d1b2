"""Around every handler: who may call it, what an error looks like, one log line."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import cast

import structlog
from aiohttp import web

from engine.contracts.config import ServerSettings
from engine.contracts.events import RejectedEvent
from engine.http import endpoints
from engine.http.compression import compressed
from engine.http.connections import Connection
from engine.http.cross_origin import CrossOrigin
from engine.http.errors import HttpError, error_response, http_error_response, status_of
from engine.http.routes.ui import UI_ROUTES
from engine.http.state import CALLER, LISTENER, SLO_CLASS, TRACE, ListenerState
from engine.service.addresses import is_local_name, is_loopback
from engine.service.errors import ApiError
from engine.service.keys import Keys, WrongKey, caller_of, sent_keys
from engine.service.logs import echoed_id

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ADMIN = "/engine/"
"""What is below is for administrators, and so are the metrics: both show all tenants."""
OPEN_ROUTES = frozenset({"/", "/health", "/ready"})
"""Routes that are served without a key."""
READ = ("fleet", "scale", "stats", "counters", "history", "latency", "requests")
"""What pages and commands of ``/engine`` ask for again and again."""
PROBES = frozenset({"/health", "/ready", "/metrics"}) | {f"/engine/{name}" for name in READ}
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
log = structlog.get_logger("engine.access")


def application(state: ListenerState) -> web.Application:
    """One without routes over ``state``; what follows here is around each of its handlers."""
    cross_origin = CrossOrigin(state.settings.cors_origins)
    app = web.Application(middlewares=[account, cross_origin.answer_preflight, authorise])
    app[LISTENER] = state
    app.on_response_prepare.append(stamp)
    app.on_response_prepare.append(cross_origin.stamp)
    return app


@web.middleware
async def account(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives the request an id, turns every error into JSON, writes one log line without any content."""
    begun = time.monotonic()
    request[REQUEST_ID] = echoed_id(request.headers.get("X-Request-Id", ""))
    status = 499
    try:
        with cast(Connection, request.protocol).answering():
            response = await compressed(request, await _answered(request, handler))
        status = response.status
        return response
    finally:
        # Probes come every second or so; they are no news.
        (log.debug if _route(request) in PROBES else log.info)(
            "request",
            method=request.method[:16],
            route=_route(request) or "unmatched",
            status=status,
            ms=round((time.monotonic() - begun) * 1e3, 1),
            request_id=request[REQUEST_ID],
            **({"key": request[CALLER].name} if CALLER in request else {}),
        )


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    body = endpoints.error_body_of(request.path)
    try:
        return await handler(request)
    except ApiError as error:
        if _route(request) in endpoints.PATHS and _is_refusal(error):
            state, code = request.app[LISTENER], error.code or "invalid_request"
            slo_class = request.get(SLO_CLASS, "")
            state.bus.publish((RejectedEvent(time.monotonic(), status_of(error), code, state.refuser, slo_class),))
        return error_response(error, body)
    except web.HTTPException as error:
        return http_error_response(error, request.method, body)
    except ConnectionError:
        # The client is gone, or reads nothing: closing would wait for it to read what is left.
        if request.transport is not None:
            request.transport.abort()
        raise
    except Exception as error:
        # The last resort: the fault is logged by type and place, the client learns nothing internal.
        log.error("handler failed", error=type(error).__name__, at=_place(error), request_id=request[REQUEST_ID])
        failed = ApiError("failed", "The server failed on this request.", code="internal_error")
        return error_response(failed, body)


@web.middleware
async def authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Decides on the matched route, never on a URL that the client could dress up."""
    state, route = request.app[LISTENER], _route(request)
    settings = state.settings
    if settings.api_key is None and state.keys is None:
        if is_loopback(settings.host) and not is_local_name(request.headers.get("Host", "")):
            # A web page can make its own host name point here, but it cannot forge the Host header.
            raise HttpError(403, "This server answers to local names only (server.host).", code="foreign_host")
    elif not _is_open(route, settings):
        sent = sent_keys(request.headers.getall("Authorization", []), request.headers.getall("x-api-key", []))
        _identify(request, settings.api_key, state.keys, sent)
    return await handler(request)


def _identify(request: web.Request, api_key: str | None, keys: Keys | None, sent: list[str]) -> None:
    """Note whose key it is. Raises :class:`HttpError` where it is nobody's, or not for this route."""
    route = _route(request)
    try:
        caller = caller_of(api_key, keys, sent)
    except WrongKey:
        asks = " With server.ui=true, the page asks for it." if route in UI_ROUTES else ""
        message = f"Wrong or missing API key; send 'Authorization: Bearer <key>' or 'x-api-key: <key>'.{asks}"
        raise HttpError(401, message, code="invalid_api_key") from None
    if caller is None:
        return
    if not caller.admin and route is not None and (route.startswith(ADMIN) or route == "/metrics"):
        raise HttpError(403, f"{route} is for keys with admin (server.keys).", code="admin_only")
    request[CALLER] = caller


async def stamp(request: web.Request, response: web.StreamResponse) -> None:
    """Puts the request id on every response, streams included, and the span of a client's trace; a server
    that is leaving keeps no connection."""
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
    if TRACE in request and request[TRACE].own:
        response.headers["traceresponse"] = request[TRACE].own
    if request.app[LISTENER].admission.leaving:
        response.force_close()
        # aiohttp has written the header fields already: without this one a client would use the connection again.
        response.headers["Connection"] = "close"


def _is_refusal(error: ApiError) -> bool:
    """Whether the request was refused at the door, as opposed to failed on the way."""
    return status_of(error) < 500 or error.code in ("draining", "not_ready")


def _is_open(route: str | None, settings: ServerSettings) -> bool:
    return route in OPEN_ROUTES or (settings.ui is True and route in UI_ROUTES)


def _route(request: web.Request) -> str | None:
    resource = request.match_info.route.resource
    return None if resource is None else resource.canonical


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "unknown"
    return f"{trace.tb_frame.f_globals.get('__name__', '?')}:{trace.tb_lineno}"
