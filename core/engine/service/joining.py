"""A process that is a further rank's: it starts a worker for every time the engine starts, and ends with the engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from types import FrameType

from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.contracts.config import Joining
from engine.startup.worker import JOIN_S, NOBODY_THERE, TURNED_AWAY, address_of, say

PAUSE_S = 0.5


def joining_of(plan: EnginePlan) -> Joining | None:
    """How this process joins another one that serves; ``None``: it serves. Raises :class:`AssemblyError`."""
    try:
        return plan.parallelism.joins()
    except ValueError as error:
        raise AssemblyError([str(error)]) from error


def work(address: str, rank: int, environment: Mapping[str, str]) -> int:
    """Be a rank of the engine at ``HOST:PORT`` until it is shut down, each time in a process of its own. Returns an
    exit code. Raises :class:`AssemblyError` for what is no address."""
    try:
        address_of(address)
    except ValueError as error:
        raise AssemblyError([str(error)]) from error
    command = [sys.executable, "-P", "-m", "engine.startup.worker", "--join", address, "--rank", str(rank)]
    process: subprocess.Popen[bytes] | None = None
    ending = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ending
        ending = True
        if process is not None:
            process.kill()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    joined = False
    say(f"looking for the engine at {address}, for up to {JOIN_S:.0f} s")
    while not ending:
        process = subprocess.Popen(
            [*command, "--parent", str(os.getpid())], env={**os.environ, **environment}, stdin=subprocess.DEVNULL
        )
        code = process.wait()
        if ending:
            break
        if code == 0:
            say("the engine was shut down")
            return 0
        if code == TURNED_AWAY:
            return 1
        if code == NOBODY_THERE:
            return 0 if joined else 1
        joined = True
        say("the engine failed; joining it again")
        time.sleep(PAUSE_S)
    return 0
