"""The application of a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial

from aiohttp import web

from engine.contracts.config import Settings
from engine.contracts.exporter import Exporter
from engine.contracts.router import Router
from engine.http.bodies import Bodies
from engine.http.endpoints import ENDPOINTS
from engine.http.gateway import routes
from engine.http.gateway.answering import answer
from engine.http.gateway.state import GATEWAY, GatewayState
from engine.http.gateway.tiers import TIERS, Tiers
from engine.http.middleware import application
from engine.http.proxy import new_session
from engine.http.routes.metrics import metrics
from engine.http.state import Recorder, watch
from engine.service.admission import Admission
from engine.service.bus import EventBus
from engine.service.keys import Keys
from engine.service.placing import Placing
from engine.service.targets import Targets


def build_gateway(
    settings: Settings,
    make_router: Callable[[], Router],
    exporters: Sequence[Exporter],
    environ: Mapping[str, str],
) -> web.Application:
    """Call inside a running event loop. ``environ``: has the keys of targets. Raises :class:`AssemblyError`
    where ``server.keys`` or the table of a cascade cannot be read."""
    targets = Targets(settings.gateway, environ)
    watch(exporters, targets.readings)
    state = GatewayState(
        settings=settings.server,
        keys=None if settings.server.keys is None else Keys(settings.server.keys),
        gateway=settings.gateway,
        targets=targets,
        make_router=make_router,
        choosing=Placing(make_router()),
        exporters=tuple(exporters),
        admission=Admission(settings.server.max_queue * len(targets)),
        bodies=Bodies(settings.server.max_body_bytes),
        bus=EventBus([Recorder(targets.count), *exporters]),
    )
    app = application(state)
    app[GATEWAY] = state
    app[TIERS] = Tiers.of(settings.gateway)
    app.cleanup_ctx.append(_resources)
    for endpoint in ENDPOINTS:
        app.router.add_post(endpoint.path, partial(answer, endpoint, endpoint.kind))
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/health", routes.health)
    app.router.add_get("/ready", routes.ready)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/engine/fleet", routes.fleet)
    app.router.add_get("/engine/scale", routes.scale)
    app.router.add_get("/engine/names", routes.names)
    app.router.add_post("/engine/fleet/drain", routes.drain)
    app.router.add_post("/engine/fleet/undrain", routes.undrain)
    app.router.add_route("*", "/engine/{rest:.*}", routes.no_engine)
    return app


async def _resources(app: web.Application) -> AsyncIterator[None]:
    state = app[GATEWAY]
    state.session = new_session()
    yield
    await app[TIERS].close()
    await state.session.close()
    await asyncio.to_thread(state.bus.close)
