"""Has the rule of :mod:`engine.service.autoscale` change a server's engines, and requests wait for the first one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import structlog

from engine.contracts.config import AutoscaleSettings
from engine.service.autoscale import Decision, Memory, decide
from engine.service.engines import EngineHandle
from engine.service.fleet import Fleet
from engine.service.scaling import fleet_figures

PERIOD_S = 0.25
"""Between two looks at the figures."""
HOLD_S = 120.0
"""How long a request waits for an engine to start."""
POLL_S = 0.02
log = structlog.get_logger("engine.scaler")


class Scaler:
    """Of one server. Use on the event loop's thread only."""

    def __init__(self, settings: AutoscaleSettings, fleet: Fleet, engines: Mapping[str, EngineHandle]) -> None:
        self.settings = settings
        self._fleet = fleet
        self._engines = engines
        self._memory = Memory()
        self.held = 0
        """Requests that wait for an engine to start."""

    @property
    def is_on(self) -> bool:
        return self.settings.max is not None

    @property
    def least(self) -> int:
        """Engines that stay up whatever happens."""
        return self.settings.min if self.is_on else 1

    @property
    def is_asleep(self) -> bool:
        """No engine is up, and the next request starts one."""
        return self.settings.min == 0 and all(each.state == "stopped" for each in self._engines.values())

    async def run(self) -> None:
        """Look at the figures again and again; returns at once where the number of engines is fixed."""
        while self.is_on:
            self.look(time.monotonic())
            await asyncio.sleep(PERIOD_S)

    def look(self, now_s: float) -> Decision | None:
        """Change the engines where the rule says so. Nothing is counted while a change runs."""
        if self._fleet.closing or self._fleet.is_changing:
            self._memory = Memory()
            return None
        decision, self._memory = decide(
            self.settings, fleet_figures(self._engines.values(), now_s, self.held), self._memory
        )
        if decision is not None:
            log.info("autoscale", engines=decision.engines, before=self._fleet.desired, reason=decision.reason)
            self._fleet.scale(decision.engines, decision.reason)
        return decision

    async def until_up(self) -> None:
        """Wait until an engine takes requests, if one starts for them: where ``fleet.autoscale.min`` is 0."""
        if self.settings.min or self._has_one():
            return
        self.held += 1
        try:
            ends_s = time.monotonic() + HOLD_S
            while not self._has_one() and self._is_coming() and time.monotonic() < ends_s:
                await asyncio.sleep(POLL_S)
        finally:
            self.held -= 1

    def _has_one(self) -> bool:
        return any(engine.takes_requests for engine in self._engines.values())

    def _is_coming(self) -> bool:
        return not self._fleet.closing and (
            self._fleet.is_changing or any(each.state in ("stopped", "restarting") for each in self._engines.values())
        )
