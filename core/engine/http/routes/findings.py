"""``/engine/findings``: what commands of plugins have to say about this engine."""

from __future__ import annotations

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.preparing import state_of
from engine.service.errors import ApiError


async def list_finders(http: web.Request) -> web.StreamResponse:
    """The commands that print findings, each with a line that says what it does."""
    commands = state_of(http).finders.commands
    return json_response({"commands": [{"name": name, "doc": each.doc} for name, each in commands.items()]})


async def find(http: web.Request) -> web.StreamResponse:
    """Runs a command on this engine and answers with the JSON it prints. Takes as long as the command does."""
    state = state_of(http)
    if state.admission.draining:
        raise ApiError(503, "The server is shutting down.", code="draining", retry_after_s=5)
    assert http.transport is not None
    host, port = http.transport.get_extra_info("sockname")[:2]  # where the asker has found this server
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    async with state.bodies.read(http):  # empty; refuses what pages of other servers send
        found = await state.finders.run(http.match_info["command"], url)
    return web.Response(body=found, content_type="application/json")
