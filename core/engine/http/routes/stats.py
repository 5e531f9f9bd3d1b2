"""``GET /engine/stats``: rows, queues and KV blocks as the engine last reported them, and the machine as it is now."""

from __future__ import annotations

import asyncio

from aiohttp import web
from msgspec.structs import replace

from engine.http.bodies import json_response
from engine.http.preparing import state_of


async def stats(http: web.Request) -> web.StreamResponse:
    state = state_of(http)
    machine = await asyncio.to_thread(state.machine.read)
    return json_response(replace(state.client.stats, machine=machine))
