"""``GET /``: clients ask whether a server is there at all, people where to go."""

from __future__ import annotations

from aiohttp import web

from engine.http.bodies import json_response


async def root(http: web.Request) -> web.StreamResponse:
    return json_response({"status": "ok", "api": "/v1", "page": "/ui/"})
