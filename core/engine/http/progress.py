"""How far the prompt of a stream is, while its client waits for the first token: ``return_progress``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from engine.contracts.events import Chunk, Event, StepEvent
from engine.service.job import Job

Write = Callable[[bytes], Awaitable[None]]
MakeEvent = Callable[[dict[str, Any]], bytes]


class PrefillProgress:
    """Hands the prompt chunks of steps to the streams that show them. Use on the event loop's thread only."""

    def __init__(self) -> None:
        self._watchers: dict[str, asyncio.Queue[Chunk]] = {}

    def add(self, events: Sequence[Event]) -> None:
        if not self._watchers:
            return
        for event in events:
            for chunk in event.chunks if isinstance(event, StepEvent) else ():
                if chunk.request_id in self._watchers:
                    self._watchers[chunk.request_id].put_nowait(chunk)

    @asynccontextmanager
    async def shown(self, write: Write, job: Job, make_event: MakeEvent) -> AsyncIterator[None]:
        """Within the block, each step that computes a part of the one prompt of a job, but the last, sends
        ``make_event`` of its progress: tokens in ``total``, from the ``cache`` and ``processed`` so far, the cached
        ones among them, and ``time_ms``."""
        name = job.name(0)
        self._watchers[name] = asyncio.Queue()
        task = asyncio.create_task(self._show(self._watchers[name], write, len(job.prompt(0)), make_event))
        try:
            yield
        finally:
            task.cancel()
            del self._watchers[name]

    @staticmethod
    async def _show(chunks: asyncio.Queue[Chunk], write: Write, total: int, make_event: MakeEvent) -> None:
        begun_s, cached, processed = time.monotonic(), 0, 0
        with suppress(ConnectionError):  # the request's own task notices
            while (computed := await chunks.get()).context + computed.num_tokens < total:
                if computed.context < processed or not processed:  # it begins; or anew, at another engine
                    cached = computed.context
                processed = computed.context + computed.num_tokens
                progress = {
                    "total": total,
                    "cache": cached,
                    "processed": processed,
                    "time_ms": round((time.monotonic() - begun_s) * 1e3, 3),
                }
                await write(make_event(progress))
