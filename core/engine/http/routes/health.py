"""``GET /health``: is there a point in keeping this process?"""

from __future__ import annotations

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.incoming import state_of
from engine.service.errors import ApiError


async def health(http: web.Request) -> web.StreamResponse:
    """200 while the process answers and an engine is alive, hangs or is being (re)started: restarting this process
    would gain nothing. Whether requests should come is for ``/ready`` to say."""
    state = state_of(http)
    if all(engine.is_over for engine in state.engines.values()) and not state.scaler.is_asleep:
        raise ApiError("unavailable", "The engine keeps crashing; giving up.", code="engine_failed", retry_after_s=30)
    engine = next(filter(lambda engine: engine.takes_requests, state.engines.values()), state.engine)
    return json_response({"status": "ok", "engine": engine.why_not or engine.state})
