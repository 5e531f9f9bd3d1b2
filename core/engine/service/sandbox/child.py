"""The child: it can open no file or socket and start no process, and answers frames until its parent is gone.

Nothing inside a process can interrupt a call into C code, so its limits are the kernel's: one of CPU time for each
answer (not of wall time: a busy machine refuses nobody) and one of memory for the process.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from engine.service.sandbox.frames import MAX_FRAME, Incoming, packed
from engine.startup.lifetime import end_with

OUT_OF_MEMORY = 77
"""The exit code of a child that ran out of memory."""
NUM_FDS = 3
"""The socket and two times /dev/null: there is no room for another file."""

Answer = Callable[[bytes], bytes]


def main(answer: Answer, rehearse: Callable[[], object]) -> int:
    """``python -m MODULE PARENT MEMORY_MB``, and what else the module takes. ``rehearse``: load what libraries load on
    first use; no file can be opened later."""
    parent, memory_mb = map(int, sys.argv[1:3])
    end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; this process ends with its socket
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    rehearse()
    _confine(memory_mb)
    with suppress(EOFError, OSError):  # the parent has closed the socket
        _serve(socket.socket(fileno=sys.stdin.fileno()), answer)
    return 0


def _serve(connection: socket.socket, answer: Answer) -> None:
    while True:
        question = Incoming(MAX_FRAME)
        while not question.take(connection.recv(question.wanted)):
            pass
        signal.setitimer(signal.ITIMER_PROF, question.cpu_s)
        try:
            reply = answer(question.body)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)  # what is left of the heap is of no use to the next task
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(packed(reply))


def _confine(memory_mb: int) -> None:
    """``memory_mb``: address space on top of what is in use now."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, limit in (
        (resource.RLIMIT_AS, in_use + memory_mb * 2**20),
        (resource.RLIMIT_NOFILE, NUM_FDS),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (lowest, lowest))
