"""Answers that consist of blocks: a text, a call of a tool. Streams open, fill and close one after the other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import msgspec

from engine.http.format import Format
from engine.http.sse import event as named
from engine.service.generation import Generation
from engine.service.job import Job
from engine.service.output import Delta
from engine.service.parts import Part, goes_on, merged
from engine.service.tokenizer import Tokenizer

Event = dict[str, Any]
"""Has a ``type``, which is its name."""


class BlockFormat(Format):
    """Writes an answer of one sequence."""

    def __init__(self, job: Job, tokenizer: Tokenizer, generation: Generation) -> None:
        super().__init__(job, tokenizer, generation)
        self.blocks: list[Part] = []
        """Those that have ended."""
        self._open: list[Part] = []
        """What came of the one that has not."""
        self._begun = False

    @abstractmethod
    def begun(self) -> Iterator[Event]:
        """The events before the first block."""

    @abstractmethod
    def opened(self, index: int, part: Part) -> Iterator[Event]:
        """Block ``index`` begins; ``part`` is the first of it."""

    @abstractmethod
    def grown(self, index: int, part: Part, delta: Delta) -> Iterator[Event]:
        """More of block ``index``, as ``delta`` brought it."""

    @abstractmethod
    def closed(self, index: int, block: Part, is_whole: bool) -> Iterator[Event]:
        """Nothing more of ``block`` comes. ``is_whole=False``: the output ended at its limit within it."""

    @abstractmethod
    def ended(self, delta: Delta) -> Iterator[Event]:
        """The last events, after those of all blocks; ``delta`` is the last one."""

    def events(self, delta: Delta) -> bytes:
        return b"".join([self.written(each) for each in self._events(delta)])

    def written(self, event: Event) -> bytes:
        """An event as it is sent."""
        return named(msgspec.json.encode(event), event["type"])

    def ending(self) -> bytes:
        return b""

    def _events(self, delta: Delta) -> Iterator[Event]:
        if not self._begun:
            self._begun = True
            yield from self.begun()
        for part in delta.parts:
            if not self._open or not goes_on(self._open[-1], part):
                yield from self._close()
                yield from self.opened(len(self.blocks), part)
            self._open.append(part)
            yield from self.grown(len(self.blocks), part, delta)
        if delta.finish_reason is not None:
            yield from self._close(delta.finish_reason != "length")
            yield from self.ended(delta)

    def _close(self, is_whole: bool = True) -> Iterator[Event]:
        if self._open:
            (block,) = merged(self._open)
            yield from self.closed(len(self.blocks), block, is_whole)
            self.blocks.append(block)
            self._open = []
