from __future__ import annotations

import asyncio
import heapq
import itertools

import pytest

from engine_lab.bench.load import Limit, LoopLag, closed_loop, open_loop
from engine_lab.bench.record import RequestRecord
from engine_lab.bench.workload import BenchRequest, Turn


class VirtualTime:
    """A clock that moves only when everyone waits, to the next wake-up."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now = 0.0
        self.late_s = late_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now + seconds + self.late_s, next(self._order), future))
        await future

    async def drive(self, main: asyncio.Task) -> None:
        while not main.done():
            for _ in range(10):  # let everything that can run do so
                await asyncio.sleep(0)
            if self._sleepers and not main.done():
                at, _, future = heapq.heappop(self._sleepers)
                self.now = max(self.now, at)
                if not future.done():
                    future.set_result(None)

    def run(self, coroutine):
        async def both():
            main = asyncio.ensure_future(coroutine)
            await self.drive(main)
            return main.result()

        return asyncio.run(both())


class Server:
    """Takes a fixed time a request, in virtual time; counts how many run at once."""

    def __init__(self, time: VirtualTime, seconds: float, capacity: int = 1000) -> None:
        self.time, self.seconds = time, seconds
        self.running = self.most = 0
        self.capacity = capacity
        self._free: asyncio.Semaphore | None = None

    async def __call__(self, request: BenchRequest, scheduled_s: float) -> RequestRecord:
        sent = self.time.clock()
        if self._free is None:
            self._free = asyncio.Semaphore(self.capacity)
        self.running += 1
        self.most = max(self.most, self.running)
        async with self._free:
            await self.time.sleep(self.seconds)
        self.running -= 1
        now = self.time.clock()
        return RequestRecord(request.index, scheduled_s, sent, now, chunks_s=(now,), end_s=now, output_tokens=1)


def endless():
    return (BenchRequest(i, "x", 1) for i in itertools.count())


def ignore(record: RequestRecord) -> None:
    pass


def test_a_closed_loop_keeps_exactly_so_many_running_and_stops_at_the_count():
    time = VirtualTime()
    server = Server(time, 1.0)
    done: list[RequestRecord] = []
    records = time.run(closed_loop(server, endless(), 3, Limit(10, None), time.clock, done.append))
    assert server.most == 3
    assert sorted(r.index for r in records) == list(range(10))
    assert done == records
    assert time.now == pytest.approx(4.0)  # ten requests in rows of three


def test_in_a_closed_loop_a_request_is_due_when_the_one_before_it_ended():
    time = VirtualTime()
    records = time.run(closed_loop(Server(time, 2.0), endless(), 1, Limit(3, None), time.clock, ignore))
    assert [r.scheduled_s for r in records] == pytest.approx([0, 2, 4])


def test_a_duration_ends_sending_and_waits_for_what_runs():
    time = VirtualTime()
    records = time.run(closed_loop(Server(time, 2.0), endless(), 1, Limit(None, 3.0), time.clock, ignore))
    assert [r.done_s for r in records] == pytest.approx([2, 4])


def test_an_open_loop_sends_on_schedule_however_slow_the_server_is():
    time = VirtualTime()
    server = Server(time, 100.0)
    records = time.run(
        open_loop(server, endless(), iter([0.0, 1.0, 1.5]), Limit(None, None), time.clock, ignore, time.sleep)
    )
    assert server.most == 3
    assert [r.sent_s for r in records] == pytest.approx([0, 1, 1.5])


def test_waiting_for_a_full_server_counts_as_latency():
    time = VirtualTime()
    server = Server(time, 10.0, capacity=1)
    records = time.run(
        open_loop(server, endless(), iter([0.0, 1.0, 2.0]), Limit(None, None), time.clock, ignore, time.sleep)
    )
    assert [r.ttft_ms for r in records] == pytest.approx([10_000, 19_000, 28_000])


def test_a_client_that_sends_late_still_counts_from_the_due_time():
    time = VirtualTime(late_s=0.25)
    records = time.run(
        open_loop(Server(time, 1.0), endless(), iter([0.0, 5.0]), Limit(None, None), time.clock, ignore, time.sleep)
    )
    last = records[-1]
    assert (last.scheduled_s, last.sent_s) == (5.0, pytest.approx(5.25))
    assert last.ttft_ms == pytest.approx(1500)  # late by 250, served in 1000 + 250


def test_an_open_loop_obeys_both_limits():
    time = VirtualTime()
    every = (float(i) for i in itertools.count())
    by_count = time.run(open_loop(Server(time, 0.1), endless(), every, Limit(4, 100.0), time.clock, ignore, time.sleep))
    assert len(by_count) == 4
    time = VirtualTime()
    every = (float(i) for i in itertools.count())
    by_time = time.run(open_loop(Server(time, 0.1), endless(), every, Limit(100, 2.5), time.clock, ignore, time.sleep))
    assert len(by_time) == 3


def test_loop_lag_is_how_late_the_loop_woke():
    time = VirtualTime(late_s=0.03)
    lag = LoopLag(time.clock)

    async def some() -> None:
        task = asyncio.ensure_future(lag.run(time.sleep))
        while len(lag.lags_s) < 5:
            await asyncio.sleep(0)
        task.cancel()

    time.run(some())
    assert lag.lags_s[:5] == pytest.approx([0.03] * 5)


def test_a_limit_of_running_requests_holds_others_back_which_their_latency_includes_and_the_client_is_not_blamed_for():
    time = VirtualTime()
    server = Server(time, 10.0)
    load = open_loop(server, endless(), iter([0.0, 1.0, 2.0]), Limit(None, None), time.clock, ignore, time.sleep, 2)
    records = sorted(time.run(load), key=lambda record: record.index)
    assert server.most == 2
    assert [record.held_s for record in records] == pytest.approx([0, 0, 8])
    assert [record.ttft_ms for record in records] == pytest.approx([10_000, 10_000, 18_000])
    assert [record.late_s for record in records] == pytest.approx([0, 0, 0])


def test_a_turn_is_due_its_think_time_after_the_answer_and_a_ramp_starts_clients_one_by_one():
    def sessions():
        for index in itertools.count():
            yield BenchRequest(index, "x", 1, turns=(Turn("y", 1, 3.0), Turn("z", 1, 3.0)))

    time = VirtualTime()
    limit = Limit(None, 20.0)
    load = closed_loop(Server(time, 2.0), sessions(), 2, limit, time.clock, ignore, time.sleep, ramp_s=10.0)
    records = time.run(load)
    assert [r.scheduled_s for r in records if r.index == 0] == pytest.approx([0, 5, 10])
    assert [r.scheduled_s for r in records if r.index == 1] == pytest.approx([5, 10, 15])
    assert max(r.scheduled_s for r in records) < 20, "no turn starts after the duration"
