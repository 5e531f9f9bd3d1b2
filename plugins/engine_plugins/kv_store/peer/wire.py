"""What engines say to each other about records.

Who asks sends ``GET``; who answers sends for each, in order, the records that it has up to the first that it has not,
and ``MISSING`` if that was before the last. In between it says which records it has, and has no more. A message is
:data:`MESSAGE`, then ids (:data:`ID`), or for ``RECORD`` a record with its header.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import Sequence

from engine.contracts.kv_store import RecordId

MESSAGE = struct.Struct("<BxHI")
"""Kind, number of ids, number of the request."""
ID = struct.Struct("<H32s")
GET, HAVE, GONE, RECORD, MISSING = range(1, 6)

MOST_IDS = 256
"""Of one message."""
MOST_ASKED = 64
"""Records of one request."""
MOST_ASKED_BYTES = 8 * 1024**2
"""Of one request for more than one record."""
CREDIT = 4
"""Requests of one engine that are not answered: whoever sends more is cut off."""
MOST_KNOWN = 1 << 16
"""Records of each group that an engine is known to have; older ones are forgotten."""


class Misbehaved(Exception):
    """The other side did what no engine does, or nothing for too long."""


async def receive(sock: socket.socket, num_bytes: int) -> bytearray:
    """Raises ``EOFError``, ``OSError``."""
    data = bytearray(num_bytes)
    await receive_into(sock, memoryview(data))
    return data


async def receive_into(sock: socket.socket, left: memoryview) -> None:
    """Raises ``EOFError``, ``OSError``."""
    loop = asyncio.get_running_loop()
    while left:
        num_bytes = await loop.sock_recv_into(sock, left)
        if not num_bytes:
            raise EOFError
        left = left[num_bytes:]


async def receive_line(sock: socket.socket, most: int) -> str:
    """Raises ``EOFError``, ``OSError``, :class:`Misbehaved`."""
    said, loop = b"", asyncio.get_running_loop()
    while not said.endswith(b"\n"):
        part = await loop.sock_recv(sock, 1)
        if not part:
            raise EOFError
        said += part
        if len(said) > most:
            raise Misbehaved("said a line without an end")
    return said[:-1].decode("ascii", "replace")


def message(kind: int, ids: Sequence[RecordId] = (), number: int = 0) -> bytes:
    return MESSAGE.pack(kind, len(ids), number) + b"".join([ID.pack(*each) for each in ids])


async def receive_ids(sock: socket.socket, count: int, num_groups: int, most: int) -> list[RecordId]:
    """Raises as :func:`receive`, and :class:`Misbehaved`."""
    if not 0 < count <= most:
        raise Misbehaved(f"named {count} records at once, at most {most} are")
    ids = [(group, key) for group, key in ID.iter_unpack(await receive(sock, count * ID.size))]
    if any(group >= num_groups for group, _ in ids):
        raise Misbehaved("named a KV group that there is not")
    return ids


def say(what: str) -> None:
    """To who runs this engine."""
    sys.stderr.write(f"engine: kv_store=peer: {what}\n")
    sys.stderr.flush()
