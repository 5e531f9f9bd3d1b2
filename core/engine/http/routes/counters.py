"""``GET /engine/counters``: every metric of the engine, whatever exporters there are."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.incoming import state_of
from engine.http.state import ServerState


async def counters(http: web.Request) -> web.StreamResponse:
    return json_response(await read_counters(state_of(http), http.query.get("engine")))


async def read_counters(state: ServerState, name: str | None = None) -> dict[str, Any]:
    """``name``: the id of the engine, ``None``: the first one."""
    engine = state.engine_of(name)
    readings = await state.read_exporters(lambda: state.fleet.readings(engine))
    return {"engine": engine.id, "model": engine.model, "metrics": readings}
