"""``GET /ui/``: the page that shows the engine to a browser. Its files hold no data: it reads the other routes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

FOLDER = Path(__file__).parents[1] / "ui"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Files of other types are not served."""
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
UI_ROUTES = ("/ui", "/ui/", "/ui/{file}")
"""The page's routes, as the router names them."""


@dataclass(frozen=True, slots=True)
class File:
    body: bytes
    headers: dict[str, str]
    etag: str


def read_files() -> dict[str, File]:
    """The files of the page, by path below ``/ui/``. They are read once, so that no request names a path on disk."""
    found = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in TYPES:
            body = path.read_bytes()
            etag = f'W/"{hashlib.sha256(body).hexdigest()[:16]}"'
            headers = HEADERS | {"Content-Type": TYPES[path.suffix], "ETag": etag}
            found[path.relative_to(FOLDER).as_posix()] = File(body, headers, etag)
    return found


def add_ui(router: web.UrlDispatcher) -> None:
    """Serve the page and its files."""
    files = read_files()

    async def page(http: web.Request) -> web.StreamResponse:
        return web.Response(status=308, headers={"Location": "ui/"})

    async def file(http: web.Request) -> web.StreamResponse:
        found = files.get(http.match_info.get("file", "index.html"))
        if found is None:
            raise web.HTTPNotFound
        if found.etag in http.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=found.headers)
        return web.Response(body=found.body, headers=found.headers)

    router.add_get("/ui", page)
    router.add_get("/ui/", file)
    router.add_get("/ui/{file:.+}", file)
