"""What a server says to whoever started it: where nobody can take it any more, it is lost, and nothing else is."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import Any, TextIO

PIPE_BYTES = 4096
"""A pipe that can be written to takes so many bytes at once, see PIPE_BUF in pipe(7)."""


class Unfailing:
    """A text stream whose writes neither fail nor wait: a full disk, a reader who has gone and one who does not read
    cost the text alone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        try:
            stream.flush()
            self._fd: int | None = stream.fileno()
        except (OSError, ValueError):  # no file, or closed
            self._fd = None

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            if self._fd is None:
                self._stream.write(text)
            else:
                self._write(self._fd, text.encode(errors="backslashreplace"))
        return len(text)

    def _write(self, fd: int, data: bytes) -> None:
        for at in range(0, len(data), PIPE_BYTES):
            if not select.select([], [fd], [], 0)[1]:
                return
            os.write(fd, data[at : at + PIPE_BYTES])

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
