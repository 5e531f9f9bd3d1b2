"""Frames between the engine process and the workers of its ranks.

A frame is a 4-byte little-endian length and a msgpack message (:mod:`engine.ranks.messages`).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Generic, TypeVar

import msgspec

from engine.ranks.messages import MAX_FRAME, FromWorker, ToWorker

HEADER = struct.Struct("<I")
Received = TypeVar("Received")


class Link(Generic[Received]):
    """One end of a connection. One thread receives; any thread sends."""

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[Received]) -> None:
        self._socket = connection
        self._decoder = decoder
        self._encode = msgspec.msgpack.Encoder().encode
        self._sending = threading.Lock()

    def limit_sending(self, seconds: float) -> None:
        """A peer that takes nothing for so long is gone: :meth:`send` then raises ``OSError``."""
        whole = int(seconds)
        limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, message: ToWorker | FromWorker) -> None:
        """Raises ``OSError`` when the peer is gone."""
        self.send_frame(self.frame(message))

    def frame(self, message: ToWorker | FromWorker) -> bytes:
        """A message as it is sent: encoded once for several peers."""
        body = self._encode(message)
        return HEADER.pack(len(body)) + body

    def send_frame(self, frame: bytes) -> None:
        """As :meth:`send`."""
        with self._sending:
            self._socket.sendall(frame)

    def receive(self) -> Received | None:
        """The next message; ``None`` when the peer is gone. Raises ``ValueError`` for what is no message."""
        header = self._read(HEADER.size)
        if header is None:
            return None
        (size,) = HEADER.unpack(header)
        if size > MAX_FRAME:
            raise ValueError(f"a frame of {size} bytes, at most {MAX_FRAME} are allowed")
        body = self._read(size)
        return None if body is None else self._decoder.decode(body)

    def _read(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(min(size - len(parts), 2**20))
            except ConnectionError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)

    def close(self) -> None:
        """End the connection; who receives on it, at either end, gets ``None``."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def to_workers(connection: socket.socket) -> Link[FromWorker]:
    """The engine process's end."""
    return Link(connection, msgspec.msgpack.Decoder(FromWorker))


def to_driver(connection: socket.socket) -> Link[ToWorker]:
    """A worker's end."""
    return Link(connection, msgspec.msgpack.Decoder(ToWorker))
