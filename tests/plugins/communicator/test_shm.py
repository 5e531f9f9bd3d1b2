"""Collectives through shared memory, with ranks as threads and as processes."""

from __future__ import annotations

import os
import threading
from functools import partial

import pytest
from tests.needs import needs_compiler
from tests.plugins.communicator import jobs, makes
from tests.plugins.communicator.processes import InProcesses, worlds_of

from engine.contracts.communicator import CommunicatorError
from engine.testing.communicator import NativeConformance, do_nothing, pass_on

pytestmark = needs_compiler


class TestInThreads(NativeConformance):
    def make(self):
        return makes.shm()


class TestInProcesses(InProcesses, NativeConformance):
    sizes = (2, 3)
    counts = (1, 3, 1000, 70_001)
    maker = staticmethod(makes.shm)


@pytest.mark.slow
class TestFourRanks(InProcesses, NativeConformance):
    sizes = (4,)
    maker = staticmethod(makes.shm)


@pytest.mark.slow
class TestEightRanks(InProcesses, NativeConformance):
    """More than there are processors, mostly: whoever waits must let the others run."""

    sizes = (8,)
    counts = (1, 1000, 70_001)
    maker = staticmethod(makes.shm)


def test_an_invitation_from_elsewhere_is_refused_with_what_would_help() -> None:
    made, (_, world) = makes.shm(), worlds_of(2)
    for path in ("/proc/1/fd/999999", f"/proc/{os.getpid()}/fd/0"):
        with pytest.raises(CommunicatorError, match="communicator=gloo does not"):
            made.start(world, f"{path} {'0' * 32}")
    with pytest.raises(CommunicatorError, match="no invitation of communicator=shm"):
        made.start(world, "127.0.0.1 2333 abc")


def test_memory_of_another_run_is_refused() -> None:
    (first, world), other = (makes.shm(), worlds_of(2)[0]), worlds_of(2)[1]
    invitation = first.invite(world)
    guest = makes.shm()
    with pytest.raises(CommunicatorError, match="memory of something else"):
        guest.start(other, invitation[:-32] + "0" * 32)
    with pytest.raises(CommunicatorError, match="another number of ranks"):
        makes.shm().start(worlds_of(3)[1], invitation)
    first.close()
    with pytest.raises(CommunicatorError, match=r"no memory of rank 0|is not the memory"):
        makes.shm().start(other, invitation)


def test_too_many_ranks_and_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 64 ranks"):
        makes.shm().invite(worlds_of(65)[0])


def test_groups_that_ranks_see_differently_are_refused() -> None:
    suite = TestInThreads()
    made, worlds = [makes.shm() for _ in range(2)], worlds_of(2)
    worlds[1] = worlds_of(2, {"tp": (0, 1)})[1]
    invitation = made[0].invite(worlds[0])
    errors: list[BaseException] = []

    def start(rank: int) -> None:
        try:
            made[rank].start(worlds[rank], invitation)
        except CommunicatorError as error:
            errors.append(error)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for communicator in made:
        communicator.close()
    assert len(errors) == 2 and any("knows no group" in str(error) for error in errors)
    assert suite.run(do_nothing, 2) == [None, None]


@pytest.mark.slow
def test_thousands_of_lines_of_messages_stay_in_order() -> None:
    """They are numbered alike. The suites pass a message of that many lines on, too, but once."""
    suite = TestInProcesses()
    for _ in range(3):
        suite.check(pass_on)


def test_a_program_of_a_closed_communicator_does_nothing() -> None:
    import torch

    (made, world), x = (makes.shm(), worlds_of(1)[0]), torch.ones(4)
    made.start(world, made.invite(world))
    call = made.all_reduce_call(x, "world")
    made.close()
    call()
    assert x.tolist() == [1.0] * 4


def test_thousands_of_calls_in_a_row_stay_in_step() -> None:
    """More than it takes for the numbers of rounds to begin again at 0, which they do after 1,000."""
    suite = TestInProcesses()
    assert suite.results(partial(jobs.many_calls, count=1_500), 2) == [2.0, 2.0]
    assert suite.results(partial(jobs.many_calls, count=1_500), 3) == [3.0] * 3
