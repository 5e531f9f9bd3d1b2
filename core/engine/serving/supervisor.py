"""Keeps an engine behind the listener: starts it, notices its death, starts it again, knows when to give up."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import structlog

from engine.loop.client import EngineClient, EngineDead
from engine.loop.messages import Progress

MAX_CRASHES = 3
CRASH_WINDOW_S = 60.0
STALL_S = 120.0
"""No step for so long while work is pending means stuck. Generous: one step over a long prompt is progress too."""

State = Literal["loading", "serving", "restarting", "failed"]
log = structlog.get_logger("engine.supervisor")


class Supervisor:
    """``pending()``: sequences the engine owes output for."""

    def __init__(
        self,
        client: EngineClient,
        pending: Callable[[], int],
        *,
        poll_s: float = 0.1,
        backoff_s: float = 0.5,
        stall_s: float = STALL_S,
    ) -> None:
        self._client = client
        self._pending = pending
        self._poll_s = poll_s
        self._backoff_s = backoff_s
        self._stall_s = stall_s
        self._crashes: deque[float] = deque(maxlen=MAX_CRASHES)
        self._step = -1
        self._moved_s = time.monotonic()
        self.state: State = "loading"

    async def start(self, on_progress: Callable[[Progress], None] | None = None) -> None:
        """First start. Raises :class:`EngineDead` with the engine's own words."""
        await self._client.start(on_progress)
        self._serving()

    async def watch(self) -> None:
        """Restart the engine whenever it dies. Raises :class:`EngineDead` after three crashes in 60 s."""
        while True:
            await asyncio.sleep(self._poll_s)
            self._look()
            if not self._client.alive:
                self.state = "restarting"
                log.error("engine died", cause=self._client.cause_of_death)
                await self._restart()

    def not_ready(self) -> str | None:
        """Why the engine cannot serve right now; ``None`` if it can."""
        if self.state != "serving":
            return f"engine {self.state}"
        if not self._client.alive:
            return "engine dead"
        self._look()
        stalled_s = time.monotonic() - self._moved_s
        if stalled_s > self._stall_s:
            return f"engine stalled: no step for {stalled_s:.0f} s with {self._pending()} sequences pending"
        return None

    async def _restart(self) -> None:
        words = self._client.cause_of_death
        while True:
            self._crashes.append(time.monotonic())
            if len(self._crashes) == MAX_CRASHES and self._crashes[-1] - self._crashes[0] <= CRASH_WINDOW_S:
                self.state = "failed"
                raise EngineDead(f"{MAX_CRASHES} crashes within {CRASH_WINDOW_S:.0f} s, giving up. Last: {words}")
            await asyncio.sleep(self._backoff_s * 2 ** (len(self._crashes) - 1))
            try:
                await self._client.start(None)
            except EngineDead as error:
                words = str(error)
                log.error("engine did not start again", cause=words)
                continue
            self._serving()
            log.info("engine restarted")
            return

    def _serving(self) -> None:
        self.state = "serving"
        self._moved_s = time.monotonic()

    def _look(self) -> None:
        step = self._client.stats.step
        if step != self._step or self._pending() == 0:
            self._step = step
            self._moved_s = time.monotonic()
