"""``GET /metrics``: the pages of exporters that are scraped."""

from __future__ import annotations

from aiohttp import web

from engine.contracts.exporter import ScrapedExporter
from engine.http.incoming import listener_of
from engine.http.state import ListenerState
from engine.plugin_guard.calls import contract_error, quote
from engine.service.errors import ApiError


async def metrics(http: web.Request) -> web.StreamResponse:
    state = listener_of(http)
    scraped = [exporter for exporter in state.exporters if isinstance(exporter, ScrapedExporter)]
    if not scraped:
        raise ApiError(
            "not_found", "No configured exporter has a page to scrape; see 'engine plugins'.", code="not_found"
        )
    found = await state.read_exporters(lambda: [_page(exporter, state) for exporter in scraped])
    pages = [page for page in found if page is not None]
    if not pages:
        raise ApiError("failed", "No exporter could write its page.", code="exporter_failed")
    body = "".join(pages).encode()
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _page(exporter: ScrapedExporter, state: ListenerState) -> str | None:
    """What an exporter has to show; ``None`` for one that fails, which is reported and keeps no other's from view."""
    try:
        page = exporter.render()
        if not isinstance(page, str):
            raise contract_error(exporter, "render", f"returned {quote(page)}, expected a text")
        page.encode()
    except Exception as error:
        state.bus.report(exporter, error, "render")
        return None
    return page
