"""What all routes share."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import ClientSession, web

from engine.assembly.plan import EnginePlan
from engine.contracts.config import ServerSettings
from engine.contracts.events import Event
from engine.contracts.exporter import Exporter
from engine.contracts.router import EngineView, Router
from engine.counters.engine import EngineCounters
from engine.http.bodies import Bodies, Body
from engine.http.progress import PrefillProgress
from engine.loop.client import EngineClient
from engine.machine import Meter
from engine.service.admission import Admission
from engine.service.body_parser import BodyParser
from engine.service.bus import EventBus
from engine.service.errors import ApiError
from engine.service.findings import Finders
from engine.service.latency import RollingLatency
from engine.service.logs import Repeated
from engine.service.parsing import Limits, P
from engine.service.prefix_misses import RecentPrompts
from engine.service.supervisor import Supervisor
from engine.service.tokenizer import Tokenizer
from engine.service.trace_context import TraceContext
from engine.service.waterfall import Waterfalls

ENGINE_ID = "default"
READ_S = 5.0
"""How long exporters may keep a reader of their figures waiting."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class ServerState:
    """Lives as long as the application; used on the event loop's thread only."""

    plan: EnginePlan
    client: EngineClient
    router: Router
    exporters: tuple[Exporter, ...]
    tokenizer: Tokenizer
    admission: Admission
    bodies: Bodies
    bus: EventBus
    counters: EngineCounters
    latency: RollingLatency
    waterfalls: Waterfalls
    fingerprint: str
    finders: Finders
    created: int = field(default_factory=lambda: int(time.time()))
    supervisor: Supervisor = field(init=False)
    body_parser: BodyParser = field(default_factory=BodyParser)
    machine: Meter = field(default_factory=Meter)
    prompts: RecentPrompts = field(default_factory=RecentPrompts)
    prefill: PrefillProgress = field(default_factory=PrefillProgress)
    router_failures: Repeated = field(default_factory=lambda: Repeated("router failed"))
    session: ClientSession | None = None
    """For proxied requests; opened with the application."""

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(self.client, self.settings.stall_s, serving_s=self.plan.stall_s)

    @property
    def settings(self) -> ServerSettings:
        return self.plan.settings.server

    @property
    def model(self) -> str:
        return self.plan.model.name

    @property
    def max_len(self) -> int:
        """Most tokens of one sequence; the engine knows better than the plan once it is up."""
        info = self.client.info
        return min(self.plan.max_len, info.max_len) if info else self.plan.max_len

    @property
    def vocab_size(self) -> int:
        return self.plan.model.vocab_size

    def fleet(self) -> tuple[EngineView, ...]:
        stats = self.client.stats
        alive = self.client.alive and self.supervisor.state == "serving"
        return (EngineView(ENGINE_ID, self.model, alive, stats.running, stats.waiting, stats.kv_used),)

    async def parse(self, kind: type[P], body: Body) -> P:
        """See :func:`engine.service.parsing.parse`."""
        limits = Limits(self.model, self.settings.max_n, self.max_len, self.vocab_size, self.tokenizer.most_tokens)
        return await self.body_parser.parse(kind, body.data, limits, body.client)

    async def read_exporters(self, function: Callable[[], T]) -> T:
        """What ``function`` reads from exporters, behind everything published so far. Raises :class:`ApiError` 503
        while one of them does not return."""
        try:
            async with asyncio.timeout(READ_S):
                return await asyncio.wrap_future(self.bus.read(function))
        except TimeoutError:
            message = f"An exporter has not returned for {READ_S:.0f} s; nothing can be read from exporters meanwhile."
            raise ApiError(503, message, code="exporter_blocked", retry_after_s=2) from None

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a few tokens from anywhere in a prompt."""
        table = self.tokenizer.token_bytes
        return b"".join([table[token] for token in tokens]).decode(errors="replace")

    def check_engine(self) -> None:
        """Raises :class:`ApiError` 503 unless the engine can take work."""
        reason = self.supervisor.not_ready()
        if reason is not None:
            raise ApiError(503, f"Not ready: {reason}.", code="not_ready", retry_after_s=2)


class Recorder:
    """Feeds from the event bus what the server keeps for its own routes."""

    def __init__(self, add: Callable[[Sequence[Event]], None]) -> None:
        self.export = add

    def close(self) -> None:
        """Nothing to flush."""


STATE: web.AppKey[ServerState] = web.AppKey("state", ServerState)
TRACE: web.RequestKey[TraceContext] = web.RequestKey("trace", TraceContext)


def fingerprint(plan: EnginePlan) -> str:
    """``system_fingerprint``: changes when anything about the engine does."""
    return "fp_" + hashlib.sha256(plan.to_json()).hexdigest()[:10]
