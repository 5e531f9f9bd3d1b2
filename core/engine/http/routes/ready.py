"""``GET /ready``: should requests be sent here now?"""

from __future__ import annotations

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.incoming import state_of
from engine.service.engines import not_ready


async def ready(http: web.Request) -> web.StreamResponse:
    """200 when an engine is up, makes progress whenever it owes output, and the server is not draining; also while all
    are stopped and the next request starts one."""
    state = state_of(http)
    if (reason := state.not_ready()) is not None:
        raise not_ready(reason)
    engine = next((engine for engine in state.engines.values() if engine.takes_requests), state.engine)
    return json_response({"status": "ready", "engine": engine.id, "step": engine.client.stats.step})
