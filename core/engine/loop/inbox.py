"""What the loop reads between two steps, and since when it has been there."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from engine.contracts.constraint import Grammar
from engine.loop.messages import Abort, DeviceFailed, Submit, ToEngine, Wake

ToLoop = ToEngine | DeviceFailed | Wake | None
"""Messages to the engine, and its own; ``None`` ends the loop like ``Shutdown``."""


class Inbox:
    """A queue between a thread that takes messages in and the loop, which reads them between steps. A sequence waits
    from the moment on in which it is put here: a step may take a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.compile: Callable[[Grammar], object] | None = None
        """Makes a grammar ready to be matched. Called by a thread of its own: the loop sees a sequence with a grammar
        when this has returned, and what it raises is raised again, and answered, when the sequence begins to run."""
        self._clock = clock
        self._messages: queue.SimpleQueue[ToLoop] = queue.SimpleQueue()
        self._num_put = self._num_read = 0  # sequences; each is written by one thread
        self._compiling: set[str] = set()
        """Sequences whose grammars are waited for."""
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def put(self, message: ToLoop) -> None:
        """Call from one thread."""
        if isinstance(message, Submit):
            message = msgspec.structs.replace(message, arrived_s=self._clock())
            self._num_put += 1
            if message.request.sampling.grammar is not None and self.compile is not None:
                self._compiling.add(message.request.request_id)
                self._compiler.submit(self._put_compiled, message)
                return
        if isinstance(message, Abort) and not self._compiling.isdisjoint(message.request_ids):
            self._compiler.submit(self._messages.put, message)  # after its sequences
            return
        self._messages.put(message)

    def _put_compiled(self, message: Submit) -> None:
        grammar, compile_ = message.request.sampling.grammar, self.compile
        try:
            if grammar is not None and compile_ is not None:
                compile_(grammar)
        finally:
            self._messages.put(message)
            self._compiling.discard(message.request.request_id)

    def wake(self) -> None:
        """Ends a sleep of the loop. May be called from any thread."""
        self._messages.put(Wake())

    def get(self, block: bool, timeout_s: float | None = None) -> ToLoop:
        """Raises :class:`queue.Empty` unless it may ``block``, or after ``timeout_s``."""
        message = self._messages.get(block, timeout_s)
        self._num_read += isinstance(message, Submit)
        return message

    def unread(self) -> int:
        """Sequences that the loop does not know yet."""
        return self._num_put - self._num_read
