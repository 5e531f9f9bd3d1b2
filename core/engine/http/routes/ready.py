"""``GET /ready``: should requests be sent here now?"""

from __future__ import annotations

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.incoming import state_of
from engine.service.engines import not_ready


async def ready(http: web.Request) -> web.StreamResponse:
    """200 when the engine is up, makes progress whenever it owes output, and the server is not draining."""
    state = state_of(http)
    reason = "draining" if state.admission.draining else state.engine.supervisor.not_ready()
    if reason is not None:
        raise not_ready(reason)
    return json_response({"status": "ready", "engine": state.engine.id, "step": state.engine.client.stats.step})
