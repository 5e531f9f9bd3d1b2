"""Batches from state to state, over a real store and answers that are made here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.contracts.events import BatchEvent
from engine.service.admission import Admission
from engine.service.batches import runner as module
from engine.service.batches.idle import Idle
from engine.service.batches.lines import Answered
from engine.service.batches.records import Batch
from engine.service.batches.runner import MOST_DISTURBED, MOST_TRIES, Answer, Grow, Runner
from engine.service.batches.store import Store, new_id, now
from engine.service.errors import ApiError, engine_died

from ..fakes import in_loop


class Always(Idle):
    """Lets so many lines in."""

    def __init__(self, most: int = 4) -> None:
        super().__init__({}, Admission(8), most, 0.0)
        self.peak = 0

    def _may_begin(self, tenant: str, most: int | None) -> bool:
        self.peak = max(self.peak, self.in_flight)
        return self.in_flight < (self._most or 0) and (most is None or self._held[tenant] < most)


class Bench:
    """A runner, its store, and what it has said."""

    def __init__(self, folder: Path, answer: Answer, idle: Idle) -> None:
        self.store = Store(folder)
        self.idle = idle
        self.events: list[Any] = []
        self.runner = Runner(self.call, answer, idle, self.events.append, 1000, 1000)

    async def call(self, function: Callable[[Store], Any]) -> Any:
        await asyncio.sleep(0)
        return function(self.store)

    def may_grow(self, pages: int) -> None:
        """Let the database have no more pages, as a full disk does."""
        self.store._db.execute(f"PRAGMA max_page_count={pages}")

    def add(self, count: int, **fields: Any) -> Batch:
        part = self.store.new_path()
        body = {"method": "POST", "url": "/v1/x", "body": {}}
        part.write_bytes(b"".join(msgspec.json.encode({"custom_id": str(n)} | body) + b"\n" for n in range(count)))
        file = self.store.take(part, "t", "in.jsonl")
        fields = {"expires_at": now() + 100, **fields}
        batch = Batch(new_id("batch_"), "t", "m", "/v1/x", file.id, now(), **fields)
        self.store.add(batch)
        self.runner.begin(batch)
        return batch

    async def run(self, batch: Batch) -> tuple[Batch, list[Any], list[Any]]:
        await self.runner.until_over()
        ended = self.store.batch(batch.id, "t")
        paths = [self.store.path(name) if name else None for name in (ended.output_file_id, ended.error_file_id)]
        good, bad = ([msgspec.json.decode(line) for line in p.read_bytes().splitlines()] if p else [] for p in paths)
        return ended, good, bad


@asynccontextmanager
async def bench(folder: Path, answer: Answer, most: int = 4) -> AsyncIterator[Bench]:
    found = Bench(folder, answer, Always(most))
    try:
        yield found
    finally:
        await found.runner.close()
        found.store.close()


async def yes(batch: Batch, body: bytes, grow: Grow) -> Answered:
    await grow(3)
    await asyncio.sleep(0)
    return Answered(200, "r", b"{}")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.01)


@in_loop
async def test_lines_of_several_batches_take_turns_within_the_limit(tmp_path: Path) -> None:
    async with bench(tmp_path, yes) as found:
        batches = [found.add(30) for _ in range(3)]
        ended = [(await found.run(batch))[0] for batch in batches]
        assert [(batch.status, batch.completed, batch.total) for batch in ended] == [("completed", 30, 30)] * 3
        assert max(0, found.idle.in_flight) == 0
    waiting = [event.waiting for event in found.events if isinstance(event, BatchEvent)]
    assert max(waiting) <= 90 and waiting[-1] == 0 and sum(event.completed for event in found.events) == 90


@in_loop
async def test_a_full_disk_pauses_all_and_nothing_is_lost(tmp_path: Path) -> None:
    begun = 0

    async def answer(batch: Batch, body: bytes, grow: Grow) -> Answered:
        nonlocal begun
        begun += 1
        if begun == 10:
            found.may_grow(1)  # no more than there are
        return Answered(200, "r", b'"%s"' % (b"x" * 5000))

    async with bench(tmp_path, answer) as found:
        batch = found.add(40)
        while found.runner.paused is None:
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        assert begun < 20 and found.events[-1].paused
        assert "paused" in found.store.batch(batch.id, "t").public(found.runner.paused)
        found.may_grow(2**30)
        _, good, bad = await found.run(batch)
        assert sorted(int(line["custom_id"]) for line in good) == [*range(40)] and not bad
        assert begun == 40 and found.runner.paused is None and not found.events[-1].paused


@in_loop
async def test_a_line_under_which_engines_die_fails_alone(tmp_path: Path) -> None:
    tries = 0

    async def answer(batch: Batch, body: bytes, grow: Grow) -> Answered:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise ApiError("unavailable", "Not ready.", code="not_ready")
        raise engine_died()

    async with bench(tmp_path, answer) as found:
        ended, good, (failed,) = await found.run(found.add(1))
        assert tries == 3 + MOST_TRIES and failed["response"]["status_code"] == 500
        assert (ended.status, ended.failed) == ("completed", 1) and not good


@in_loop
async def test_what_its_window_was_too_short_for_has_expired(tmp_path: Path) -> None:
    first = asyncio.Event()

    async def answer(batch: Batch, body: bytes, grow: Grow) -> Answered:
        if first.is_set():
            await asyncio.sleep(100)
        first.set()
        return Answered(200, "r", b"{}")

    async with bench(tmp_path, answer, most=1) as found:
        ended, good, bad = await found.run(found.add(3, expires_at=int(time.time()) + 1))
    assert (ended.status, len(good), ended.completed, ended.failed) == ("expired", 1, 1, 2)
    assert [line["error"]["code"] for line in bad] == ["batch_expired"] * 2


@in_loop
async def test_a_tenant_has_no_more_lines_at_once_than_its_key_allows(tmp_path: Path) -> None:
    most = running = 0

    async def answer(batch: Batch, body: bytes, grow: Grow) -> Answered:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return Answered(200, "r", b"{}")

    async with bench(tmp_path, answer) as found:
        batches = [found.add(5, max_sequences=2) for _ in range(2)]
        assert [(await found.run(batch))[0].completed for batch in batches] == [5, 5]
    assert most == 2


@in_loop
async def test_a_line_makes_way_for_clients_but_not_for_ever(tmp_path: Path) -> None:
    begun, ended = 0, asyncio.Event()

    async def answer(batch: Batch, body: bytes, grow: Grow) -> Answered:
        nonlocal begun
        begun += 1
        await grow(2)
        await ended.wait()
        return Answered(200, "r", b"{}")

    async with bench(tmp_path, answer, most=2) as found:
        batch = found.add(1)
        for number in range(MOST_DISTURBED + 1):
            while begun == number:
                await asyncio.sleep(0)
            with found.idle._admission.enter("a client", 1):
                await asyncio.sleep(0.05)
        assert begun == MOST_DISTURBED + 1 and found.idle.in_flight == 2
        ended.set()
        done, good, _ = await found.run(batch)
        assert (done.completed, len(good), found.idle.in_flight) == (1, 1, 0)


@in_loop
async def test_a_line_that_cannot_be_read_again_fails_and_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def less_stack(raw: bytes) -> bytes:
        if b'"1"' in raw:
            raise RecursionError("maximum recursion depth exceeded")
        return b"{}"

    monkeypatch.setattr(module, "body_of", less_stack)
    async with bench(tmp_path, yes) as found:
        ended, good, bad = await found.run(found.add(3))
    assert (ended.status, len(good)) == ("completed", 2)
    (failed,) = bad
    assert failed["custom_id"] == "1" and failed["response"]["status_code"] == 400
    assert "recursion" in failed["response"]["body"]["error"]["message"]


@in_loop
async def test_a_batch_that_two_cancel_at_once_goes_on_once(tmp_path: Path) -> None:
    begun, tasks = asyncio.Event(), set[Any]()

    async def answer(batch: Batch, body: bytes, grow: Grow) -> Answered:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)  # an engine lets go of it
        raise AssertionError

    async with bench(tmp_path, answer) as found:
        begin = found.runner.begin

        def begins(batch: Batch) -> None:
            begin(batch)
            tasks.add(found.runner._tasks[batch.id])

        async def slow(function: Callable[[Store], Any]) -> Any:
            await asyncio.sleep(0.02)
            return function(found.store)

        found.runner.begin = begins  # type: ignore[method-assign]
        batch = found.add(3)
        await begun.wait()
        cancelled = found.store.cancel(batch.id, "t")
        found.runner._store = slow
        await asyncio.gather(*[found.runner.again(cancelled) for _ in range(3)])
        assert len([task for task in tasks if not task.done()]) == 1
        ended, _, bad = await found.run(cancelled)
        assert (ended.status, ended.failed, len(bad)) == ("cancelled", 3, 3)
        assert found.runner._tasks == {}
