"""``GET /engine/stats``: rows, queues and KV blocks as the engine last reported them, and the machine as it is now."""

from __future__ import annotations

import asyncio

from aiohttp import web
from msgspec.structs import replace

from engine.http.bodies import json_response
from engine.http.incoming import state_of
from engine.http.state import ServerState
from engine.loop.messages import EngineStats


async def stats(http: web.Request) -> web.StreamResponse:
    return json_response(await read_stats(state_of(http)))


async def read_stats(state: ServerState) -> EngineStats | None:
    machine = await asyncio.to_thread(state.machine.read)
    return replace(state.engine.client.stats, machine=machine)
