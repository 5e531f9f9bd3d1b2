"""Takes batches from state to state until they are over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

import msgspec
import structlog

from engine.contracts.events import BatchEvent, Event
from engine.service.batches.idle import Disturbed, Idle
from engine.service.batches.lines import Answered, Line, Validation, body_of, output_line
from engine.service.batches.records import Batch
from engine.service.batches.store import SLICE, DiskFull, Store, now
from engine.service.errors import ApiError

T = TypeVar("T")

AGAIN_S = 2.0
"""After so long a full disk is written to again, and a line is tried again that an engine could not take."""
MOST_TRIES = 5
"""A line under which engines have died so often has failed: it may be what they die of."""
MOST_DISTURBED = 3
"""A line that has made way for clients so often runs to its end the next time: it may be a long one."""
EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")
CANCELLED = ("batch_cancelled", "This request was not executed: its batch was cancelled.")

log = structlog.get_logger("engine.batches")


class CallStore(Protocol):
    """Calls a function with the store, on the store's thread."""

    async def __call__(self, function: Callable[[Store], T], /) -> T: ...


Grow = Callable[[int], Awaitable[None]]
"""Waits until a line may have so many sequences, which are no more than its batch may have."""
Answer = Callable[[Batch, bytes, Grow], Awaitable[Answered]]
"""Answers the body of a line of a batch; asks for the sequences that this takes before it begins. Raises
:class:`ApiError` where it could not be tried: ``unavailable``, ``overloaded``."""


