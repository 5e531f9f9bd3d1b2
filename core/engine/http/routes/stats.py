"""``GET /engine/stats``: rows, queues and KV blocks as the engine last reported them."""

from __future__ import annotations

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.preparing import state_of


async def stats(http: web.Request) -> web.StreamResponse:
    return json_response(state_of(http).client.stats)
