"""What all routes of an application share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import ClientSession, web

from engine.contracts.config import ServerSettings, SloSettings
from engine.contracts.counters import Reading
from engine.contracts.events import DEFAULT_ENGINE, Event
from engine.contracts.exporter import CountersExporter, Exporter
from engine.http.bodies import Bodies, Body
from engine.http.progress import PrefillProgress
from engine.machine import Meter
from engine.service.admission import Admission
from engine.service.batches.batches import Batches
from engine.service.body_parser import BodyParser
from engine.service.bus import EventBus
from engine.service.dispatch import Dispatcher
from engine.service.engines import EngineHandle
from engine.service.errors import ApiError
from engine.service.findings import Finders
from engine.service.fleet import Fleet
from engine.service.keys import Caller, Keys
from engine.service.parsing import P
from engine.service.response_store import ResponseStore
from engine.service.scaler import Scaler
from engine.service.trace_context import TraceContext
from engine.service.waterfall import Waterfalls

READ_S = 5.0
"""How long exporters may keep a reader of their figures waiting."""

T = TypeVar("T")


@dataclass(slots=True, eq=False, kw_only=True)
class ListenerState:
    """What an application holds for as long as it lives, whatever is behind it. Use on the event loop's thread only."""

    settings: ServerSettings
    keys: Keys | None
    """Those of clients; ``None``: there are none."""
    exporters: tuple[Exporter, ...]
    admission: Admission
    bodies: Bodies
    bus: EventBus
    created: int = field(default_factory=lambda: int(time.time()))
    session: ClientSession | None = None
    """The client for requests that are passed on; opened with the application."""

    @property
    def refuser(self) -> str:
        """The engine for which requests are counted that reach none."""
        return DEFAULT_ENGINE

    async def read_exporters(self, function: Callable[[], T]) -> T:
        """What ``function`` reads from exporters, after everything published so far. Raises :class:`ApiError` 503
        while one of them does not return."""
        try:
            async with asyncio.timeout(READ_S):
                return await asyncio.wrap_future(self.bus.read(function))
        except TimeoutError:
            message = f"An exporter has not returned for {READ_S:.0f} s; nothing can be read from exporters meanwhile."
            raise ApiError("unavailable", message, code="exporter_blocked", retry_after_s=2) from None


@dataclass(slots=True, eq=False, kw_only=True)
class ServerState(ListenerState):
    """Of engines' server."""

    slo: SloSettings
    engines: Mapping[str, EngineHandle]
    """The server's engines, by id."""
    fleet: Fleet
    scaler: Scaler
    dispatcher: Dispatcher
    waterfalls: Waterfalls
    finders: Finders
    responses: ResponseStore
    batches: Batches = field(init=False)
    body_parser: BodyParser = field(default_factory=BodyParser)
    machine: Meter = field(default_factory=Meter)
    prefill: PrefillProgress = field(default_factory=PrefillProgress)

    @property
    def engine(self) -> EngineHandle:
        """The first of :attr:`engines`, whose model the server offers."""
        return next(iter(self.engines.values()))

    @property
    def refuser(self) -> str:
        return self.engine.id

    def engine_of(self, name: str | None) -> EngineHandle:
        """The engine with this id; ``None``: the first one. Raises :class:`ApiError` ``not_found``."""
        if name is None:
            return self.engine
        if name not in self.engines:
            known = ", ".join(self.engines)
            raise ApiError("not_found", f"There is no engine {name[:64]!r}; there are: {known}.", param="engine")
        return self.engines[name]

    def not_ready(self) -> str | None:
        """Why no request is taken now; ``None``: some engine takes them, or starts for the next one."""
        if self.admission.leaving:
            return "draining"
        if self.scaler.is_asleep:
            return None
        reasons = {engine.id: engine.why_not for engine in self.engines.values()}
        if None in reasons.values():
            return None
        one, *more = reasons.items()
        return one[1] if not more else ", ".join(f"{name}: {why}" for name, why in reasons.items())

    async def parse(self, kind: type[P], body: Body) -> P:
        """See :func:`engine.service.parsing.parse`."""
        return await self.body_parser.parse(kind, body.data, self.engine.limits, body.client)


class Recorder:
    """Feeds from the event bus what the server keeps for its own routes."""

    def __init__(self, add: Callable[[Sequence[Event]], None]) -> None:
        self.export = add

    def close(self) -> None:
        """Nothing to flush."""


def watch(exporters: Sequence[Exporter], readings: Callable[[], list[Reading]]) -> None:
    """Let exporters that show counters ask for these."""
    for exporter in exporters:
        if isinstance(exporter, CountersExporter):
            exporter.watch(readings)


LISTENER: web.AppKey[ListenerState] = web.AppKey("listener", ListenerState)
"""Of every application."""
STATE: web.AppKey[ServerState] = web.AppKey("state", ServerState)
"""The same, of an application with engines."""
CALLER: web.RequestKey[Caller] = web.RequestKey("caller", Caller)
"""Whose key a request has; absent where no keys are told apart."""
SLO_CLASS: web.RequestKey[str] = web.RequestKey("slo_class", str)
"""The class of a request; absent where there are none."""
TRACE: web.RequestKey[TraceContext] = web.RequestKey("trace", TraceContext)
