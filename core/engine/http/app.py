"""The HTTP application, and the process that serves it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from aiohttp import web

from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.contracts.command import CommandProvider
from engine.contracts.config import ServerSettings
from engine.contracts.exporter import Exporter
from engine.contracts.router import Router
from engine.http.answering import answer
from engine.http.bodies import Bodies
from engine.http.endpoints import ENDPOINTS
from engine.http.line_answers import BATCHED, LineAnswers
from engine.http.machine import watch_machine
from engine.http.middleware import application
from engine.http.proxy import new_session
from engine.http.routes import batches, files
from engine.http.routes import fleet as fleet_routes
from engine.http.routes.count_tokens import count_tokens
from engine.http.routes.counters import counters as counters_route
from engine.http.routes.detokenize import detokenize
from engine.http.routes.expert_load import expert_load
from engine.http.routes.findings import find, list_finders
from engine.http.routes.health import health
from engine.http.routes.history import history
from engine.http.routes.latency import latency
from engine.http.routes.metrics import metrics
from engine.http.routes.models import list_models, one_model
from engine.http.routes.ollama import api_version, ps, show, tags
from engine.http.routes.plan import plan as plan_route
from engine.http.routes.ready import ready
from engine.http.routes.requests import one_request, recent_requests
from engine.http.routes.responses import delete_response, input_items, one_response
from engine.http.routes.root import root
from engine.http.routes.scale import scale
from engine.http.routes.stats import stats
from engine.http.routes.tokenize import tokenize
from engine.http.routes.tokenizer_info import tokenizer_info
from engine.http.routes.ui import add_ui
from engine.http.routes.version import version
from engine.http.state import STATE, Recorder, ServerState, watch
from engine.loop.client import EngineClient
from engine.service.admission import Admission
from engine.service.batches.batches import Batches
from engine.service.bus import EventBus
from engine.service.database import InUse
from engine.service.dispatch import Dispatcher
from engine.service.engines import EngineHandle, count_for
from engine.service.findings import Finders
from engine.service.fleet import Fleet
from engine.service.grammar_worker import GrammarWorker
from engine.service.grammars import GrammarChecks
from engine.service.keys import Keys
from engine.service.placing import Placing
from engine.service.response_rows import ResponseRows
from engine.service.response_store import ResponseStore
from engine.service.scaler import Scaler
from engine.service.tokenizer import Tokenizer
from engine.service.waterfall import Waterfalls


def build_app(
    plan: EnginePlan,
    clients: Mapping[str, EngineClient],
    router: Router,
    exporters: Sequence[Exporter],
    tokenizer: Tokenizer,
    finders: Mapping[str, CommandProvider] | None = None,
    grammars: GrammarWorker | None = None,
) -> web.Application:
    """The application over engines of one plan that somebody else starts, by id. ``finders``: commands that have
    findings, by name; ``grammars``: refuses those that cannot be enforced, ``None``: all of them.
    Call inside a running event loop. Raises :class:`AssemblyError` where ``server.keys`` cannot be read or
    ``server.store_path`` cannot be used."""
    checks = GrammarChecks(grammars, plan.constraint)
    role = plan.settings.fleet.role
    engines = {
        name: EngineHandle(name, plan, client, tokenizer, role(number), checks)
        for number, (name, client) in enumerate(clients.items())
    }
    state = _state(plan, engines, router, exporters, finders or {})
    for engine in engines.values():
        engine.publish_to(state.bus.publish)
        engine.client.on_events(state.prefill.add)
    app = application(state)
    app[STATE] = state
    app.cleanup_ctx.append(_resources)
    _add_routes(app.router)
    if plan.settings.server.ui is not False:
        add_ui(app.router)
    return app


def _state(
    plan: EnginePlan,
    engines: Mapping[str, EngineHandle],
    router: Router,
    exporters: Sequence[Exporter],
    finders: Mapping[str, CommandProvider],
) -> ServerState:
    settings, waterfalls = plan.settings.server, Waterfalls()
    fleet = Fleet(engines, settings.drain_s, plan.settings.fleet.at_start)
    watch(exporters, lambda: [reading for engine in engines.values() for reading in fleet.readings(engine)])
    bus = EventBus([Recorder(partial(count_for, engines)), *exporters, Recorder(waterfalls.add)])
    state = ServerState(
        settings=settings,
        slo=plan.settings.slo,
        keys=None if settings.keys is None else Keys(settings.keys, plan.settings.slo.classes),
        engines=engines,
        fleet=fleet,
        scaler=Scaler(plan.settings.fleet.autoscale, fleet, engines),
        dispatcher=Dispatcher(Placing(router), engines, bus),
        exporters=tuple(exporters),
        admission=Admission(settings.max_queue),
        bodies=Bodies(settings.max_body_bytes),
        bus=bus,
        waterfalls=waterfalls,
        finders=Finders(finders),
        responses=_responses(settings),
    )
    state.batches = Batches(
        plan.settings.batches,
        engines,
        state.admission,
        LineAnswers(state),
        [endpoint.path for endpoint in BATCHED],
        lambda event: bus.publish((event,)),
        settings.max_body_bytes,
        lambda: state.scaler.is_asleep,
    )
    return state


def _responses(settings: ServerSettings) -> ResponseStore:
    """Raises :class:`AssemblyError` for a folder that cannot be used."""
    most, keep_s = settings.store_bytes, settings.store_s
    if settings.store_path == "none" or not most:
        return ResponseStore(most, keep_s)
    try:
        return ResponseStore(most, keep_s, rows=ResponseRows(Path(settings.store_path)))
    except InUse:
        why = "another server has it; give each its own"
    except (OSError, sqlite3.Error) as error:
        why = str(error)
    raise AssemblyError([f"server.store_path={settings.store_path}: {why}"])


def _add_routes(router: web.UrlDispatcher) -> None:
    for endpoint in ENDPOINTS:
        router.add_post(endpoint.path, partial(answer, endpoint))
    router.add_post("/v1/messages/count_tokens", count_tokens)
    router.add_get("/v1/responses/{response}", one_response)
    router.add_delete("/v1/responses/{response}", delete_response)
    router.add_get("/v1/responses/{response}/input_items", input_items)
    router.add_post("/v1/files", files.upload)
    router.add_get("/v1/files", files.listed)
    router.add_get("/v1/files/{file}", files.one)
    router.add_delete("/v1/files/{file}", files.delete)
    router.add_get("/v1/files/{file}/content", files.content)
    router.add_post("/v1/batches", batches.create)
    router.add_get("/v1/batches", batches.listed)
    router.add_get("/v1/batches/{batch}", batches.one)
    router.add_post("/v1/batches/{batch}/cancel", batches.cancel)
    router.add_get("/api/version", api_version)
    router.add_get("/api/tags", tags)
    router.add_get("/api/ps", ps)
    router.add_post("/api/show", show)
    router.add_get("/v1/models", list_models)
    router.add_get("/v1/models/{model:.+}", one_model)
    router.add_post("/tokenize", tokenize)
    router.add_post("/detokenize", detokenize)
    router.add_get("/tokenizer_info", tokenizer_info)
    router.add_get("/version", version)
    router.add_get("/", root)
    router.add_get("/health", health)
    router.add_get("/ready", ready)
    router.add_get("/metrics", metrics)
    router.add_get("/engine/fleet", fleet_routes.fleet)
    router.add_post("/engine/fleet/drain", fleet_routes.drain)
    router.add_post("/engine/fleet/undrain", fleet_routes.undrain)
    router.add_post("/engine/fleet/restart", fleet_routes.restart)
    router.add_post("/engine/fleet/resize", fleet_routes.resize)
    router.add_get("/engine/scale", scale)
    router.add_get("/engine/plan", plan_route)
    router.add_get("/engine/latency", latency)
    router.add_get("/engine/history", history)
    router.add_get("/engine/stats", stats)
    router.add_get("/engine/counters", counters_route)
    router.add_get("/engine/requests", recent_requests)
    router.add_get("/engine/requests/{request}", one_request)
    router.add_get("/engine/expert_load", expert_load)
    router.add_get("/engine/findings", list_finders)
    router.add_post("/engine/findings/{command}", find)


async def _resources(app: web.Application) -> AsyncIterator[None]:
    state = app[STATE]
    state.session = new_session()
    await state.batches.start()
    watching = asyncio.create_task(watch_machine(state))
    yield
    watching.cancel()
    await state.batches.close()
    await state.session.close()
    await asyncio.to_thread(state.responses.close)
    state.engine.tokenizer.close()
    state.engine.grammars.close()
    state.body_parser.close()
    await asyncio.to_thread(state.bus.close)
