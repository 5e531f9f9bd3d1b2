"""What must hold of all communicators whose ranks are processes: one result, and no end without an error."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.needs import needs_compiler
from tests.plugins.communicator import jobs, makes
from tests.plugins.communicator.processes import Ranks, _processes, worlds_of
from tests.selection import few

from engine.contracts.communicator import CommunicatorError
from engine.testing.communicator import NEVER_S, CommunicatorConformance

MAKES = [pytest.param(makes.shm, id="shm", marks=needs_compiler), pytest.param(makes.gloo, id="gloo")]
TIMEOUT_S = 2.0


class Simulated(CommunicatorConformance):
    def make(self) -> Any:
        return makes.simulated()


@few(2)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("make", MAKES)
def test_sums_over_processes_have_the_bits_of_simulated_ones_on_every_rank(make: Any, size: int) -> None:
    with Ranks(make, worlds_of(size), jobs.sums) as ranks:
        found = ranks.results()
    expected = Simulated().results(jobs.sums, size)
    for rank, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        assert not isinstance(got, Exception), got
        assert got == wanted, f"rank {rank} of {size}: sums {[i for i, x in enumerate(got) if x != wanted[i]]} differ"


@few(1)
@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("make", MAKES)
def test_the_death_of_a_rank_ends_the_calls_of_all_others(make: Any, victim: int, ended_by: signal.Signals) -> None:
    """Named, and within the deadline."""
    busy, at_work = _processes.Pipe(duplex=False)
    with Ranks(make, worlds_of(3, timeout_s=TIMEOUT_S), partial(jobs.sum_until_an_error, busy=at_work)) as ranks:
        assert busy.poll(NEVER_S), "the ranks do not come to work"
        ranks.signal(victim, ended_by)
        others = [rank for rank in range(3) if rank != victim]
        said = {rank: ranks.result(rank) for rank in others}
        ranks.signal(victim, signal.SIGKILL)
    for rank, result in said.items():
        assert isinstance(result, dict), f"rank {rank} raised {result!r}"
        assert f"rank {victim}" in result["said"], f"rank {rank}: {result['said']}"
        assert victim in result["ranks"], f"rank {rank}: {result['said']}"  # and whoever waits for it elsewhere
        assert result["waited_s"] < TIMEOUT_S + 1.0, f"rank {rank} raised after {result['waited_s']:.1f} s"
        assert result["again_s"] < TIMEOUT_S / 2 and "end" not in result["again"][:20], result["again"]


@needs_compiler
@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_the_death_of_a_rank_ends_programs_of_native_sums(ended_by: signal.Signals) -> None:
    busy, at_work = _processes.Pipe(duplex=False)
    with Ranks(makes.shm, worlds_of(2, timeout_s=TIMEOUT_S), partial(jobs.stay_in_a_program, busy=at_work)) as ranks:
        assert busy.poll(NEVER_S), "the ranks do not come to work"
        ranks.signal(1, ended_by)
        said = ranks.result(0)
        ranks.signal(1, signal.SIGKILL)
    assert "rank 1" in said and "all_reduce of group world (call " in said, said
    assert ended_by != signal.SIGSTOP or "is stopped" in said, said


@needs_compiler
def test_nothing_but_the_processes_holds_the_shared_memory() -> None:
    """No name in a file system; once all have come, not even a path through a process."""
    busy, at_work = _processes.Pipe(duplex=False)
    with Ranks(makes.shm, worlds_of(2, timeout_s=TIMEOUT_S), partial(jobs.sum_until_an_error, busy=at_work)) as ranks:
        assert busy.poll(NEVER_S), "the ranks do not come to work"
        for rank in range(2):
            shared = [
                line for line in Path(f"/proc/{ranks.pid(rank)}/maps").read_text().splitlines() if " rw-s " in line
            ]
            assert len(shared) == 1 and "/memfd:engine-ranks (deleted)" in shared[0], shared
            files = [os.readlink(file) for file in Path(f"/proc/{ranks.pid(rank)}/fd").iterdir()]
            assert not [file for file in files if "engine-ranks" in file], files
        with pytest.raises(CommunicatorError, match="communicator=gloo does not"):
            makes.shm().start(worlds_of(2)[1], ranks.invitation)
        ranks.signal(0, signal.SIGKILL)
        assert "has ended" in ranks.result(1)["said"]


def test_processes_of_a_run_that_failed_have_ended() -> None:
    """The test's own helper: what it starts is not there after it."""
    with pytest.raises(ZeroDivisionError), Ranks(makes.gloo, worlds_of(2), jobs.sums) as ranks:
        processes = list(ranks._processes)
        raise ZeroDivisionError
    assert [process.is_alive() for process in processes] == [False, False]
