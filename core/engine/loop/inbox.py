"""What the loop reads between two steps, and since when it has been there."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

import msgspec

from engine.loop.messages import DeviceFailed, Submit, ToEngine

ToLoop = ToEngine | DeviceFailed | None
"""Messages to the engine, and its own; ``None`` ends the loop like ``Shutdown``."""


class Inbox:
    """A queue between a thread that takes messages in and the loop, which reads them between steps. A sequence waits
    from the moment on in which it is put here: a step may take a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._messages: queue.SimpleQueue[ToLoop] = queue.SimpleQueue()
        self._num_put = self._num_read = 0  # sequences; each is written by one thread

    def put(self, message: ToLoop) -> None:
        if isinstance(message, Submit):
            message = msgspec.structs.replace(message, arrived_s=self._clock())
            self._num_put += 1
        self._messages.put(message)

    def get(self, block: bool) -> ToLoop:
        """Raises :class:`queue.Empty` unless it may ``block``."""
        message = self._messages.get(block=block)
        self._num_read += isinstance(message, Submit)
        return message

    def unread(self) -> int:
        """Sequences that the loop does not know yet."""
        return self._num_put - self._num_read
