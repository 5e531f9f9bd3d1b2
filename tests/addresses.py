"""Addresses on this machine that nobody listens at."""

from __future__ import annotations

import socket


def free_addresses(count: int) -> list[str]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in taken]
    for sock in taken:
        sock.close()
    return addresses
