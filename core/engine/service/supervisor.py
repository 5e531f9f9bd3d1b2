"""Keeps an engine behind the listener: starts it, sees it die or hang, starts it again, knows when to give up."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import structlog

from engine.contracts.events import DEFAULT_ENGINE
from engine.loop.client import EngineClient, EngineDead
from engine.loop.messages import Progress

MAX_CRASHES = 3
CRASH_WINDOW_S = 60.0
PING_S = 1.0
"""Seconds between two pings."""
NOT_READY_S = 4.0
"""An engine that hangs for so long gets no more requests: with the time between pings, within 5 s."""
SLACK = 10.0
"""A step hangs only once it has taken so many times what was expected: a long prompt on a busy machine does not."""

State = Literal["loading", "ready", "restarting", "failed", "stopped"]
"""``stopped``: ended on purpose."""
log = structlog.get_logger("engine.supervisor")


class Supervisor:
    """An engine hangs while it answers no ping, and while a step takes far longer than such steps do. One that hangs
    for ``stall_s`` is killed and started again; once it has started, one that hangs for ``serving_s``."""

    def __init__(
        self,
        client: EngineClient,
        stall_s: float,
        *,
        serving_s: float | None = None,
        poll_s: float = 0.1,
        ping_s: float = PING_S,
        backoff_s: float = 0.5,
        engine: str = DEFAULT_ENGINE,
    ) -> None:
        """``engine``: its id, for the log."""
        self._log = log.bind(engine=engine)
        self._client = client
        self._stall_s = stall_s
        self._serving_s = stall_s if serving_s is None else serving_s
        self._poll_s = poll_s
        self._ping_s = ping_s
        self._backoff_s = backoff_s
        self._crashes: deque[float] = deque(maxlen=MAX_CRASHES)
        self._num_messages = 0
        self._silent_s = self._since_ping_s = 0.0
        self._killed = False
        self._changing = asyncio.Lock()
        """Held by whoever ends or starts the engine: what is done on purpose is no crash."""
        self.state: State = "loading"
        self.starts = 0
        """How often the engine has started."""

    async def start(self, on_progress: Callable[[Progress], None] | None = None) -> None:
        """Start the engine; kill it if it hangs meanwhile. Raises :class:`EngineDead` with the engine's own words."""
        self._silent_s, self._killed = 0.0, False
        starting = asyncio.ensure_future(self._client.start(on_progress))
        try:
            while not (await asyncio.wait({starting}, timeout=self._poll_s))[0]:
                self._check()
            await starting
        finally:
            starting.cancel()
        self.state = "ready"
        self.starts += 1

    async def restart(self) -> None:
        """End the engine on purpose and start it again, whatever state it is in; crashes before that no longer count.
        What runs there ends with :class:`EngineDead` of cause ``engine_closed``. Raises :class:`EngineDead` where it
        does not start; :meth:`watch` then goes on trying."""
        async with self._changing:
            self.state = "restarting"
            await self._client.close()
            self._crashes.clear()
            await self.start()
            self._log.info("engine restarted on purpose")

    async def stop(self) -> None:
        """End the engine on purpose, until :meth:`restart`."""
        async with self._changing:
            self.state = "stopped"
            await self._client.close()
            self._log.info("engine stopped on purpose")

    async def watch(self) -> None:
        """Restart the engine whenever it dies or hangs. Raises :class:`EngineDead` after three crashes in 60 s; may be
        called again, for an engine that is restarted on purpose after that."""
        while True:
            await asyncio.sleep(self._poll_s)
            async with self._changing:
                if self.state in ("failed", "stopped"):
                    continue
                self._check()
                if not self._client.alive:
                    self.state = "restarting"
                    self._log.error("engine died", cause=self._client.cause_of_death)
                    await self._restart()

    @property
    def silent_s(self) -> float:
        """Since the engine last said anything: what it has reported of itself is no older, for it reports each step."""
        return self._silent_s

    def not_ready(self) -> str | None:
        """Why the engine cannot serve right now; ``None`` if it can."""
        if self.state != "ready":
            return f"engine {self.state}"
        if not self._client.alive:
            return "engine dead"
        return self._why() if self._hangs_s() > NOT_READY_S else None

    async def _restart(self) -> None:
        words = self._client.cause_of_death
        while True:
            self._crashes.append(time.monotonic())
            if len(self._crashes) == MAX_CRASHES and self._crashes[-1] - self._crashes[0] <= CRASH_WINDOW_S:
                self.state = "failed"
                raise EngineDead(f"{MAX_CRASHES} crashes within {CRASH_WINDOW_S:.0f} s, giving up. Last: {words}")
            await asyncio.sleep(self._backoff_s * 2 ** (len(self._crashes) - 1))
            try:
                await self.start()
            except EngineDead as error:
                words = str(error)
                self._log.error("engine did not start again", cause=words)
                continue
            self._log.info("engine restarted")
            return

    def _check(self) -> None:
        """Once every ``poll_s``: ping, and kill an engine that has hung for too long."""
        # Counted in polls, not by a clock: what this process missed while it was stopped is no silence of the engine.
        self._silent_s += self._poll_s
        self._since_ping_s += self._poll_s
        if self._client.num_messages != self._num_messages:
            self._num_messages, self._silent_s = self._client.num_messages, 0.0
        if self._since_ping_s >= self._ping_s:
            self._since_ping_s = 0.0
            self._client.ping()
        limit_s = self._serving_s if self.state == "ready" else self._stall_s
        if self._hangs_s() > limit_s and not self._killed:
            why, self._killed = self._why(), True
            self._log.error("engine is killed", cause=why)
            self._client.kill(why)

    def _over_s(self) -> float:
        """By how much the engine's step exceeds what one may take."""
        beat = self._client.heartbeat
        return max(0.0, beat.step_s - SLACK * beat.expected_s)

    def _hangs_s(self) -> float:
        """For how long the engine has not been getting on."""
        return self._over_s() + self._silent_s

    def _why(self) -> str:
        beat, silent_s = self._client.heartbeat, self._silent_s
        if self._over_s() > silent_s:
            return f"engine stalled: a step has taken {beat.step_s:.0f} s, {beat.expected_s:.1f} s were expected"
        return f"engine stalled: no answer for {silent_s:.0f} s"
