"""What the person who started the server sees while the engine gets ready: never silent for more than two seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from engine.loop.messages import Progress

SILENCE_S = 2.0
"""A phase that takes longer says how far it is, this often."""


class StartReport:
    """A line when a phase begins, and one every two seconds while it goes on. Use as ``async with``."""

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        every_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._every_s = every_s
        self._clock = clock
        self._latest: Progress | None = None
        self._began_s = self._said_s = clock()

    async def __aenter__(self) -> StartReport:
        self._reminding = asyncio.create_task(self._remind())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reminding.cancel()
        await asyncio.gather(self._reminding, return_exceptions=True)

    def show(self, progress: Progress) -> None:
        """Take in what the engine says."""
        if self._latest is None or progress.phase != self._latest.phase:
            self._began_s = self._said_s = self._clock()
            detail = f": {progress.detail}" if progress.detail else ""
            self._say(f"starting: {progress.phase}{detail}")
        self._latest = progress
        if progress.fraction >= 1.0 and not progress.detail:
            self._latest = None  # done; what comes next says so itself
        else:
            self.remind()

    def remind(self) -> None:
        """Say how far the phase is, if nothing was said for a while."""
        now, progress = self._clock(), self._latest
        if progress is None or now - self._said_s < self._every_s:
            return
        self._said_s = now
        share = f" {progress.fraction:.0%}" if 0.0 < progress.fraction < 1.0 else ""
        detail = f" ({progress.detail})" if progress.detail else ""
        self._say(f"starting: {progress.phase}{share}{detail}, {now - self._began_s:.0f} s")

    async def _remind(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            self.remind()
