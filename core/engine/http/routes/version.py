"""``GET /version``"""

from __future__ import annotations

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.incoming import state_of


async def version(http: web.Request) -> web.StreamResponse:
    return json_response({"version": state_of(http).engine.plan.engine_version})
