"""What a server says to whoever started it: where nobody can take it any more, it is lost, and nothing else is."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO


class Unfailing:
    """A text stream whose writes cannot fail: a full disk and a reader who has gone cost the text alone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # ValueError: closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def keep_output() -> None:
    """From here on printing and logging cannot fail in this process."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # Closed: the next file opened would take its number, and be written to by whoever means stderr.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        setattr(sys, name, Unfailing(open(os.devnull, "w") if stream is None else stream))  # noqa: SIM115
