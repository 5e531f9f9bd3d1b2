"""What a sandbox and its parent send each other: bytes after their length, and after the CPU time they may cost."""

from __future__ import annotations

import struct

MAX_FRAME = 64 * 2**20
"""Most bytes of a frame."""
_HEADER = struct.Struct("<Id")
_SMALL = 64 * 1024
_LARGE = 2**20


class FrameTooLarge(ValueError):
    """The peer sends more than was agreed."""


def packed(body: bytes, cpu_s: float = 0.0) -> bytes:
    """A frame. ``cpu_s``: what the answer may take."""
    return _HEADER.pack(len(body), cpu_s) + body


class Incoming:
    """The one frame that the peer sends, of at most ``limit`` bytes, while it arrives."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = bytearray()
        self._size: int | None = None
        self.cpu_s = 0.0

    @property
    def wanted(self) -> int:
        """How many bytes to receive next: small frames arrive at once."""
        return _SMALL if self._size is None else min(self._size - len(self._data), _LARGE)

    @property
    def body(self) -> bytes:
        return bytes(self._data)

    def take(self, received: bytes) -> bool:
        """True: that was the end of the frame. Raises :class:`FrameTooLarge`, and ``EOFError`` for no bytes."""
        if not received:
            raise EOFError
        self._data += received
        if self._size is None:
            if len(self._data) < _HEADER.size:
                return False
            self._size, self.cpu_s = _HEADER.unpack_from(self._data)
            del self._data[: _HEADER.size]
        if self._size > self._limit:
            raise FrameTooLarge(f"a frame of {self._size} bytes; expected at most {self._limit}")
        if len(self._data) > self._size:
            raise FrameTooLarge(f"{len(self._data)} bytes in a frame of {self._size}")
        return len(self._data) == self._size
