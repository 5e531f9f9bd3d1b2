"""``GET /engine/counters``: every metric of the engine, whatever exporters there are."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.incoming import state_of
from engine.http.state import ServerState


async def counters(http: web.Request) -> web.StreamResponse:
    return json_response(await read_counters(state_of(http)))


async def read_counters(state: ServerState) -> dict[str, Any]:
    return {"model": state.engine.model, "metrics": await state.read_exporters(state.engine.counters.readings)}
