"""All ranks in one process, a thread each: what a run over several processes must equal, bit for bit.

Tensors are handed over as copies, and each rank adds up for itself.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from engine.contracts.communicator import CommunicatorError, World
from engine.contracts.config import CommunicatorConfig
from engine.contracts.provider import BuildContext
from engine_plugins.communicator.calls import (
    check_counts,
    check_parts,
    check_peer,
    check_source,
    check_sum,
    in_rank_order,
    late,
    not_come,
    ranks_of,
)

NO_CALL = "has begun no call"


class Offer:
    """What the ranks of a group bring to one call."""

    def __init__(self) -> None:
        self.calls: dict[int, str] = {}
        self.tensors: dict[int, list[Tensor]] = {}
        self.num_taken = 0


class Meeting:
    """Where the ranks of one run meet. Everything is read and written while ``changed`` is held."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.begun: dict[int, int] = {}
        """Of the ranks that came: the number of the call in hand."""
        self.closed: set[int] = set()
        self.failure: CommunicatorError | None = None
        """What has ended the run, on whichever rank."""
        self.offers: dict[tuple[Any, ...], Offer] = defaultdict(Offer)
        self.sent: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)

    def fail(self, error: CommunicatorError, rank: int) -> CommunicatorError:
        """The error itself; the other ranks hear of it."""
        if self.failure is None:
            self.failure = CommunicatorError(f"rank {rank} gave up: {error}", error.ranks)
            self.changed.notify_all()
        return error


_MEETINGS: WeakValueDictionary[str, Meeting] = WeakValueDictionary()
"""By invitation, as long as the rank that invites is there."""
_NUMBERS = count()


