"""Ways in which ranks exchange tensors with a bug each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from engine.contracts.communicator import CommunicatorError, World
from engine.contracts.config import CommunicatorConfig
from engine.testing.communicator import CommunicatorConformance
from engine.testing.context import build_context
from engine_plugins.communicator.calls import in_rank_order
from engine_plugins.communicator.simulated import Meeting, SimulatedCommunicator
from tests.testing.mutants.mutant import OnPlugin, mutant

SUMS = "test_sums_are_made_in_rank_order_and_rounded_once"
SHAPES = "test_sums_keep_their_shape"
GATHERED = "test_gathered_tensors_lie_in_rank_order"
SCATTERED = "test_scattered_sums_are_those_of_each_ranks_rows"
ALL_TO_ALL = "test_every_rank_gets_what_was_sent_to_it"
BROADCASTS = "test_broadcasts_are_those_of_their_source"
MESSAGES = "test_messages_arrive_in_order_and_may_be_overwritten_once_they_are_sent"
GROUPS = "test_calls_on_several_groups_do_not_mix"
COUNTED = "test_calls_are_counted_when_they_begin"
ABSENT = "test_a_rank_that_does_not_come_ends_every_call_in_an_error"
NO_START = "test_a_start_without_a_rank_ends_in_an_error"
ABORTED = "test_an_abort_ends_the_call_in_hand_and_all_later_ones"
REFUSED = "test_calls_that_cannot_be_are_refused_and_change_nothing"
LEFT = "test_nothing_is_left_behind"


class Suite(OnPlugin, CommunicatorConformance):
    counts = (1, 17, 1000)

    def make(self) -> Any:
        return self.plugin(CommunicatorConfig(), build_context())


class Summing(SimulatedCommunicator):
    """Adds up as :meth:`total` says."""

    def all_reduce(self, x: Tensor, group: str) -> Tensor:
        before = x.clone()
        super().all_reduce(x, group)
        parts = [part for (part,) in self._exchange("all_reduce", group, [before])]
        self._begun -= 1
        return x.copy_(self.total(parts))

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        return in_rank_order(parts)


@mutant(Suite, SUMS)
class OwnPartFirst(Summing):
    """Adds its own part first, then those of the ranks after it."""

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        rank = self._here.rank % len(parts)
        return in_rank_order([*parts[rank:], *parts[:rank]])


@mutant(Suite, SUMS)
class LastRankFirst(Summing):
    """Adds from the last rank to the first."""

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        return in_rank_order(parts[::-1])


@mutant(Suite, SUMS)
class RoundsEachSum(Summing):
    """Adds in the dtype of the tensors."""

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        return sum(parts[1:], parts[0])


@mutant(Suite, SUMS)
class MoreThanFloats(Summing):
    """Adds in float64."""

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        return sum((part.double() for part in parts[1:]), parts[0].double())


@mutant(Suite, SUMS)
class SumsElsewhere(SimulatedCommunicator):
    """Returns the sum in a new tensor."""

    def all_reduce(self, x: Tensor, group: str) -> Tensor:
        return super().all_reduce(x.clone(), group)


@mutant(Suite, SHAPES)
class FlatSums(SimulatedCommunicator):
    """Leaves a flat tensor where there was one with a shape."""

    def all_reduce(self, x: Tensor, group: str) -> Tensor:
        super().all_reduce(x, group)
        x.resize_(x.numel())
        return x


@mutant(Suite, GATHERED)
class GathersOwnFirst(SimulatedCommunicator):
    """Puts its own part in front."""

    def all_gather(self, x: Tensor, group: str, parts: Sequence[Tensor]) -> None:
        index = self._here.groups[group].index(self._here.rank)
        given = self._exchange("all_gather", group, [x])
        for part, (tensor,) in zip(parts, [*given[index:], *given[:index]], strict=True):
            part.view(-1)[: tensor.numel()].copy_(tensor.view(-1)[: part.numel()])


@mutant(Suite, SCATTERED, raises=CommunicatorError)
class EqualRows(SimulatedCommunicator):
    """Gives all ranks as many rows."""

    def reduce_scatter(self, x: Tensor, group: str, counts: Sequence[int]) -> Tensor:
        rows = -(-x.shape[0] // len(counts))
        first = rows * self._here.groups[group].index(self._here.rank)
        return self.all_reduce(x.clone(), group)[first : first + rows]


@mutant(Suite, SCATTERED)
class ScattersInPlace(SimulatedCommunicator):
    """Adds up in the tensor that it is given."""

    def reduce_scatter(self, x: Tensor, group: str, counts: Sequence[int]) -> Tensor:
        own = super().reduce_scatter(x, group, counts)
        first = sum(counts[: self._here.groups[group].index(self._here.rank)])
        x[first : first + len(own)] = own
        return own


@mutant(Suite, ALL_TO_ALL, raises=CommunicatorError)
class SendsToItself(SimulatedCommunicator):
    """Takes what others keep for themselves."""

    def all_to_all(self, parts: Sequence[Tensor], group: str, received: Sequence[Tensor]) -> None:
        for i, tensors in enumerate(self._exchange("all_to_all", group, parts)):
            self._take(received[i], tensors[i])


@mutant(Suite, BROADCASTS)
class FirstRankSpeaks(SimulatedCommunicator):
    """Broadcasts what the first rank has."""

    def broadcast(self, x: Tensor, group: str, source: int) -> Tensor:
        return super().broadcast(x, group, self._here.groups[group][0])


@mutant(Suite, MESSAGES)
class SendsTheTensorItself(SimulatedCommunicator):
    """Keeps the tensor that is sent instead of a copy."""

    def send(self, x: Tensor, to: int) -> None:
        super().send(x, to)
        assert self._meeting is not None
        self._meeting.sent[self._here.rank, to][-1] = x


class Hurried(Suite):
    """Waits no longer than it takes to see that a message does not come."""

    timeout_s = 2.0


@mutant(Hurried, MESSAGES, raises=CommunicatorError)
class LastMessageFirst(SimulatedCommunicator):
    """Takes the message that came last."""

    def recv(self, x: Tensor, source: int) -> Tensor:
        meeting = self._meeting
        assert meeting is not None
        queue = meeting.sent[source, self._here.rank]
        with meeting.changed:
            meeting.changed.wait_for(lambda: len(queue) > 1, timeout=0.5)  # one alone is the first, too
            queue.reverse()
            got = super().recv(x, source)
            queue.reverse()
        return got


@mutant(Suite, GROUPS, raises=CommunicatorError)
class OneGroupForAll(SimulatedCommunicator):
    """Calls on any group are calls on all ranks."""

    def _exchange(self, call: str, group: str, mine: Sequence[Tensor], alike: Any = ()) -> list[list[Tensor]]:
        ranks = self._here.groups[group]
        self._numbers[group] = self._begun
        return super()._exchange(call, "world", mine)[: len(ranks)]


@mutant(Suite, COUNTED)
class CountsTwice(SimulatedCommunicator):
    """Counts sums twice."""

    def all_reduce(self, x: Tensor, group: str) -> Tensor:
        self._begun += 1
        return super().all_reduce(x, group)


@mutant(Suite, ABSENT, NO_START)
class NamesNobody(SimulatedCommunicator):
    """Says that somebody is missing."""

    def _wait(self, *arguments: Any) -> None:
        try:
            super()._wait(*arguments)
        except CommunicatorError as error:
            raise CommunicatorError("somebody is missing") from error

    def start(self, world: World, invitation: str) -> None:
        try:
            super().start(world, invitation)
        except CommunicatorError as error:
            raise CommunicatorError("somebody is missing") from error


@mutant(Suite, ABSENT)
class NamesItself(SimulatedCommunicator):
    """Says that it is missing itself."""

    def _wait(self, *arguments: Any) -> None:
        try:
            super()._wait(*arguments)
        except CommunicatorError as error:
            raise CommunicatorError(str(error), [self._here.rank]) from error


@mutant(Suite, NO_START, LEFT, raises=CommunicatorError)
class StartsAlone(SimulatedCommunicator):
    """Does not wait for the others to start, and leaves a file open."""

    def start(self, world: World, invitation: str) -> None:
        os.dup(1)
        if world.timeout_s < Suite.timeout_s:
            self._world = world
            return
        super().start(world, invitation)


@mutant(Suite, ABORTED)
class ForgetsTheReason(SimulatedCommunicator):
    """Does not say why it was stopped."""

    def abort(self, why: str) -> None:
        super().abort("stopped")


@mutant(Suite, REFUSED)
class SumsAnything(SimulatedCommunicator):
    """Adds up integers as floats."""

    def all_reduce(self, x: Tensor, group: str) -> Tensor:
        return x.copy_(super().all_reduce(x.float(), group))


@mutant(Suite, REFUSED)
class TakesAnyCounts(SimulatedCommunicator):
    """Scatters as many rows as there are."""

    def reduce_scatter(self, x: Tensor, group: str, counts: Sequence[int]) -> Tensor:
        if sum(counts) != x.shape[0]:
            return self.all_reduce(x.clone(), group)
        return super().reduce_scatter(x, group, counts)


@mutant(Suite, missed="memory that is kept shows in no list of files; the suite does not measure memory")
class KeepsAllRuns(SimulatedCommunicator):
    """Keeps every run for ever."""

    runs: ClassVar[list[Meeting | None]] = []

    def invite(self, world: World) -> str:
        name = super().invite(world)
        self.runs.append(self._meeting)
        return name
