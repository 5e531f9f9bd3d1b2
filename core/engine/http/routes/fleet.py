"""``/engine/fleet``: the engines of the server, what was sent to each, and changes of them while it runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.errors import HttpError
from engine.http.incoming import state_of
from engine.http.state import ListenerState, ServerState
from engine.service.addresses import is_local_name, is_loopback
from engine.service.engines import EngineHandle
from engine.service.errors import bad_request
from engine.service.fleet import Change

FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-IP")
"""A proxy has passed the request on, and may be on this machine while its client is not."""


async def fleet(http: web.Request) -> web.StreamResponse:
    return json_response(_state(state_of(http)))


async def drain(http: web.Request) -> web.StreamResponse:
    """``?engine=ID``: it gets no more requests. Answers at once; the engine's ``load`` says what is left.
    ``force=1``: though no other engine takes requests."""
    state = await _changeable(http)
    state.fleet.drain(_named(http, state), force=flag(http, "force"))
    return json_response(_state(state))


async def undrain(http: web.Request) -> web.StreamResponse:
    """``?engine=ID``: it gets requests again."""
    state = await _changeable(http)
    state.fleet.undrain(_named(http, state))
    return json_response(_state(state))


async def restart(http: web.Request) -> web.StreamResponse:
    """All engines, one at a time, or ``?engine=ID``. 202 at once: ``change`` of ``GET /engine/fleet`` says how far it
    is. ``force=1``: though no other engine takes requests meanwhile."""
    state = await _changeable(http)
    engines = [_named(http, state)] if "engine" in http.query else list(state.engines.values())
    state.fleet.restart(engines, force=flag(http, "force"))
    return json_response(_state(state), status=202)


async def resize(http: web.Request) -> web.StreamResponse:
    """``?replicas=N``: the first N engines are up, the others stopped. 202 at once, as a restart is."""
    state = await _changeable(http)
    text = http.query.get("replicas", "")
    if not (text.isascii() and text.isdigit()) or len(text) > 4:
        raise bad_request(f"replicas={text[:16]!r}: expected a number of engines.", "replicas")
    state.fleet.resize(int(text))
    return json_response(_state(state), status=202)


async def _changeable(http: web.Request) -> ServerState:
    """The state of a server that this request may change. Raises as :func:`changeable`."""
    state = state_of(http)
    await changeable(http, state)
    return state


async def changeable(http: web.Request, state: ListenerState) -> None:
    """Raises :class:`HttpError` 403 unless the request may change what is behind the listener: without a key, none but
    this machine's own may."""
    if state.settings.api_key is None and state.keys is None and not _is_local(http):
        raise HttpError(
            403,
            "Without a key, engines can be changed from this machine alone, and through no proxy; set server.api_key "
            "to change them from elsewhere.",
            code="local_only",
        )
    async with state.bodies.read(http):  # empty; refuses what pages of other servers send
        return


def _is_local(http: web.Request) -> bool:
    """Whether it comes from this machine, and from no web page that has made its own host name point here."""
    is_passed_on = any(name in http.headers for name in FORWARDED)
    return not is_passed_on and is_loopback(http.remote or "") and is_local_name(http.headers.get("Host", ""))


def _named(http: web.Request, state: ServerState) -> EngineHandle:
    name = http.query.get("engine")
    if name is None:
        raise bad_request(f"Which engine? Send ?engine=ID; there are: {', '.join(state.engines)}.", "engine")
    return state.engine_of(name)


def flag(http: web.Request, name: str) -> bool:
    text = http.query.get(name, "0")
    if text not in ("0", "1"):
        raise bad_request(f"{name}={text[:16]!r}: expected 1 or 0.", name)
    return text == "1"


def _state(state: ServerState) -> dict[str, Any]:
    change = state.fleet.change
    return {
        "engines": [_engine(engine) for engine in state.engines.values()],
        "change": None if change is None else _change(change),
    }


def _engine(engine: EngineHandle) -> dict[str, Any]:
    """``load``: counted where requests are sent; the engine's own counts are its ``/engine/stats``. ``staying``: of its
    sequences, how many no other engine can go on with while it drains, by reason."""
    return {
        "id": engine.id,
        "model": engine.model,
        "role": engine.role,
        "state": "draining" if engine.draining and engine.state == "ready" else engine.state,
        "ready": engine.takes_requests,
        "why_not": engine.why_not,
        "pid": engine.pid,
        "host": engine.host,
        "starts": engine.supervisor.starts,
        "load": asdict(engine.load),
        "staying": engine.staying,
    }


def _change(change: Change) -> dict[str, Any]:
    """The latest restart or resize."""
    return {
        "number": change.number,
        "kind": change.kind,
        "engines": change.engines,
        "state": change.state,
        "reason": change.reason,
        "error": change.error,
        "steps": [asdict(step) for step in change.steps],
    }
