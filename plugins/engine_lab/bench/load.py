"""When requests are sent: a closed loop keeps a number of them running, an open loop follows a schedule."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace

from engine_lab.bench.record import RequestRecord
from engine_lab.bench.stream import Clock
from engine_lab.bench.target import Send
from engine_lab.bench.workload import BenchRequest

Sleep = Callable[[float], Awaitable[None]]
OnDone = Callable[[RequestRecord], None]


@dataclass(frozen=True, slots=True)
class Limit:
    """When to stop sending: after so many requests, or so many seconds, whichever comes first. What is
    running then is waited for."""

    requests: int | None
    duration_s: float | None

    def allows(self, started: int, elapsed_s: float) -> bool:
        """Whether one more request may start."""
        if self.requests is not None and started >= self.requests:
            return False
        return self.duration_s is None or elapsed_s < self.duration_s


class Sessions:
    """Sends requests, and the further turns of a session after each one's answer."""

    def __init__(
        self,
        send: Send,
        limit: Limit,
        clock: Clock,
        on_done: OnDone,
        sleep: Sleep = asyncio.sleep,
        most_running: int | None = None,
    ) -> None:
        """``most_running``: a request that is due while so many are running is held back."""
        self._send, self._limit, self._clock, self._on_done, self._sleep = send, limit, clock, on_done, sleep
        self._room = asyncio.Semaphore(most_running) if most_running else None
        self._started = 0
        self.start_s = clock()
        self.records: list[RequestRecord] = []

    def may_start(self, at_s: float) -> bool:
        """Whether a request that is due ``at_s`` seconds after the start is sent; it counts as started then."""
        allowed = self._limit.allows(self._started, at_s)
        self._started += allowed
        return allowed

    async def wait_until(self, due_s: float) -> None:
        await self._sleep(max(0.0, due_s - self._clock()))

    async def run(self, request: BenchRequest, due_s: float) -> float:
        """A request and all turns after it; returns when the last answer ended. A turn is due its think time after the
        answer before it. A session ends early with an answer that fails, or when nothing may start any more."""
        record = await self._one(request, due_s)
        while request.turns and record.ok:
            due_s = record.done_s + request.turns[0].think_s
            if not self.may_start(due_s - self.start_s):
                break
            request = request.answered(record.text)
            await self.wait_until(due_s)
            record = await self._one(request, due_s)
        return record.done_s

    async def _one(self, request: BenchRequest, due_s: float) -> RequestRecord:
        if self._room is None:
            record = await self._send(request, due_s)
        else:
            came_s = self._clock()
            async with self._room:
                held_s = self._clock() - came_s
                record = replace(await self._send(request, due_s), held_s=held_s)
        self.records.append(record)
        self._on_done(record)
        return record


async def closed_loop(
    send: Send,
    requests: Iterator[BenchRequest],
    concurrency: int,
    limit: Limit,
    clock: Clock,
    on_done: OnDone,
    sleep: Sleep = asyncio.sleep,
    ramp_s: float = 0.0,
) -> list[RequestRecord]:
    """Keep ``concurrency`` requests (of sessions: sessions) running; they begin one after the other over ``ramp_s``. A
    request is due the moment the one before it ended."""
    sessions = Sessions(send, limit, clock, on_done, sleep)

    async def worker(begins_s: float) -> None:
        due = sessions.start_s + begins_s
        if begins_s:
            await sessions.wait_until(due)
        while sessions.may_start(clock() - sessions.start_s):
            due = await sessions.run(next(requests), due)

    await asyncio.gather(*(worker(ramp_s * i / concurrency) for i in range(concurrency)))
    return sessions.records


async def open_loop(
    send: Send,
    requests: Iterator[BenchRequest],
    arrivals: Iterator[float],
    limit: Limit,
    clock: Clock,
    on_done: OnDone,
    sleep: Sleep = asyncio.sleep,
    most_running: int | None = None,
) -> list[RequestRecord]:
    """Send each request (of sessions: the first one) when ``arrivals`` (seconds from now) says, however many are still
    running, or up to ``most_running``."""
    sessions = Sessions(send, limit, clock, on_done, sleep, most_running)
    async with asyncio.TaskGroup() as tasks:
        for arrival in arrivals:
            if not sessions.may_start(arrival):
                break
            request, due = next(requests), sessions.start_s + arrival
            await sessions.wait_until(due)
            tasks.create_task(sessions.run(request, due))
    return sessions.records


class LoopLag:
    """Measures how late this event loop wakes up, in seconds: while it is late, everything it times is
    late."""

    PERIOD_S = 0.01

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.lags_s: list[float] = []

    async def run(self, sleep: Sleep = asyncio.sleep) -> None:
        """Sample until cancelled."""
        while True:
            due = self._clock() + self.PERIOD_S
            await sleep(self.PERIOD_S)
            self.lags_s.append(max(0.0, self._clock() - due))
