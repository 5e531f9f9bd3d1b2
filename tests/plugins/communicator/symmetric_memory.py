"""What stands for ``torch.distributed``'s symmetric memory, default group and CUDA where ranks are threads on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contracts.communicator import World
from engine.contracts.config import CommunicatorConfig
from engine.testing.context import build_context
from engine_plugins.communicator import symmetric
from engine_plugins.communicator.gathering import Ranks
from engine_plugins.communicator.symmetric import SymmetricCommunicator
from engine_plugins.communicator.torch_store import c10d


class Meeting:
    """Memory of the ranks of a group, and their barrier."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.memory: dict[int, Tensor] = {}
        self.barrier = threading.Barrier(len(ranks))
        self.changed = threading.Condition()
        self.reached = [0] * len(ranks)
        """Barriers, by rank."""

    def wait_for_others(self, index: int) -> None:
        """Until they are at a barrier that this rank has not reached."""
        with self.changed:
            mine = self.reached[index]
            others = [*range(index), *range(index + 1, len(self.ranks))]
            assert self.changed.wait_for(lambda: all(self.reached[other] > mine for other in others), 20)


class Machine:
    """GPUs that reach each other. The first rank sees all of them, the others see their own; as in the engine."""

    def __init__(
        self,
        size: int,
        gpus: Sequence[str] = (),
        names: Sequence[str] = (),
        cut_off: Collection[tuple[str, str]] = (),
    ) -> None:
        """``gpus`` and ``names`` by rank: several names stand for several machines; ``cut_off``: GPUs of which the
        first does not reach the second."""
        self.gpus = gpus or [f"GPU-{rank}" for rank in range(size)]
        self.names = names or ["here"] * size
        self.cut_off = cut_off
        self.meetings: dict[Ranks, Meeting] = {}
        self.opening = threading.Lock()
        self.here = threading.local()

    @property
    def rank(self) -> int:
        """Of the thread that asks."""
        return int(self.here.rank)

    @property
    def seen(self) -> Sequence[str]:
        return self.gpus if self.rank == 0 else self.gpus[self.rank : self.rank + 1]

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        """For torch, in :mod:`engine_plugins.communicator.symmetric`."""
        groups = SimpleNamespace(
            PrefixStore=c10d.PrefixStore,
            init_process_group=self.init_process_group,
            new_group=self.new_group,
            destroy_process_group=lambda: None,
        )
        patch.setattr(symmetric, "c10d", groups)
        patch.setattr(symmetric, "symmetric_memory", lambda: self)
        patch.setattr(symmetric, "socket", SimpleNamespace(gethostname=lambda: self.names[self.rank]))
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "device_count", lambda: len(self.seen))
        patch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=self.seen[index]))
        patch.setattr(
            torch.cuda, "can_device_access_peer", lambda a, b: (self.seen[a], self.seen[b]) not in self.cut_off
        )
        patch.setattr(torch.cuda, "synchronize", lambda device: None)

    def init_process_group(self, backend: str, *, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        assert (backend, rank, world_size) == ("nccl", self.rank, len(self.gpus))

    def new_group(self, ranks: list[int]) -> Meeting:
        with self.opening:
            return self.meetings.setdefault(tuple(ranks), Meeting(tuple(ranks)))

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert device == torch.device("cuda", 0)
        return torch.empty(size, dtype=dtype)

    def rendezvous(self, memory: Tensor, group: Meeting) -> Handle:
        group.memory[group.ranks.index(self.rank)] = memory
        group.barrier.wait(20)
        return Handle(group, group.ranks.index(self.rank))


@dataclass(frozen=True)
class Handle:
    meeting: Meeting
    index: int

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.meeting.memory[rank].view(dtype)[: sizes[0]]

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Raises ``RuntimeError`` after that time; on a GPU the kernel ends in a trap."""
        with self.meeting.changed:
            self.meeting.reached[self.index] += 1
            self.meeting.changed.notify_all()
        self.meeting.barrier.wait(timeout_ms / 1000)


class Gloo:
    """Stands for NCCL's process group: gloo's, whose calls cannot be interrupted."""

    def __init__(self, pg: Any) -> None:
        self.pg = pg

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pg, name)

    def abort(self) -> None:
        """Left to its deadline."""


class OnThreads(SymmetricCommunicator):
    """Its ranks are threads, its tensors on the CPU."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(CommunicatorConfig(), build_context())
        self.machine = machine

    def start(self, world: World, invitation: str) -> None:
        self.machine.here.rank = world.rank
        super().start(replace(world, device="cuda"), invitation)

    def _connected(self, name: str, ranks: Ranks, store: Any) -> Any:
        options = c10d.ProcessGroupGloo._Options()
        options._devices, options._threads = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")], 1
        options._timeout = timedelta(seconds=self._here.timeout_s)
        return Gloo(c10d.ProcessGroupGloo(store, ranks.index(self._here.rank), len(ranks), options))
