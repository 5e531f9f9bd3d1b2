"""Web pages of other origins: which may call this server (the Fetch standard, "CORS protocol")."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

METHODS = "GET, POST, DELETE"
MAX_AGE_S = 600
"""How long a browser need not ask again."""
EXPOSED = "X-Request-Id, Retry-After, traceresponse"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class CrossOrigin:
    """``origins``: ``server.cors_origins``. Credentials of the browser, as cookies, are never asked for."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def allowed(self, request: web.Request) -> str | None:
        """The origin that a response to the request names, if any."""
        if "*" in self._origins:
            return "*"
        origin = request.headers.get("Origin")
        return origin if origin in self._origins else None

    @web.middleware
    async def answer_preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """What a browser asks on its own before it sends a request. It cannot send a key with that."""
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not asks or self.allowed(request) is None:
            return await handler(request)
        headers = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(MAX_AGE_S)}
        if wanted := request.headers.get("Access-Control-Request-Headers"):
            headers["Access-Control-Allow-Headers"] = wanted
        return web.Response(status=204, headers=headers)

    async def stamp(self, request: web.Request, response: web.StreamResponse) -> None:
        """Names the origin on every response, streams and errors included."""
        if not self._origins:
            return
        if "*" not in self._origins:
            varies = response.headers.get("Vary")
            response.headers["Vary"] = f"{varies}, Origin" if varies else "Origin"
        if (origin := self.allowed(request)) is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED
