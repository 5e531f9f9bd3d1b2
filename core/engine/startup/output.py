"""What a server says to whoever started it: where nobody can take it any more, it is lost, and nothing else is."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import Any, TextIO

PIPE_BYTES = 4096
"""A pipe that can be written to takes so many bytes at once, see PIPE_BUF in pipe(7)."""
PATIENCE_S = 0.05
"""How long a reader who has kept up so far is waited for."""


class Unfailing:
    """A text stream whose writes neither fail nor wait for somebody who does not read: a full disk, a reader who has
    gone and one who has stopped cost the text alone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._stuck = self._cut = False
        try:
            stream.flush()
            self._fd: int | None = _of_its_own(stream.fileno())
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
        data = b"\n" * self._cut + data  # what comes after a line that was lost in the middle begins a new one
        while data:
            if not select.select([], [fd], [], 0 if self._stuck else PATIENCE_S)[1]:
                self._stuck = True
                return
            written = os.write(fd, data[:PIPE_BYTES])
            data, self._stuck = data[written:], False
            self._cut = bool(data)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _of_its_own(fd: int) -> int:
    """A terminal opened once more, without waiting: one that can be written to may still take less than it is given."""
    if not os.isatty(fd):
        return fd
    try:
        return os.open(os.ttyname(fd), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # another user's
        return fd


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
