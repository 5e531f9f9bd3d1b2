"""When requests are sent: a closed loop keeps a number of them running, an open loop follows a schedule."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

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


async def closed_loop(
    send: Send, requests: Iterator[BenchRequest], concurrency: int, limit: Limit, clock: Clock, on_done: OnDone
) -> list[RequestRecord]:
    """Keep ``concurrency`` requests running. A request is due the moment the one before it ended."""
    start = clock()
    started = 0
    records: list[RequestRecord] = []

    async def worker() -> None:
        nonlocal started
        due = start
        while limit.allows(started, clock() - start):
            started += 1
            record = await send(next(requests), due)
            records.append(record)
            on_done(record)
            due = record.done_s

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return records


async def open_loop(
    send: Send,
    requests: Iterator[BenchRequest],
    arrivals: Iterator[float],
    limit: Limit,
    clock: Clock,
    on_done: OnDone,
    sleep: Sleep = asyncio.sleep,
) -> list[RequestRecord]:
    """Send each request when ``arrivals`` (seconds from now) says, however many are still running."""
    start = clock()
    tasks: list[asyncio.Task[RequestRecord]] = []

    async def one(request: BenchRequest, due: float) -> RequestRecord:
        record = await send(request, due)
        on_done(record)
        return record

    for arrival in arrivals:
        if not limit.allows(len(tasks), arrival):
            break
        due = start + arrival
        request = next(requests)
        await sleep(max(0.0, due - clock()))
        tasks.append(asyncio.create_task(one(request, due)))
    return list(await asyncio.gather(*tasks))


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
