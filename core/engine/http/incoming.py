"""What a request says beside its body: who sent it, and the trace it belongs to."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from aiohttp import web

from engine.http.state import CALLER, LISTENER, SLO_CLASS, STATE, TRACE, ListenerState, ServerState
from engine.service.admission import Flight
from engine.service.keys import Caller, client_name
from engine.service.promises import HEADER as SLO_HEADER
from engine.service.promises import Promise, promise
from engine.service.response_store import Tenant
from engine.service.timings import Arrival
from engine.service.trace_context import trace_context


def state_of(http: web.Request) -> ServerState:
    return http.app[STATE]


def listener_of(http: web.Request) -> ListenerState:
    return http.app[LISTENER]


def caller_of(http: web.Request) -> Caller | None:
    """Whose key it has; ``None``: no keys are told apart."""
    return http.get(CALLER)


def owner_of(http: web.Request) -> str:
    """Whose files and batches a request may see: those of its tenant, or all where no keys are told apart."""
    caller = caller_of(http)
    return "" if caller is None else caller.of


def client_of(http: web.Request, user: str | None = None) -> str:
    """Who sent a request: the tenant of its key or else its address, and the user it names where that is trusted. The
    queue is fair among clients."""
    trusted = user if listener_of(http).settings.trust_user else None
    return client_name(caller_of(http), http.remote or "", trusted)


def promise_of(http: web.Request) -> Promise | None:
    """The class of a request, by its key and its header. Raises :class:`ApiError` ``invalid``."""
    promised = promise(state_of(http).slo, caller_of(http), http.headers.get(SLO_HEADER))
    if promised is not None:
        http[SLO_CLASS] = promised.name
    return promised


def entered(http: web.Request, user: str | None, sequences: int) -> AbstractContextManager[Flight]:
    """As :meth:`engine.service.admission.Admission.enter`, with the limit of the request's key and in its class."""
    caller = caller_of(http)
    most = None if caller is None else caller.max_sequences
    return listener_of(http).admission.enter(client_of(http, user), sequences, most, http.get(SLO_CLASS, ""))


def tenant_of(http: web.Request, user: str | None, cache_salt: str | None) -> Tenant:
    """Whose responses a request may go on from. Its address says nothing here: those of one client change, and those
    of many are one behind a gateway."""
    caller, trusted = caller_of(http), (user or "") if state_of(http).settings.trust_user else ""
    return (trusted if caller is None else f"{caller.of}/{trusted}"), cache_salt or ""


def arrival_of(http: web.Request, received_s: float, parsed_s: float) -> Arrival:
    """The arrival of a request whose prompts were tokenized just now."""
    receive_ms, tokenize_ms = (parsed_s - received_s) * 1e3, (time.monotonic() - parsed_s) * 1e3
    trace = trace_context(http.headers.getall("traceparent", []), http.headers.getall("tracestate", []))
    http[TRACE] = trace
    return Arrival(received_s, receive_ms, tokenize_ms, trace)
