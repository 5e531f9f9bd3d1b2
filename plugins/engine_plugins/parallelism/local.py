"""All ranks on this machine: the engine process starts a child for each further one, and nothing for one rank."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from engine.contracts.config import ParallelismConfig
from engine.contracts.parallelism import LauncherError, StartedWorker, WorkerJob, WorkerStart
from engine.contracts.provider import BuildContext

REAP_S = 5.0
"""How long a process that was killed may take to be gone."""


@dataclass(slots=True)
class Child:
    """See :class:`engine.contracts.parallelism.StartedWorker`."""

    rank: int
    connection: socket.socket
    place: str
    process: subprocess.Popen[bytes]

    def ended(self) -> str | None:
        code = self.process.poll()
        return None if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(REAP_S)


class LocalLauncher:
    """See :class:`engine.contracts.parallelism.Launcher`."""

    def __init__(self, config: ParallelismConfig, context: BuildContext) -> None:
        if config.nodes > 1:
            raise ValueError(
                f"parallelism.nodes={config.nodes}: parallelism=local starts ranks on this machine alone; use "
                "parallelism=join, parallelism=env or parallelism=ray"
            )
        self._children: list[Child] = []

    def launch(self, jobs: Sequence[WorkerJob], start: WorkerStart, timeout_s: float) -> Sequence[StartedWorker]:
        try:
            for job in jobs:
                self._children.append(_child(job, start))
        except OSError as error:
            self.close()
            raise LauncherError(f"rank {len(self._children) + 1} could not be started: {error}") from error
        return tuple(self._children)

    def close(self) -> None:
        children, self._children = self._children, []
        for child in children:
            child.kill()


def _child(job: WorkerJob, start: WorkerStart) -> Child:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*start.command, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **job.environment},
            stdin=subprocess.DEVNULL,
        )
    return Child(job.rank, ours, f"pid {process.pid}", process)
