"""Commands that start engines end them, however they themselves end."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def ends_cleanly() -> Iterator[None]:
    """A closed terminal and SIGTERM end this process as ``sys.exit`` does, so that what it started ends with it; a
    second one, as ``timeout`` sends, does not disturb that. For the main thread."""

    def leave(number: int, frame: Any) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
