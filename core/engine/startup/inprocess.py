"""An engine in a thread of this process: for tests, notebooks and debuggers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from engine.assembly.plan import EnginePlan
from engine.loop.core import EngineCore
from engine.loop.driver import drive
from engine.loop.inbox import Inbox
from engine.loop.messages import (
    DeviceFailed,
    EngineInfo,
    FromEngine,
    Heartbeat,
    Progress,
    Ready,
    ResetPrefixCache,
    Shutdown,
    ToEngine,
)
from engine.loop.streams import ClientBase
from engine.startup.segments import Segments


class InprocessEngineClient(ClientBase):
    """See :class:`engine.loop.client.EngineClient`."""

    def __init__(self, plan: EnginePlan, segments: Segments | None = None) -> None:
        """``segments``: as of :class:`engine.startup.process.ProcessEngineClient`."""
        super().__init__()
        self._plan = plan
        self._segments = segments
        self._inbox = Inbox()
        self._thread: threading.Thread | None = None
        self._core: EngineCore | None = None

    async def start(self, on_progress: Callable[[Progress], None] | None = None) -> EngineInfo:
        loop = asyncio.get_running_loop()
        self._ready, self._on_progress = loop.create_future(), on_progress

        def send(message: FromEngine) -> None:
            loop.call_soon_threadsafe(self.deliver, message)

        def run() -> None:
            from engine.startup.build import build_engine
            from engine.startup.child import failure

            def failed(why: str) -> None:
                self._inbox.put(DeviceFailed(why))

            try:
                engine = build_engine(self._plan, send, on_failure=failed, segments=self._segments)
            except Exception as error:
                send(failure(error))
                return
            self._core, self._inbox.compile = engine.core, engine.grammars.prepare
            send(Ready(engine.info))
            drive(engine.core, self._inbox, send, engine.expert_load)

        self._thread = threading.Thread(target=run, name="engine", daemon=True)
        self._thread.start()
        return await self._ready

    def send(self, message: ToEngine) -> None:
        self._inbox.put(message)

    def ping(self) -> None:
        self.deliver(Heartbeat() if self._core is None else self._core.heartbeat())

    def kill(self, why: str) -> None:
        """A thread cannot be ended: it is only not listened to any more."""
        self.died(why, cause="engine_stalled")

    async def reset_prefix_cache(self) -> None:
        self.send(ResetPrefixCache())

    async def close(self) -> None:
        if self._thread is not None:
            self._inbox.put(Shutdown())
            await asyncio.to_thread(self._thread.join)
        self.died("the engine was closed", cause="engine_closed")
