"""When lines of batches run: into capacity that nobody else wants."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from engine.service.admission import Admission
from engine.service.engines import EngineHandle

POLL_S = 0.02
"""How often a line that is held back looks whether it may begin."""
MOST_KV = 0.5
"""No line begins on engines that have more of their KV blocks in use: requests of clients find room."""


T = TypeVar("T")


class Disturbed(Exception):
    """A line has made way for a client."""


class Idle:
    """Use on the event loop's thread only."""

    def __init__(
        self,
        engines: Mapping[str, EngineHandle],
        admission: Admission,
        most: int | None,
        quiet_s: float,
        is_asleep: Callable[[], bool] = lambda: False,
    ) -> None:
        """``most``: sequences in flight at a time, ``None``: an eighth of the engines' rows. ``is_asleep``: no engine
        is up, and one starts for whoever comes."""
        self._engines = engines
        self._admission = admission
        self._most = most
        self._quiet_s = quiet_s
        self._is_asleep = is_asleep
        self._held: Counter[str] = Counter()
        """Sequences by tenant."""
        self._growing: Counter[str] = Counter()
        """Lines that wait for more sequences, by tenant."""
        self._left = asyncio.Event()
        self._yielding = set[asyncio.Task[object]]()
        """Lines that end when a client comes."""
        admission.on_enter = self._make_way

    @property
    def in_flight(self) -> int:
        return self._held.total()

    async def enter(self, tenant: str, most: int | None) -> None:
        """Wait until a line may begin. ``most``: sequences that this tenant may have at a time. Those who wait take
        turns."""
        while self._growing[tenant] or not self._may_begin(tenant, most):
            await self._wait()
        self._held[tenant] += 1

    async def undisturbed(self, work: Coroutine[Any, Any, T]) -> T:
        """What a line's work comes to. Raises :class:`Disturbed` as soon as a request of a client comes in."""
        task = asyncio.create_task(work)
        self._yielding.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():  # it is the line that was cancelled
                raise
            raise Disturbed from None
        finally:
            self._yielding.discard(task)

    def _make_way(self) -> None:
        tasks, self._yielding = self._yielding, set()
        for task in tasks:
            task.cancel()

    async def grow(self, tenant: str, most: int | None, held: int, sequences: int) -> None:
        """A line that has begun with ``held`` sequences has so many. It holds none while its tenant has too many, and
        no other line of that one begins meanwhile. ``most``: as :meth:`enter`; ``sequences`` are no more."""
        self._held[tenant] -= held
        self._left.set()
        self._growing[tenant] += 1
        try:
            while most is not None and self._held[tenant] + sequences > most:
                await self._wait()
        finally:
            self._growing[tenant] -= 1
        self._held[tenant] += sequences

    def leave(self, tenant: str, sequences: int = 1) -> None:
        self._held[tenant] -= sequences
        if not self._held[tenant]:
            del self._held[tenant]
        self._left.set()

    async def _wait(self) -> None:
        self._left.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self._left.wait()

    def _may_begin(self, tenant: str, most: int | None) -> bool:
        if most is not None and self._held[tenant] >= most:
            return False
        if self._is_asleep():
            return not self.in_flight and not self._admission.leaving and self._is_quiet()
        ready = [engine for engine in self._engines.values() if engine.takes_requests]
        limit = self._most or sum(max(1, engine.plan.scheduler.max_requests // 8) for engine in ready)
        if self.in_flight >= limit or self._admission.leaving or not self._is_quiet():
            return False
        return any(not engine.client.stats.waiting and engine.client.stats.kv_used <= MOST_KV for engine in ready)

    def _is_quiet(self) -> bool:
        """No request of a client waits or runs, nor did a moment ago: the next one is likely."""
        return not self._admission.in_flight and self._admission.idle_s >= self._quiet_s
