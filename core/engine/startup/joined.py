"""An engine process that connects to a server on another machine."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from dataclasses import dataclass, replace

from engine.assembly.elsewhere import on_this_machine
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.ranks.link import to_driver
from engine.ranks.messages import Assignment, Begin, End
from engine.startup.agreement import hello, present
from engine.startup.worker import TurnedAway, join

KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 5))
"""A server whose machine is gone is noticed after some 15 s, though nothing is sent to it."""
LAST_S = 5.0
"""How long an engine whose server is gone may take to end by itself."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A server was found, which has given a plan."""

    connection: socket.socket
    host: str
    """This one's address, as the server sees it."""
    assignment: Assignment

    def plan(self) -> EnginePlan:
        """For this machine. Raises :class:`AssemblyError`."""
        plan = EnginePlan.from_json(self.assignment.plan)
        try:
            plan = on_this_machine(plan, self.assignment.threads)
        except AssemblyError as error:
            raise AssemblyError([f"on {self.host}: {problem}" for problem in error.problems]) from error
        if plan.memory_bytes is not None:
            from engine.startup.memory.budget import free_memory

            free = free_memory(plan.device) // plan.ranks_per_device
            plan = replace(plan, memory_bytes=min(plan.memory_bytes, free))
        return plan


def join_server(address: str) -> Joined | None:
    """Connect to a server that waits for an engine at ``HOST:PORT``. ``None``: there is none, or it does not want this
    one; why is said on stderr."""
    why = "nobody is there"
    try:
        if (connection := join(address, 0)) is not None:
            return _join(connection)
    except TurnedAway as turned_away:
        why = str(turned_away)
    sys.stderr.write(f"engine: the server at {address} does not start this engine: {why}\n")
    sys.stderr.flush()
    return None


def _join(connection: socket.socket) -> Joined:
    """Raises :class:`TurnedAway`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    link = to_driver(connection)
    link.send(hello())
    assignment = answer = link.receive()
    if isinstance(assignment, Assignment):
        link.send(present(EnginePlan.from_json(assignment.plan)))
        if isinstance(answer := link.receive(), Begin):
            return Joined(connection, assignment.host, assignment)
    raise TurnedAway(answer.why if isinstance(answer, End) else "it is gone")


def end_soon() -> None:
    """The connection has ended: this process ends, even in the middle of a step that never does."""

    def end() -> None:
        time.sleep(LAST_S)
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