class Runner:
    """Works on all batches at once: their lines take turns. Use on the event loop's thread only."""

    def __init__(
        self,
        store: CallStore,
        answer: Answer,
        idle: Idle,
        publish: Callable[[Event], None],
        most_lines: int,
        most_bytes: int,
    ) -> None:
        """``most_lines`` of a file, ``most_bytes`` of a line."""
        self._store = store
        self._answer = answer
        self._idle = idle
        self._publish = publish
        self._most = (most_lines, most_bytes)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[str, int] = {}
        """Lines without a result, by batch."""
        self._unsaved: list[tuple[str, int, bool, bytes]] = []
        self._saving = asyncio.Lock()
        self.paused: str | None = None
        """Why nothing goes on."""

    def begin(self, batch: Batch) -> None:
        """Go on with a batch, in whatever state it is."""
        self._tasks[batch.id] = asyncio.create_task(self._follow(batch))

    async def again(self, batch: Batch) -> None:
        """Somebody else has changed the state of a batch: leave what is done for the one before."""
        await self._stop(batch.id)
        if batch.id not in self._tasks:  # where two cancel it, one of them goes on
            self.begin(batch)

    async def close(self) -> None:
        for name in tuple(self._tasks):
            await self._stop(name)

    async def until_over(self) -> None:
        """Wait for all that was begun."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def _stop(self, name: str) -> None:
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow(self, batch: Batch) -> None:
        name = batch.id
        log.info("batch begins", batch=name, status=batch.status)
        while not batch.is_over:
            try:
                batch = await self._next(batch)
            except Exception as error:  # its state is kept: it is tried again, and nothing is done twice
                log.error("batch failed for now", batch=name, error=type(error).__name__, detail=str(error)[:200])
                await asyncio.sleep(AGAIN_S)
        log.info("batch ends", batch=name, status=batch.status, completed=batch.completed, failed=batch.failed)
        self._waiting.pop(name, None)
        self._tell()
        if self._tasks.get(name) is asyncio.current_task():
            del self._tasks[name]

    async def _next(self, batch: Batch) -> Batch:
        """Do what a state asks for; the batch in the next one."""
        name = batch.id
        match batch.status:
            case "validating":
                return await self._validate(batch)
            case "in_progress":
                with suppress(TimeoutError):
                    async with asyncio.timeout(batch.expires_at - now()):
                        await self._answer_lines(batch)
                ends_as = "completed" if batch.expires_at > now() else "expired"
                return await self._keep(lambda store: store.change(name, "in_progress", "finalizing", ends_as=ends_as))
        if batch.ends_as != "completed":
            why = EXPIRED if batch.ends_as == "expired" else CANCELLED
            last = 0
            while last := await self._keep(partial(Store.give_up, name=name, code=why[0], message=why[1], after=last)):
                pass  # others ask the store meanwhile
        return await self._keep(lambda store: store.finish(name))

    async def _validate(self, batch: Batch) -> Batch:
        name = batch.id
        await self._keep(lambda store: store.begin(name))
        path = await self._store(lambda store: store.path(batch.input_file_id))
        validation = Validation(path, batch.endpoint, *self._most)
        while not validation.is_done:
            lines = await self._store(lambda store: validation.read(SLICE))
            if not validation.problems:
                await self._keep(partial(Store.add_lines, name=name, lines=lines))
        if problems := tuple(validation.problems):
            await self._keep(lambda store: store.begin(name))
            return await self._keep(lambda store: store.change(name, "validating", "failed", errors=problems))
        return await self._keep(lambda store: store.change(name, "validating", "in_progress", total=validation.total))

    async def _answer_lines(self, batch: Batch) -> None:
        done = await self._store(lambda store: store.batch(batch.id, batch.tenant))
        self._waiting[batch.id] = batch.total - done.completed - done.failed
        self._tell()
        async with asyncio.TaskGroup() as group:
            async for line, raw in self._open_lines(batch):
                await self._idle.enter(batch.tenant, batch.max_sequences)
                group.create_task(self._run(batch, line, raw))

    async def _open_lines(self, batch: Batch) -> AsyncIterator[tuple[Line, bytes]]:
        after = 0
        while lines := await self._store(partial(Store.open_lines, name=batch.id, after=after)):
            for line in lines:
                yield line, await self._store(partial(Store.read, file=batch.input_file_id, line=line))
            after = lines[-1].number

    async def _run(self, batch: Batch, line: Line, raw: bytes) -> None:
        held, disturbed = 1, 0

        async def grow(sequences: int) -> None:
            nonlocal held
            before, held = held, 0
            await self._idle.grow(batch.tenant, batch.max_sequences, before, sequences)
            held = sequences

        try:
            while True:
                work = self._answered(batch, line, raw, grow)
                try:
                    answered = await (self._idle.undisturbed(work) if disturbed < MOST_DISTURBED else work)
                    break
                except Disturbed:
                    disturbed += 1
                self._idle.leave(batch.tenant, held)
                held = 0
                await self._idle.enter(batch.tenant, batch.max_sequences)
                held = 1
            await self._save((batch.id, line.number, answered.is_ok, output_line(batch.id, line, answered)))
        finally:  # not before its result is kept: a full disk holds back all lines
            if held:
                self._idle.leave(batch.tenant, held)
        self._waiting[batch.id] -= 1
        self._tell(answered)

    async def _answered(self, batch: Batch, line: Line, raw: bytes, grow: Grow) -> Answered:
        try:
            body = body_of(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # it was valid: less stack is left
            message = f"The line cannot be read: {str(error)[:200]}."
            failed = {"error": {"message": message, "type": "invalid_request_error"}}
            return Answered(400, "", msgspec.json.encode(failed))
        tries = 0
        while True:
            try:
                return await self._answer(batch, body, grow)
            except ApiError as error:
                tries += error.code != "not_ready"
                log.warning("line could not be run", batch=batch.id, line=line.number, code=error.code, tries=tries)
            if tries == MOST_TRIES:
                message = f"The engine ended {tries} times while it worked on this request."
                return Answered(500, "", msgspec.json.encode({"error": {"message": message, "type": "server_error"}}))
            await asyncio.sleep(AGAIN_S)

    async def _save(self, result: tuple[str, int, bool, bytes]) -> None:
        """Returns once it is kept. All results that wait for the disk go together."""
        self._unsaved.append(result)
        async with self._saving:
            results, self._unsaved = self._unsaved, []
            if not results:
                return  # another one's caller has kept this one
            try:
                await self._keep(lambda store: store.save(results))
            except BaseException:
                self._unsaved = results + self._unsaved  # those of others who wait; twice is as good as once
                raise

    async def _keep(self, change: Callable[[Store], T]) -> T:
        """Make a change as soon as the disk has room for it."""
        while True:
            try:
                kept = await self._store(change)
            except DiskFull as full:
                self._pause(f"The disk is full: {full}. Nothing is lost; batches go on when there is room.")
                await asyncio.sleep(AGAIN_S)
            else:
                self._pause(None)
                return kept

    def _pause(self, why: str | None) -> None:
        if (why is None) != (self.paused is None):
            self.paused = why
            (log.error if why else log.info)("batches pause" if why else "batches go on", reason=why)
            self._tell()

    def _tell(self, answered: Answered | None = None) -> None:
        completed = int(answered is not None and answered.is_ok)
        failed = int(answered is not None and not answered.is_ok)
        waiting = sum(self._waiting.values())
        self._publish(BatchEvent(time.monotonic(), completed, failed, waiting, self.paused is not None))
