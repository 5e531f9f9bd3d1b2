"""All ranks in one process: the reference that the others equal."""

from __future__ import annotations

import pytest
from tests.plugins.communicator import makes
from tests.plugins.communicator.processes import worlds_of

from engine.contracts.communicator import CommunicatorError
from engine.testing.communicator import CommunicatorConformance, do_nothing, sum_of_shape
from engine_plugins.communicator.simulated import SimulatedCommunicator


class TestSimulated(CommunicatorConformance):
    sizes = (2, 3, 4)

    def make(self) -> SimulatedCommunicator:
        return makes.simulated()

    def test_runs_beside_each_other_do_not_meet(self) -> None:
        (first, second), (world, _) = (self.make(), self.make()), worlds_of(2)
        assert first.invite(world) != second.invite(world)
        self.check(sum_of_shape)

    def test_an_invitation_of_a_run_that_is_over_is_refused(self) -> None:
        made, (world, other) = self.make(), worlds_of(2)
        invitation = made.invite(world)
        made.close()
        with pytest.raises(CommunicatorError, match="parallelism=threads"):
            self.make().start(other, invitation)

    def test_different_calls_are_told_apart(self) -> None:
        found = self.run(one_sum_or_gather, 2, timeout_s=5.0)
        assert all("another call" in str(error) for error in found), found

    def test_starting_alone_needs_nobody(self) -> None:
        assert self.run(do_nothing, 1) == [None]


def one_sum_or_gather(communicator: object, world: object) -> None:
    import torch

    x = torch.ones(3)
    if world.rank == 0:  # type: ignore[attr-defined]
        communicator.all_reduce(x, "world")  # type: ignore[attr-defined]
    else:
        communicator.all_gather(x, "world", [x.clone(), x.clone()])  # type: ignore[attr-defined]
