"""Collectives over TCP, with ranks as threads and as processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.plugins.communicator import makes
from tests.plugins.communicator.processes import InProcesses, worlds_of

from engine.contracts.communicator import CommunicatorError
from engine.testing.communicator import CommunicatorConformance


class Gloo(CommunicatorConformance):
    soon_s = 1.0
    can_abort = False

    def make(self):
        return makes.gloo()


@pytest.mark.slow
class TestInThreads(Gloo):
    sizes = (3,)


class TestInProcesses(InProcesses, Gloo):
    sizes = (2,)
    counts = (1, 1000, 70_001)
    maker = staticmethod(makes.gloo)


@pytest.mark.slow
class TestInMoreProcesses(InProcesses, Gloo):
    sizes = (3, 4)
    maker = staticmethod(makes.gloo)


def test_an_invitation_of_another_communicator_is_refused() -> None:
    with pytest.raises(CommunicatorError, match="no invitation of communicators of torch"):
        makes.gloo().start(worlds_of(2)[1], "/proc/1/fd/3 00")


def test_a_rank_0_that_is_not_there_is_named() -> None:
    made, world = makes.gloo(), worlds_of(2, timeout_s=0.5)[1]
    other = makes.gloo()
    invitation = other.invite(worlds_of(2)[0])
    other.close()
    with pytest.raises(CommunicatorError, match="does not reach rank 0") as caught:
        made.start(world, invitation)
    assert caught.value.ranks == (0,)


def test_only_the_address_that_it_is_given_is_listened_to() -> None:
    made = makes.gloo()
    host, port, _ = made.invite(worlds_of(2)[0]).split()
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [line[1] for line in lines if line[3] == "0A"]
    made.close()
    assert host == "127.0.0.1" and f"0100007F:{int(port):04X}" in listening
