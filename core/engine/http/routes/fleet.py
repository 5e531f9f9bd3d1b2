"""``GET /engine/fleet``: the engines of the server, and what was sent to each."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.incoming import state_of
from engine.service.engines import EngineHandle


async def fleet(http: web.Request) -> web.StreamResponse:
    return json_response({"engines": [_engine(engine) for engine in state_of(http).engines.values()]})


def _engine(engine: EngineHandle) -> dict[str, Any]:
    """``load``: counted where requests are sent; the engine's own counts are its ``/engine/stats``."""
    return {
        "id": engine.id,
        "model": engine.model,
        "state": "draining" if engine.draining else engine.state,
        "ready": engine.takes_requests,
        "why_not": engine.why_not,
        "starts": engine.supervisor.starts,
        "load": asdict(engine.load),
    }
