"""What a sandbox and its parent send each other: bytes behind their length, and behind the CPU time they may cost."""

from __future__ import annotations

import socket
import struct
import time

MAX_FRAME = 64 * 2**20
"""Bytes."""
_HEADER = struct.Struct("<Id")


class FrameTooLarge(ValueError):
    """The peer sends more than was agreed."""


def send(connection: socket.socket, body: bytes, cpu_s: float = 0.0, deadline: float | None = None) -> None:
    """``cpu_s``: what the answer may take. ``deadline``: on the monotonic clock.

    Raises ``TimeoutError`` and ``OSError``.
    """
    connection.settimeout(_left(deadline))
    connection.sendall(_HEADER.pack(len(body), cpu_s))
    connection.sendall(body)


def receive(connection: socket.socket, limit: int, deadline: float | None = None) -> tuple[bytes, float]:
    """A frame of at most ``limit`` bytes, and what its answer may cost.

    Raises :class:`FrameTooLarge`, ``EOFError``, ``TimeoutError`` and ``OSError``.
    """
    size, cpu_s = _HEADER.unpack(_exactly(connection, _HEADER.size, deadline))
    if size > limit:
        raise FrameTooLarge(f"a frame of {size} bytes; expected at most {limit}")
    return _exactly(connection, size, deadline), cpu_s


def _exactly(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        connection.settimeout(_left(deadline))
        received = connection.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]
    return bytes(data)


def _left(deadline: float | None) -> float | None:
    # A timeout of 0 would mean: do not block.
    return None if deadline is None else max(deadline - time.monotonic(), 0.001)
