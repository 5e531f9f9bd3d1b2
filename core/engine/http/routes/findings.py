"""``/engine/findings``: what commands of plugins have to say about this engine."""

from __future__ import annotations

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.incoming import state_of
from engine.http.reader import OwnEngine
from engine.service.errors import ApiError


async def list_finders(http: web.Request) -> web.StreamResponse:
    """Answers with the commands that have findings, each with a line that says what it does, and what it found of the
    engine, ``?engine=ID`` or the first, when it last ran (``latest``; ``null``: it has not)."""
    state = state_of(http)
    finders, engine = state.finders, state.engine_of(http.query.get("engine")).id
    commands = [
        {"name": name, "doc": each.doc, "latest": finders.latest(name, engine)}
        for name, each in finders.commands.items()
    ]
    return json_response({"commands": commands})


async def find(http: web.Request) -> web.StreamResponse:
    """Runs a command on an engine, ``?engine=ID`` or the first. Takes as long as the command does."""
    state = state_of(http)
    if state.admission.draining:
        raise ApiError("unavailable", "The server is shutting down.", code="draining", retry_after_s=5)
    engine = OwnEngine(state, http.query.get("engine"))
    async with state.bodies.read(http):  # empty; refuses what pages of other servers send
        return json_response(await state.finders.run(http.match_info["command"], engine, engine.id))