class SimulatedCommunicator:
    """See :class:`engine.contracts.communicator.Communicator`."""

    capturable = False
    same_bits = True

    def __init__(self, config: CommunicatorConfig, context: BuildContext) -> None:
        self._world: World | None = None
        self._meeting: Meeting | None = None
        self._begun = 0
        self._numbers: dict[str, int] = defaultdict(int)
        """Of calls, by group."""
        self._deadline = 0.0
        self._entered = ""
        self._stopped = ""

    @property
    def begun(self) -> int:
        return self._begun

    def invite(self, world: World) -> str:
        name = f"simulated:{next(_NUMBERS)}"
        self._meeting = _MEETINGS[name] = Meeting(world.size)
        return name

    def start(self, world: World, invitation: str) -> None:
        meeting = _MEETINGS.get(invitation)
        if meeting is None:
            raise CommunicatorError(
                f"{invitation!r} invites to no run in this process: communicator=simulated needs parallelism=threads"
            )
        self._world, self._meeting = world, meeting
        deadline = time.monotonic() + world.timeout_s
        with meeting.changed:
            if self._stopped:
                raise meeting.fail(CommunicatorError(f"rank {world.rank}: {self._stopped}"), world.rank)
            meeting.begun[world.rank] = 0
            meeting.changed.notify_all()
            while len(meeting.begun) < meeting.size:
                self._check_failure(meeting)
                if not meeting.changed.wait(deadline - time.monotonic()):
                    raise meeting.fail(not_come(world, sorted(set(range(world.size)) - set(meeting.begun))), world.rank)

    def all_reduce(self, x: Tensor, group: str) -> Tensor:
        check_sum(x)
        given = self._exchange("all_reduce", group, [x], (x.dtype, x.shape))
        return x.copy_(in_rank_order([tensor for (tensor,) in given]))

    def all_gather(self, x: Tensor, group: str, parts: Sequence[Tensor]) -> None:
        check_parts(parts, ranks_of(self._here, group), "all_gather")
        for part, (tensor,) in zip(parts, self._exchange("all_gather", group, [x]), strict=True):
            self._take(part, tensor)

    def reduce_scatter(self, x: Tensor, group: str, counts: Sequence[int]) -> Tensor:
        check_sum(x)
        ranks = ranks_of(self._here, group)
        check_counts(x, counts, ranks)
        given = self._exchange("reduce_scatter", group, [x], (x.dtype, x.shape, *counts))
        index = ranks.index(self._here.rank)
        first = sum(counts[:index])
        return in_rank_order([tensor[first : first + counts[index]] for (tensor,) in given]).to(x.dtype, copy=True)

    def all_to_all(self, parts: Sequence[Tensor], group: str, received: Sequence[Tensor]) -> None:
        ranks = ranks_of(self._here, group)
        check_parts(parts, ranks, "all_to_all")
        check_parts(received, ranks, "all_to_all")
        index = ranks.index(self._here.rank)
        for part, tensors in zip(received, self._exchange("all_to_all", group, parts), strict=True):
            self._take(part, tensors[index])

    def broadcast(self, x: Tensor, group: str, source: int) -> Tensor:
        ranks = ranks_of(self._here, group)
        check_source(source, ranks, group)
        mine = [x] if source == self._here.rank else []
        given = self._exchange("broadcast", group, mine, (x.dtype, x.numel(), source))
        if source != self._here.rank:
            self._take(x, given[ranks.index(source)][0])
        return x

    def send(self, x: Tensor, to: int) -> None:
        check_peer(self._here, to, "send to")
        meeting = self._begin(f"send to rank {to}")
        with meeting.changed:
            self._check_failure(meeting)
            meeting.sent[self._here.rank, to].append(x.clone())
            meeting.changed.notify_all()

    def recv(self, x: Tensor, source: int) -> Tensor:
        check_peer(self._here, source, "recv from")
        meeting = self._begin(f"recv from rank {source}")
        with meeting.changed:
            queue = meeting.sent[source, self._here.rank]
            self._wait(meeting, lambda: bool(queue), lambda: [source])
            tensor = queue.popleft()
        self._take(x, tensor)
        return x

    def abort(self, why: str) -> None:
        self._stopped = self._stopped or f"stopped: {why}"
        meeting, world = self._meeting, self._world
        if meeting is not None and world is not None:
            with meeting.changed:
                meeting.fail(CommunicatorError(self._stopped), world.rank)

    def close(self) -> None:
        meeting, world = self._meeting, self._world
        self._meeting = self._world = None
        if meeting is not None and world is not None:
            with meeting.changed:
                meeting.closed.add(world.rank)
                meeting.changed.notify_all()

    @property
    def _here(self) -> World:
        if self._world is None:
            raise CommunicatorError("this communicator was not started, or is closed")
        return self._world

    def _begin(self, call: str) -> Meeting:
        """Count a call."""
        world, meeting = self._here, self._meeting
        assert meeting is not None
        self._begun += 1
        self._deadline = time.monotonic() + world.timeout_s
        self._entered = f"rank {world.rank} entered {call} (call {self._begun})"
        meeting.begun[world.rank] = self._begun
        return meeting

    def _exchange(self, call: str, group: str, mine: Sequence[Tensor], alike: Any = ()) -> list[list[Tensor]]:
        """What all ranks bring, in their order. ``alike``: what is the same on all ranks."""
        ranks = ranks_of(self._here, group)
        meeting = self._begin(f"{call} of group {group}")
        self._numbers[group] += 1
        key, rank = (group, ranks, self._numbers[group]), self._here.rank
        copies = [tensor.clone() for tensor in mine]
        with meeting.changed:
            offer = meeting.offers[key]
            offer.calls[rank], offer.tensors[rank] = f"{call} {alike}", copies
            meeting.changed.notify_all()
            self._wait(meeting, lambda: len(offer.calls) == len(ranks), lambda: set(ranks) - set(offer.calls))
            offer.num_taken += 1
            if offer.num_taken == len(ranks):
                del meeting.offers[key]
            if len(set(offer.calls.values())) > 1:
                said = "; ".join(f"rank {other}: {offer.calls[other]}" for other in ranks)
                raise meeting.fail(CommunicatorError(f"{self._entered}, and others another call: {said}"), rank)
        return [offer.tensors[other] for other in ranks]

    def _wait(self, meeting: Meeting, is_there: Callable[[], bool], missing: Callable[[], Iterable[int]]) -> None:
        """Until ``is_there``. Raises :class:`CommunicatorError` at the deadline, and when it can no longer be."""
        world = self._here
        while not is_there():
            self._check_failure(meeting)
            gone = sorted(meeting.closed.intersection(missing()))
            if gone:
                named = ", ".join(f"rank {rank}" for rank in gone)
                raise meeting.fail(CommunicatorError(f"{self._entered}, and {named} has ended", gone), world.rank)
            if not meeting.changed.wait(self._deadline - time.monotonic()) and not is_there():
                begun = {rank: meeting.begun[rank] for rank in missing()}
                seen = {rank: f"is at call {number}" if number else NO_CALL for rank, number in begun.items()}
                raise meeting.fail(late(self._entered, world.timeout_s, seen), world.rank)
        self._check_failure(meeting)

    def _check_failure(self, meeting: Meeting) -> None:
        if meeting.failure is not None:
            raise CommunicatorError(str(meeting.failure), meeting.failure.ranks)

    def _take(self, to: Tensor, given: Tensor) -> None:
        """Raises :class:`CommunicatorError` where something else was given than is expected."""
        if to.dtype != given.dtype or to.numel() != given.numel():
            raise CommunicatorError(
                f"{self._entered} and got {given.numel()} elements of {given.dtype}, "
                f"expected {to.numel()} of {to.dtype}"
            )
        to.copy_(given.view(to.shape))
