"""Ranks as processes: what they do is a function of a module, what it returns comes back."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from engine.contracts.communicator import Communicator, World
from engine.testing.communicator import NEVER_S, Job, act_as

Make = Callable[[], Communicator]

_processes = get_context("forkserver")  # a server that has imported torch and nothing else has done: forks are quick
_processes.set_forkserver_preload(["tests.plugins.communicator.preloaded"])


def _rank(connection: Connection, make: Make, world: World, job: Job) -> None:
    import torch

    torch.set_num_threads(1)
    communicator = make()
    connection.send(communicator.invite(world) if world.rank == 0 else "")
    result = act_as(communicator, world, connection.recv(), job)
    connection.send_bytes(pickle.dumps(result))
    connection.recv()
    communicator.close()


class Ranks:
    """Processes that run ``job``. A context: none is left behind."""

    def __init__(self, make: Make, worlds: Sequence[World], job: Job, absent: int = -1) -> None:
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._absent, self.invitation = absent, ""
        for world in worlds:
            here, there = _processes.Pipe()
            process = _processes.Process(target=_rank, args=(there, make, world, job))
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        for rank, connection in enumerate(self._connections):  # or those that are quick would wait for the others
            assert connection.poll(NEVER_S), f"rank {rank} does not come"
            self.invitation = connection.recv() or self.invitation
        for rank, connection in enumerate(self._connections):
            if rank != self._absent:
                connection.send(self.invitation)
        return self

    def __exit__(self, *error: object) -> None:
        for connection in self._connections:
            with suppress(OSError):
                connection.send("close")
        for rank, process in enumerate(self._processes):
            if rank == self._absent or error[0] is not None:
                process.kill()
            process.join(NEVER_S)
            assert not process.is_alive(), f"process {process.pid} of rank {rank} does not end"
        for connection in self._connections:
            connection.close()

    def pid(self, rank: int) -> int:
        pid = self._processes[rank].pid
        assert isinstance(pid, int)
        return pid

    def signal(self, rank: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid(rank), number)

    def result(self, rank: int) -> Any:
        """What the job returned, or the exception that it, or ``start``, raised."""
        assert self._connections[rank].poll(NEVER_S), f"rank {rank} hangs"
        return pickle.loads(self._connections[rank].recv_bytes())  # noqa: S301 - of our own process

    def results(self) -> list[Any]:
        return [None if rank == self._absent else self.result(rank) for rank in range(len(self._processes))]


def worlds_of(size: int, groups: Mapping[str, tuple[int, ...]] | None = None, timeout_s: float = 20.0) -> list[World]:
    every = groups or {"world": tuple(range(size))}
    return [
        World(rank, size, {name: ranks for name, ranks in every.items() if rank in ranks}, "cpu", timeout_s)
        for rank in range(size)
    ]


class InProcesses:
    """Put before a suite: its ranks are processes."""

    maker: staticmethod[[], Communicator]
    timeout_s: float

    def make(self) -> Any:
        return self.maker()

    def run(
        self,
        job: Job,
        size: int,
        groups: Mapping[str, tuple[int, ...]] | None = None,
        timeout_s: float | None = None,
        absent: int = -1,
    ) -> list[Any]:
        worlds = worlds_of(size, groups, timeout_s or self.timeout_s)
        with Ranks(type(self).maker, worlds, job, absent) as ranks:
            return ranks.results()
