"""Where the ranks of ``torch.distributed``'s process groups find each other: a store in the process of rank 0."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

from engine.contracts.communicator import CommunicatorError, World
from engine_plugins.communicator.calls import not_come

c10d: Any = torch.distributed
"""Whose process groups and stores are there without being listed for type checkers."""


def serve(world: World) -> tuple[Any, str]:
    """A store that listens to ``world.host`` alone, and the invitation to it."""
    listener = socket.create_server((world.host, 0))
    port = listener.getsockname()[1]
    wait = timedelta(seconds=world.timeout_s)
    server = c10d.TCPStore(
        world.host, port, None, True, wait, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return server, f"{world.host} {port} {secrets.token_hex(16)}"


def connect(world: World, invitation: str, deadline: float) -> Any:
    """A connection to that store. Raises :class:`CommunicatorError`."""
    words = invitation.split()
    if len(words) != 3 or not words[1].isdigit():
        raise CommunicatorError(f"{invitation!r} is no invitation of communicators of torch.distributed")
    host, port, token = words
    try:
        store = c10d.TCPStore(host, int(port), None, False, until(deadline), wait_for_workers=False)
    except RuntimeError as error:
        where = f"rank {world.rank} does not reach rank 0 at {host}:{port}"
        raise CommunicatorError(f"{where}: {reason(error)}", [0]) from error
    return c10d.PrefixStore(token, store)


def meet(world: World, store: Any, deadline: float) -> None:
    """Until all ranks have come. Raises :class:`CommunicatorError` naming those that do not."""
    missing = []
    try:
        store.set(f"here {world.rank}", "")
        for rank in range(world.size):
            try:
                store.wait([f"here {rank}"], until(deadline))
            except c10d.DistStoreError:
                missing.append(rank)
    except RuntimeError as error:
        raise CommunicatorError(f"rank {world.rank}: rank 0 has gone: {reason(error)}", [0]) from error
    if missing:
        raise not_come(world, missing)


def groups_of(world: World, messages: str) -> Sequence[tuple[str, tuple[int, ...]]]:
    """The groups in the order in which all ranks make them, and one of all ranks for messages between two."""
    return (*sorted(world.groups.items()), (messages, tuple(range(world.size))))


def until(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def reason(error: BaseException) -> str:
    """What torch says, without file and line and without advice."""
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return said.partition("] ")[2].partition(". ")[0] if said.startswith("[") else said.partition(". ")[0]
