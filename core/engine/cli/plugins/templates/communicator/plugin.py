"""Communicator ``mine``: all ranks in one process, a thread each, which lay copies down for each other."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from engine.contracts.communicator import CommunicatorError, World
from engine.contracts.config import CommunicatorConfig
from engine.contracts.provider import BuildContext, Provider
from engine.hookspecs import hookimpl

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MineCommunicatorConfig(CommunicatorConfig):
    """The keys ``communicator.<field>``."""


@hookimpl
def engine_communicator() -> list[Provider]:
    return [
        Provider(
            "mine",
            "engine.cli.plugins.templates.communicator.plugin:MineCommunicator",
            config=MineCommunicatorConfig,
            # unsupported=... says on which devices it cannot be used; without it, communicator=auto never chooses it
            doc="Ranks are threads of one process.",
        )
    ]


class Meeting:
    """Where ranks find each other; everything is read and written while ``changed`` is held."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.laid: dict[Any, dict[int, list[Tensor]]] = defaultdict(dict)
        """By call: what each rank brought."""
        self.stopped = ""


_meetings: dict[str, Meeting] = {}
_numbers = count()


class MineCommunicator:
    """Groups are named as in ``World.groups``; tensors are contiguous. One thread calls, any may call ``abort``."""

    capturable = False
    """Whether calls may be captured in CUDA graphs."""
    same_bits = True
    """Whether sums are made in the order of ranks, so that all get the same bits."""

    def __init__(self, config: MineCommunicatorConfig, context: BuildContext) -> None:
        self._invitation = ""
        self._meeting = Meeting()
        self._world: World | None = None
        self._numbers: dict[Any, int] = defaultdict(int)
        self._begun = 0

    @property
    def begun(self) -> int:
        """How many calls were begun since :meth:`start`."""
        return self._begun

    def invite(self, world: World) -> str:
        """On rank 0, before any ``start``: what the other ranks need to find it."""
        self._invitation = f"mine:{next(_numbers)}"
        _meetings[self._invitation] = self._meeting
        return self._invitation

    def start(self, world: World, invitation: str) -> None:
        """Meet the others, or raise an error that names who did not come."""
        if invitation not in _meetings:
            raise CommunicatorError(f"{invitation!r} invites to no run in this process")
        self._world, self._meeting = world, _meetings[invitation]
        self._exchange("start", tuple(range(world.size)), [])

    def all_reduce(self, x: Tensor, group: str) -> Tensor:
        """``x`` becomes the sum over the group, made in float32 and rounded once."""
        return x.copy_(self._sum([x for (x,) in self._in_group(group, [x], sums=True)]))

    def all_gather(self, x: Tensor, group: str, parts: Sequence[Tensor]) -> None:
        """``parts[i]`` becomes ``x`` of the ``i``-th rank."""
        for part, (given,) in zip(parts, self._in_group(group, [x], len(parts)), strict=True):
            part.copy_(given)

    def reduce_scatter(self, x: Tensor, group: str, counts: Sequence[int]) -> Tensor:
        """This rank's rows of the sum: ``counts[i]`` for the ``i``-th rank."""
        if sum(counts) != x.shape[0]:
            raise ValueError(f"counts {list(counts)} of {x.shape[0]} rows")
        given = self._in_group(group, [x], len(counts), sums=True)
        index = self._here.groups[group].index(self._here.rank)
        first = sum(counts[:index])
        return self._sum([x[first : first + counts[index]] for (x,) in given]).to(x.dtype, copy=True)

    def all_to_all(self, parts: Sequence[Tensor], group: str, received: Sequence[Tensor]) -> None:
        """``parts[i]`` goes to the ``i``-th rank, ``received[i]`` comes from it."""
        given = self._in_group(group, parts, len(parts))
        index = self._here.groups[group].index(self._here.rank)
        for part, theirs in zip(received, given, strict=True):
            part.copy_(theirs[index])

    def broadcast(self, x: Tensor, group: str, source: int) -> Tensor:
        """``x`` becomes that of rank ``source``."""
        ranks = self._here.groups[group]
        if source not in ranks:
            raise ValueError(f"rank {source} is not in group {group}")
        return x.copy_(self._in_group(group, [x] if source == self._here.rank else [])[ranks.index(source)][0])

    def send(self, x: Tensor, to: int) -> None:
        """To one rank; ``x`` may be overwritten once this returns."""
        self._begun += 1
        self._lay(("send", self._here.rank, to), [x])

    def recv(self, x: Tensor, source: int) -> Tensor:
        """``x`` becomes what ``source`` sent; messages between two ranks are met in order."""
        self._begun += 1
        key = self._next(("send", source, self._here.rank))
        with self._meeting.changed:
            self._wait("recv", lambda: {source} - set(self._meeting.laid[key]))
            return x.copy_(self._meeting.laid.pop(key)[source][0])

    def abort(self, why: str) -> None:
        """End the call in hand and all later ones, on all ranks."""
        with self._meeting.changed:
            self._meeting.stopped = self._meeting.stopped or why
            self._meeting.changed.notify_all()

    def close(self) -> None:
        """Give everything back."""
        _meetings.pop(self._invitation, None)
        self._world, self._meeting = None, Meeting()

    @property
    def _here(self) -> World:
        if self._world is None:
            raise CommunicatorError("not started, or closed")
        return self._world

    def _in_group(
        self, group: str, mine: Sequence[Tensor], num_parts: int | None = None, sums: bool = False
    ) -> list[list[Tensor]]:
        ranks = self._here.groups.get(group)
        if ranks is None or num_parts not in (None, len(ranks)):
            raise ValueError(f"group {group!r} with {num_parts} parts: the groups are {dict(self._here.groups)}")
        if sums and not mine[0].is_floating_point():
            raise TypeError(f"a sum of {mine[0].dtype}")
        self._begun += 1
        return self._exchange(group, ranks, mine)

    def _exchange(self, name: str, ranks: tuple[int, ...], mine: Sequence[Tensor]) -> list[list[Tensor]]:
        """What each rank brings, in their order."""
        place = (name, ranks)
        key = self._lay(place, mine)
        with self._meeting.changed:
            laid = self._meeting.laid
            self._wait(name, lambda: set(ranks) - set(laid[key]))
            laid.pop((place, key[1] - 1), None)  # everyone has come here, and so has read what was before
            return [laid[key][rank] for rank in ranks]

    def _lay(self, place: Any, mine: Sequence[Tensor]) -> Any:
        key = self._next(place)
        with self._meeting.changed:
            self._meeting.laid[key][self._here.rank] = [x.clone() for x in mine]
            self._meeting.changed.notify_all()
        return key

    def _next(self, place: Any) -> Any:
        self._numbers[place] += 1
        return place, self._numbers[place]

    def _wait(self, call: str, missing: Callable[[], Collection[int]]) -> None:
        """Until nobody is missing. No call may wait for ever."""
        world, deadline = self._here, time.monotonic() + self._here.timeout_s
        while missing() and not self._meeting.stopped:
            if not self._meeting.changed.wait(deadline - time.monotonic()) and missing():
                ranks = sorted(missing())
                names = ", ".join(f"rank {rank}" for rank in ranks)
                raise CommunicatorError(f"{call}: rank {world.rank} waited {world.timeout_s:g} s for {names}", ranks)
        if self._meeting.stopped:
            raise CommunicatorError(f"rank {world.rank} was stopped: {self._meeting.stopped}")

    @staticmethod
    def _sum(parts: Sequence[Tensor]) -> Tensor:
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total
