"""``GET /engine/plan``: everything that was decided at assembly, and what the engine said when it was ready."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from engine.assembly.secrets import redacted
from engine.http.bodies import json_response
from engine.http.incoming import state_of
from engine.http.state import ServerState


async def plan(http: web.Request) -> web.StreamResponse:
    return json_response(read_plan(state_of(http), http.query.get("engine")))


def read_plan(state: ServerState, name: str | None = None) -> dict[str, Any]:
    """``name``: the id of the engine, ``None``: the first one."""
    engine = state.engine_of(name)
    return {"id": engine.id, "plan": redacted(msgspec.to_builtins(engine.plan)), "engine": engine.client.info}
