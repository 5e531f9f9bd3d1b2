"""Small sums between GPUs of one machine through memory that all ranks read: symmetric memory of ``torch.distributed``.

Every rank copies its part into memory of its own, which the others have mapped, and one kernel reads all parts and adds
them in the order of ranks. Larger sums and everything else are NCCL's.

A barrier before the kernel says that all have written, and one after it that all have read: no rank overwrites a part
that a slow one still reads. Two halves used in turn would do with one barrier only where the host makes every call: a
replayed graph keeps the halves of its capture, so its last sum and the first of the next replay might have the same.

The process's default group of ``torch.distributed`` is made for it: memory is shared by the ranks of a group.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from engine.contracts.communicator import CommunicatorError, World
from engine.contracts.config import CommunicatorConfig
from engine.contracts.provider import BuildContext
from engine_plugins.communicator.calls import check_sum, ranks_of
from engine_plugins.communicator.gathering import Ranks
from engine_plugins.communicator.nccl import NcclCommunicator
from engine_plugins.communicator.torch_store import c10d, reason

INSTEAD = "use communicator=nccl"
SEEN_ALONE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Has torch accept ranks whose GPUs have the same index: each sees its own as its first."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where a rank is, as it tells the others."""

    machine: str
    gpu: str
    """UUID."""
    cut_off: Sequence[str]
    """GPUs that it sees, and whose memory its own does not reach."""
    groups: Sequence[Sequence[int]]
    """The ranks of the groups that it is in."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Memory of the ranks of a group."""

    memory: Tensor
    """This rank's: kept as long as others read it."""
    handle: Any
    """torch's, of that memory."""
    parts: tuple[Tensor, ...]
    """That of every rank, ``[one_shot]`` bytes, in the order of ranks."""


class SymmetricCommunicator(NcclCommunicator):
    """See :class:`engine.contracts.communicator.Communicator`. A rank that does not come to a sum within
    ``World.timeout_s`` ends the others' kernels, and with them their processes; ``abort`` does not end them sooner."""

    name = "symmetric"

    def __init__(self, config: CommunicatorConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self._torch = symmetric_memory()
        self._store: Any = None
        self._sharing: list[Ranks] = []
        """Ranks of groups, also of those that this rank is not in."""
        self._shared: dict[Ranks, Shared] = {}
        self._has_default_group = False

    def start(self, world: World, invitation: str) -> None:
        super().start(world, invitation)
        try:
            # NCCL is only named: these groups never connect, memory is shared through their store.
            c10d.init_process_group(
                "nccl",
                store=c10d.PrefixStore("default group", self._store),
                rank=world.rank,
                world_size=world.size,
                timeout=timedelta(seconds=world.timeout_s),
            )
            self._has_default_group = True
            for ranks in self._sharing:
                group = c10d.new_group(list(ranks))  # by all ranks of the world
                if world.rank in ranks:
                    self._shared[ranks] = self._share(world, ranks, group)
        except (RuntimeError, ValueError) as error:
            said = f"rank {world.rank} cannot share memory with other GPUs: {reason(error)}"
            raise CommunicatorError(f"communicator=symmetric: {said}; {INSTEAD}") from error

    def all_reduce(self, x: Tensor, group: str) -> Tensor:
        check_sum(x)
        shared = self._shared.get(ranks_of(self._here, group))
        if shared is None or not 0 < x.nbytes <= self.one_shot:
            return super().all_reduce(x, group)
        with self._call("all_reduce", group) as (ranks, _):
            parts = [part[: x.nbytes].view(x.dtype) for part in shared.parts]
            parts[ranks.index(self._here.rank)].copy_(x.view(-1))
            self._wait(shared)  # all have written
            self._add_up(parts, x)
            self._wait(shared)  # all have read
            return x

    def close(self) -> None:
        self._shared.clear()
        if self._has_default_group:
            self._has_default_group = False
            c10d.destroy_process_group()
        self._store = None
        super().close()

    def _met(self, world: World, invitation: str) -> Any:
        self._store = super()._met(world, invitation)
        try:
            locations = exchanged(world, self._store, location_of(world))
        except RuntimeError as error:
            raise CommunicatorError(f"rank {world.rank}: {reason(error)}") from error
        if why := refusal(locations):
            raise ValueError(f"communicator=symmetric: {why}")
        every = {tuple(ranks) for location in locations for ranks in location.groups}
        self._sharing = sorted(ranks for ranks in every if len(ranks) > 1)
        return self._store

    def _share(self, world: World, ranks: Ranks, group: Any) -> Shared:
        device = device_of(world)
        os.environ[SEEN_ALONE] = "1"
        memory = self._torch.empty(self.one_shot, dtype=torch.uint8, device=device)
        handle = self._torch.rendezvous(memory, group)
        parts = [handle.get_buffer(index, (self.one_shot,), torch.uint8) for index in range(len(ranks))]
        shared = Shared(memory, handle, tuple(parts))
        self._wait(shared)
        torch.cuda.synchronize(device)
        return shared

    def _wait(self, shared: Shared) -> None:
        """All ranks of the group have come so far, and see what the others wrote."""
        shared.handle.barrier(channel=0, timeout_ms=round(self._here.timeout_s * 1000))


def symmetric_memory() -> Any:
    """torch's module. Raises ``ValueError`` where it has none."""
    try:
        return importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        raise ValueError(
            f"communicator=symmetric needs torch.distributed._symmetric_memory, and torch {torch.__version__} has none "
            f"({error}): install a build of torch with it, or {INSTEAD}"
        ) from error


def device_of(world: World) -> torch.device:
    """With its index."""
    device = torch.device(world.device)
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())


def location_of(world: World) -> Location:
    own, seen = device_of(world).index, range(torch.cuda.device_count())
    gpus = [str(torch.cuda.get_device_properties(index).uuid) for index in seen]
    reached = [index == own or torch.cuda.can_device_access_peer(own, index) for index in seen]
    cut_off = [gpu for gpu, reaches in zip(gpus, reached, strict=True) if not reaches]
    return Location(socket.gethostname(), gpus[own], cut_off, [list(ranks) for ranks in world.groups.values()])


def exchanged(world: World, store: Any, location: Location) -> list[Location]:
    """The locations of all ranks."""
    store.set(f"place {world.rank}", json.dumps(asdict(location)))
    return [Location(**json.loads(store.get(f"place {rank}"))) for rank in range(world.size)]


def refusal(locations: Sequence[Location]) -> str:
    """Why ranks there cannot read each other's memory, as far as they see; empty: nothing is known against it."""
    for (rank, one), (other, two) in combinations(enumerate(locations), 2):
        if one.machine != two.machine:
            return (
                f"rank {rank} is on machine {one.machine} and rank {other} on {two.machine}, expected one machine; "
                f"{INSTEAD}"
            )
        if one.gpu == two.gpu:
            return (
                f"rank {rank} and rank {other} are both on GPU {one.gpu}, expected a GPU for each rank; set "
                "CUDA_VISIBLE_DEVICES or parallelism.tp accordingly, and parallelism.share_devices=false"
            )
        if two.gpu in one.cut_off or one.gpu in two.cut_off:
            return (
                f"GPU {one.gpu} of rank {rank} and GPU {two.gpu} of rank {other} have no peer-to-peer access, expected "
                f"access between all ranks' GPUs; {INSTEAD}"
            )
    return ""
