"""``GET /engine/stats``: rows, queues and KV blocks as the engine last reported them, and this machine as it is now."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from msgspec.structs import asdict

from engine.http.bodies import json_response
from engine.http.incoming import state_of
from engine.http.state import ServerState


async def stats(http: web.Request) -> web.StreamResponse:
    return json_response(await read_stats(state_of(http), http.query.get("engine")))


async def read_stats(state: ServerState, name: str | None = None) -> dict[str, Any]:
    """``name``: the id of the engine, ``None``: the first one. ``machine``: ``None`` for an engine on another one."""
    engine = state.engine_of(name)
    machine = await asyncio.to_thread(state.machine.read) if engine.host is None else None
    where = {"pid": engine.pid, "host": engine.host}
    return {"engine": engine.id, **where, **asdict(engine.client.stats), "machine": machine}
