"""All ranks in the engine process, a thread each: for tests and debuggers. They share the interpreter, so they are no
faster than one."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from engine.contracts.config import ParallelismConfig
from engine.contracts.parallelism import StartedWorker, WorkerJob, WorkerStart
from engine.contracts.provider import BuildContext

JOIN_S = 5.0
"""How long threads may take to end once their connections have."""


@dataclass(slots=True)
class Started:
    """See :class:`engine.contracts.parallelism.StartedWorker`."""

    rank: int
    connection: socket.socket
    place: str
    thread: threading.Thread

    def ended(self) -> str | None:
        return None if self.thread.is_alive() else "its thread"

    def kill(self) -> None:
        """A thread cannot be killed: it ends when its connection does."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class ThreadLauncher:
    """See :class:`engine.contracts.parallelism.Launcher`."""

    def __init__(self, config: ParallelismConfig, context: BuildContext) -> None:
        if config.nodes > 1:
            raise ValueError(f"parallelism.nodes={config.nodes}: parallelism=threads has all ranks in one process")
        self._started: list[Started] = []

    def launch(self, jobs: Sequence[WorkerJob], start: WorkerStart, timeout_s: float) -> Sequence[StartedWorker]:
        for job in jobs:
            ours, theirs = socket.socketpair()
            thread = threading.Thread(target=start.run, args=(theirs,), name=f"worker {job.rank}", daemon=True)
            self._started.append(Started(job.rank, ours, f"thread {thread.name}", thread))
            thread.start()
        return tuple(self._started)

    def close(self) -> None:
        started, self._started = self._started, []
        for one in started:
            one.kill()
        for one in started:
            one.thread.join(JOIN_S)
