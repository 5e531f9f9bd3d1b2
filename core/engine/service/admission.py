"""Who may come in: a bounded number of sequences of each class, shared by clients; nobody while the server drains."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.service.errors import ApiError


@dataclass(slots=True, eq=False)
class Flight:
    """One API request that is being answered. ``failure`` is why the server ended it, if it did."""

    task: asyncio.Task[object]
    failure: ApiError | None = None

    def fail(self, error: ApiError) -> None:
        """End the request with ``error``: its task is cancelled and reports this instead."""
        if self.failure is None:
            self.failure = error
            self.task.cancel()


class _Queue:
    """Sequences of one class that wait or run."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.in_flight = 0
        self.held: Counter[str] = Counter()
        """By client."""

    def has_room(self, client: str, sequences: int) -> bool:
        if not self.in_flight or self.in_flight + sequences <= self.most:
            return True
        share = max(1, self.most // (len(self.held) + (client not in self.held)))
        return self.held[client] + sequences <= share and self.in_flight + sequences <= 2 * self.most

    def count(self, client: str, change: int) -> None:
        self.in_flight += change
        self.held[client] += change
        if not self.held[client]:
            del self.held[client]


class Admission:
    """Counts sequences that wait or run; one more than ``max_queue`` is refused before it costs anything.

    A client that holds less than an equal share may still come in when others have filled the queue: as many again,
    so that nobody locks the others out. Each class (``slo.classes``) has such a queue of its own: those who wait long
    lock nobody out who does not.
    """

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._queues: dict[str, _Queue] = {}
        """By class."""
        self._flights: set[Flight] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._mean_s = 1.0
        self._ended_s = -math.inf
        """When the last one ended; of ``time.monotonic``."""
        self.on_enter: Callable[[], None] = lambda: None
        """Called before a request comes in."""
        self.draining = False
        self.lame_duck = False
        """The server is about to drain, and takes requests of those who have not heard of it."""

    @property
    def leaving(self) -> bool:
        """Whether requests should go elsewhere: some may still be taken."""
        return self.draining or self.lame_duck

    @property
    def in_flight(self) -> int:
        """Sequences admitted and not yet ended."""
        return sum(queue.in_flight for queue in self._queues.values())

    @property
    def idle_s(self) -> float:
        """How long nothing has been in flight."""
        return 0.0 if self.in_flight else time.monotonic() - self._ended_s

    def gate(self, client: str, slo_class: str = "") -> None:
        """Refuse early, before the body is read. Raises :class:`ApiError` ``unavailable`` (draining) or ``overloaded``
        (full)."""
        if self.draining:
            raise ApiError("unavailable", "The server is shutting down.", code="draining", retry_after_s=5)
        if not self._queue(slo_class).has_room(client, 1):
            raise self._full(slo_class)

    @contextmanager
    def enter(self, client: str, sequences: int, most: int | None = None, slo_class: str = "") -> Iterator[Flight]:
        """Take ``sequences`` places of a class for as long as the block runs. An empty queue takes any allowed request.
        ``most``: that this client may have, with all others of the same tenant (``TENANT/USER``).

        Raises :class:`ApiError` like :meth:`gate`.
        """
        self.gate(client, slo_class)
        if most is not None and (held := self._held_by(client)) + sequences > most:
            raise ApiError(
                "overloaded",
                f"This key's tenant has {held} sequences of at most {most}, and {sequences} more were asked for.",
                code="key_limit",
                retry_after_s=math.ceil(self._mean_s / 2),
            )
        queue = self._queue(slo_class)
        if not queue.has_room(client, sequences):
            raise self._full(slo_class)
        task = asyncio.current_task()
        assert task is not None
        flight = Flight(task)
        self.on_enter()
        begun = asyncio.get_running_loop().time()
        queue.count(client, sequences)
        self._flights.add(flight)
        self._idle.clear()
        try:
            yield flight
        except asyncio.CancelledError:
            if flight.failure is None:
                raise  # the client is gone
            task.uncancel()
            raise flight.failure from None
        finally:
            queue.count(client, -sequences)
            self._flights.discard(flight)
            if not self._flights:
                self._idle.set()
            self._ended_s = time.monotonic()
            self._mean_s += 0.1 * (asyncio.get_running_loop().time() - begun - self._mean_s)

    def fail_all(self, error: ApiError) -> None:
        """End every request in flight with ``error``."""
        for flight in tuple(self._flights):
            flight.fail(error)

    async def until_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False when ``timeout_s`` passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _held_by(self, client: str) -> int:
        tenant = client.partition("/")[0]
        held = [one for queue in self._queues.values() for one in queue.held.items()]
        return sum(count for name, count in held if name.partition("/")[0] == tenant)

    def _queue(self, slo_class: str) -> _Queue:
        return self._queues.setdefault(slo_class, _Queue(self._max_queue))

    def _full(self, slo_class: str) -> ApiError:
        of_class = f" of class {slo_class}" if slo_class else ""
        number = self._queue(slo_class).in_flight
        return ApiError(
            "overloaded",
            f"The server is full: {number} sequences{of_class} wait or run (server.max_queue={self._max_queue}).",
            code="queue_full",
            retry_after_s=math.ceil(self._mean_s / 2),
        )
