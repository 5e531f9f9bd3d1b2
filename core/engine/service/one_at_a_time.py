"""Long work of which one piece is done at a time, in fair order among clients; what waits is bounded."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

from engine.loop.fair_queue import FairQueue
from engine.service.errors import ApiError

T = TypeVar("T")


class OneAtATime:
    """Who is next is decided as with rows of the engine. Use on the event loop's thread."""

    def __init__(self, what: str, most: int) -> None:
        """``what`` is waited for, in messages; ``most``: how much of it may wait in all, a quarter of it one client's.
        The first piece of a client is never too large."""
        self._what = what
        self._most = most
        self._fair = FairQueue()
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()
        self._busy = False
        self._sizes: Counter[str] = Counter()

    @asynccontextmanager
    async def hold(self, client: str, size: int) -> AsyncIterator[None]:
        """The block runs when no other does. Raises :class:`ApiError` ``overloaded`` when too much waits."""
        await self._begin(client, size)
        try:
            yield
        finally:
            self._end(client, size)

    async def run(self, client: str, size: int, executor: Executor, function: Callable[..., T], *args: object) -> T:
        """``function`` in a thread, alone. When its caller leaves it runs on, and nobody else's begins before it has
        ended."""
        await self._begin(client, size)
        try:
            running = asyncio.get_running_loop().run_in_executor(executor, function, *args)
        except BaseException:  # an executor that was shut down
            self._end(client, size)
            raise
        running.add_done_callback(lambda _: self._end(client, size))
        running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # perhaps nobody else looks
        return await asyncio.shield(running)

    async def _begin(self, client: str, size: int) -> None:
        held = self._sizes[client]
        if held and (held + size > self._most // 4 or self._sizes.total() + size > self._most):
            raise ApiError("overloaded", f"Too much {self._what} waits already.", code="queue_full", retry_after_s=1)
        tag = self._fair.join(client)
        self._sizes[client] += size
        if self._busy:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heappush(self._queue, (tag, next(self._numbers), waiting))
            try:
                await waiting
            except asyncio.CancelledError:
                if waiting.done() and not waiting.cancelled():  # it had just been let in
                    self._pass_on()
                self._leave(client, size)
                raise
        self._busy = True
        self._fair.started(tag)

    def _end(self, client: str, size: int) -> None:
        self._leave(client, size)
        self._pass_on()

    def _leave(self, client: str, size: int) -> None:
        self._fair.leave(client)
        self._sizes[client] -= size
        if not self._sizes[client]:
            del self._sizes[client]

    def _pass_on(self) -> None:
        self._busy = False
        while self._queue:
            _, _, waiting = heappop(self._queue)
            if not waiting.done():
                self._busy = True
                waiting.set_result(None)
                return
