"""What a request says beside its body: who sent it, and the trace it belongs to."""

from __future__ import annotations

import time

from aiohttp import web

from engine.http.state import LISTENER, STATE, TRACE, ListenerState, ServerState
from engine.service.addresses import network_of
from engine.service.response_store import Tenant
from engine.service.timings import Arrival
from engine.service.trace_context import trace_context


def state_of(http: web.Request) -> ServerState:
    return http.app[STATE]


def listener_of(http: web.Request) -> ListenerState:
    return http.app[LISTENER]


def client_of(http: web.Request, user: str | None = None) -> str:
    """Who sent a request: its address, or the user it names where that is trusted. The queue is fair among clients."""
    trusted = user and listener_of(http).settings.trust_user
    return f"user:{user}" if trusted else f"address:{network_of(http.remote or '')}"


def tenant_of(http: web.Request, user: str | None, cache_salt: str | None) -> Tenant:
    """Whose responses a request may go on from. Its address says nothing here: those of one client change, and those
    of many are one behind a gateway."""
    return (user or "") if state_of(http).settings.trust_user else "", cache_salt or ""


def arrival_of(http: web.Request, received_s: float, parsed_s: float) -> Arrival:
    """The arrival of a request whose prompts were tokenized just now."""
    receive_ms, tokenize_ms = (parsed_s - received_s) * 1e3, (time.monotonic() - parsed_s) * 1e3
    trace = trace_context(http.headers.getall("traceparent", []), http.headers.getall("tracestate", []))
    http[TRACE] = trace
    return Arrival(received_s, receive_ms, tokenize_ms, trace)
