"""Starting an engine's further ranks: launch workers, see that they go with this process, and keep step with them."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from engine.assembly.bind import BoundEngine
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.assembly.threads import cores_of
from engine.contracts.parallelism import LauncherError, StartedWorker, WorkerJob, WorkerStart
from engine.loop.environment import with_defaults
from engine.loop.messages import Progress
from engine.ranks.blame import log_own
from engine.ranks.messages import (
    Allocate,
    Assignment,
    Begin,
    Bound,
    Built,
    Hello,
    Loaded,
    Meet,
    Present,
    RankInfo,
    Where,
)
from engine.ranks.workers import Workers
from engine.ranks.world import LOOPBACK, world_of
from engine.startup import worker
from engine.startup.agreement import check_hello, check_present
from engine.startup.fingerprint import versions
from engine.startup.replicas import device_of
from engine.step.plan import RankFailed

T = TypeVar("T")
RANK_0 = "rank 0"
START_S = 120.0
"""How long workers may take to come."""


class Ranks:
    """The further ranks of an engine that is being built, from their launch until plans may come.

    Every method raises :class:`AssemblyError` where the configuration cannot run on some rank, and
    :class:`~engine.step.plan.RankFailed` where one fails.
    """

    def __init__(
        self,
        plan: EnginePlan,
        bound: BoundEngine,
        local: Callable[[], Where],
        on_progress: Callable[[Progress], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """``local``: where rank 0 is; ``on_failure``: called once if a rank fails, from another thread."""
        self._plan = plan
        self._launcher = bound.parallelism
        self._communicator = bound.communicator
        self._on_progress = on_progress
        self._told = on_failure
        self._versions = versions()  # before workers look, should somebody change files meanwhile
        self.invitation = ""
        self.host = LOOPBACK
        """An address of this machine that the other ranks reach."""
        start = WorkerStart((sys.executable, "-P", "-m", "engine.startup.worker"), worker.run)
        try:
            started = bound.parallelism.launch(jobs(plan), start, START_S)
        except LauncherError as error:
            raise AssemblyError([str(error)]) from error
        self.workers = Workers(started, plan.call_timeout_s, local, self._failed)
        try:
            self._shake_hands(started)
        except BaseException as error:
            self.close(error)
            raise

    def _failed(self, why: str) -> None:
        self._communicator.abort(why)
        self._told(why)

    def _shake_hands(self, started: Sequence[StartedWorker]) -> None:
        plan = self._plan
        for rank, hello in self._wait(Hello).items():
            check_hello(self._name(rank), hello, self._versions, plan, RANK_0)
        encoded = plan.to_json()
        addresses = {one.rank: addresses_of(one.connection) for one in started}
        self.host = next((here for here, _ in addresses.values() if here != LOOPBACK), LOOPBACK)
        for rank, (_, there) in addresses.items():
            self.workers.send(Assignment(rank, encoded, cores_of(plan), there), rank)
        for rank, present in self._wait(Present).items():
            check_present(self._name(rank), present, plan, RANK_0)
        self.workers.send(Begin())
        self._wait(Bound)
        self.invitation = self._communicator.invite(world_of(plan, 0, self.host))
        self.workers.send(Meet(self.invitation))

    def together(self, function: Callable[[], T]) -> T:
        """Rank 0's part of what all ranks do; what makes it fail may have happened on another one."""
        try:
            return function()
        except AssemblyError:
            raise
        except Exception as error:
            log_own(error)
            raise self._failure(self.workers.explain(error)) from error

    def fewest_blocks(self, own: int) -> tuple[int, int]:
        """How many KV blocks every rank has memory for, and the rank with the fewest. ``own``: rank 0's."""
        found = {0: own} | {rank: loaded.num_blocks for rank, loaded in self._wait(Loaded).items()}
        binding = min(found, key=lambda rank: (found[rank], rank))
        self.workers.send(Allocate(found[binding]))
        return found[binding], binding

    def built(self) -> tuple[tuple[RankInfo, ...], tuple[str, ...]]:
        """Wait until plans may come."""
        places = self.workers.places()
        infos, notes = [], []
        for rank, built in sorted(self._wait(Built).items()):
            infos.append(RankInfo(rank, places[rank], *_rest(built.info)))
            notes += [f"rank {rank}: {note}" for note in built.notes]
        return tuple(infos), tuple(notes)

    def close(self, error: BaseException | None = None) -> None:
        """Give up: nothing was handed out. Workers hear what does not fit."""
        self.workers.close(error.text().removeprefix("engine: ") if isinstance(error, AssemblyError) else "")
        self._launcher.close()

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self.workers.places()[rank]})"

    def _wait(self, kind: type[T]) -> dict[int, T]:
        try:
            return self.workers.replies(kind, partial(self._waits))
        except RankFailed as error:
            raise self._failure(str(error)) from error

    def _waits(self, for_what: str) -> None:
        self._on_progress(Progress("start ranks", 0.0, for_what))

    def _failure(self, why: str) -> Exception:
        return AssemblyError([why]) if self.workers.refused else RankFailed(why)


def _rest(info: RankInfo) -> tuple[str, int, int, int]:
    return info.holds, info.weights_bytes, info.kv_bytes, info.num_blocks


def jobs(plan: EnginePlan) -> list[WorkerJob]:
    """A worker for every rank but 0."""
    threads = str(cores_of(plan))
    common = with_defaults({}, plan.device.kind) | {"OMP_NUM_THREADS": threads}
    return [
        WorkerJob(rank, common | device_of(plan, rank % plan.ranks_per_node)) for rank in range(1, plan.layout.size)
    ]


def addresses_of(connection: socket.socket) -> tuple[str, str]:
    """Of this end and of the other one, as each is reached from the other."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return LOOPBACK, LOOPBACK
    return str(connection.getsockname()[0]), str(connection.getpeername()[0])
