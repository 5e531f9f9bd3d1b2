"""Launcher ``mine``: a process on this machine for each further rank."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from engine.contracts.config import ParallelismConfig
from engine.contracts.parallelism import LauncherError, StartedWorker, WorkerJob, WorkerStart
from engine.contracts.provider import BuildContext, Provider
from engine.hookspecs import hookimpl


@dataclass(frozen=True)
class MineParallelismConfig(ParallelismConfig):
    """The keys ``parallelism.<field>``; those of the base say how many ranks there are."""

    nice: int = 0
    """Added to the niceness of workers."""


@hookimpl
def engine_parallelism() -> list[Provider]:
    return [
        Provider(
            "mine",
            "engine.cli.plugins.templates.parallelism.plugin:MineParallelism",
            config=MineParallelismConfig,
            doc="A process for each rank.",
        )
    ]


@dataclass(slots=True)
class MineWorker:
    """A worker that was started, and the connection to it."""

    rank: int
    connection: socket.socket
    place: str
    process: subprocess.Popen[bytes]

    def ended(self) -> str | None:
        """How it ended; ``None`` while it runs."""
        code = self.process.poll()
        return None if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class MineParallelism:
    """Starts workers and hands over a connection to each. What they compute, and that they live, is the core's care."""

    def __init__(self, config: MineParallelismConfig, context: BuildContext) -> None:
        self._nice = config.nice
        self._workers: list[MineWorker] = []

    def launch(self, jobs: Sequence[WorkerJob], start: WorkerStart, timeout_s: float) -> Sequence[StartedWorker]:
        """A worker for every job, connected; none at all where one cannot be started."""
        try:
            for job in jobs:
                self._workers.append(self._worker(job, start))
        except OSError as error:
            self.close()
            raise LauncherError(f"rank {len(self._workers) + 1} could not be started: {error}") from error
        return tuple(self._workers)

    def _worker(self, job: WorkerJob, start: WorkerStart) -> MineWorker:
        ours, theirs = socket.socketpair()
        with theirs:
            # The worker inherits its end, and ends when the process does that it is told about.
            where = ("--fd", str(theirs.fileno()), "--parent", str(os.getpid()))
            process = subprocess.Popen(
                ["nice", "-n", str(self._nice), *start.command, *where],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **job.environment},
            )
        return MineWorker(job.rank, ours, f"pid {process.pid}", process)

    def close(self) -> None:
        """End what is still there."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()
