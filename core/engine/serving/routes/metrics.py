"""``GET /metrics``: the pages of exporters that are scraped."""

from __future__ import annotations

from aiohttp import web

from engine.contracts.exporter import ScrapedExporter
from engine.serving.errors import ApiError
from engine.serving.preparing import state_of


async def metrics(http: web.Request) -> web.StreamResponse:
    state = state_of(http)
    scraped = [exporter for exporter in state.exporters if isinstance(exporter, ScrapedExporter)]
    if not scraped:
        raise ApiError(404, "No configured exporter has a page to scrape; see 'engine plugins'.", code="not_found")
    page = await state.read_exporters(lambda: "".join([exporter.render() for exporter in scraped]))
    return web.Response(body=page.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
