"""Sums through symmetric memory, with stand-ins for torch's and for NCCL: ranks are threads."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from tests.plugins.communicator.symmetric_memory import Handle, Machine, Meeting, OnThreads
from torch import Tensor

from engine.contracts.communicator import Communicator, CommunicatorError, World
from engine.contracts.config import CommunicatorConfig
from engine.testing.communicator import CommunicatorConformance, do_nothing, stay_away
from engine.testing.context import build_context
from engine_plugins.communicator.symmetric import Shared, SymmetricCommunicator


class Ranks(CommunicatorConformance):
    soon_s = 1.0
    names_ranks = False
    can_abort = False
    counts = (1, 3, 1000, 70_001)

    kind: type[OnThreads] = OnThreads
    machine = Machine(0)

    patch: pytest.MonkeyPatch

    @pytest.fixture(autouse=True)
    def on_a_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.machine.stand_in(monkeypatch)

    def run(self, job, size, groups=None, timeout_s=None, absent=-1):
        self.machine = self.of(size)
        self.machine.stand_in(self.patch)
        return super().run(job, size, groups, timeout_s, absent)

    def of(self, size):
        return Machine(size)

    def make(self):
        return self.kind(self.machine)


@pytest.mark.slow
class TestOnThreads(Ranks):
    pass


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    found = Ranks()
    found.patch = monkeypatch
    return found


def test_sums_of_all_sizes_on_several_groups_are_made_in_rank_order(ranks: Ranks) -> None:
    ranks.sizes = (2, 3)
    ranks.machine.stand_in(ranks.patch)
    ranks.test_sums_are_made_in_rank_order_and_rounded_once()
    ranks.test_calls_on_several_groups_do_not_mix()


def test_a_rank_that_does_not_come_to_a_small_sum_ends_it_in_an_error(ranks: Ranks) -> None:
    said = ranks.run(partial(stay_away, absent=2, kind="all_reduce"), 3, timeout_s=ranks.soon_s)
    assert said[2] == "" and all("entered all_reduce of group world (call 2)" in text for text in said[:2])


SUMS = 7


class OneReadsLast(OnThreads):
    """In each sum but the last, one rank reads when the others have gone as far as they can."""

    def _add_up(self, parts: Sequence[Tensor], x: Tensor) -> Tensor:
        if self.begun < SUMS and self.begun % len(parts) == self._here.rank:
            self.machine.meetings[0, 1, 2].wait_for_others(self._here.rank)
        return super()._add_up(parts, x)


class AndNobodyWaits(OneReadsLast):
    """After a sum."""

    num_waits = 0

    def _wait(self, shared: Shared) -> None:
        if self.num_waits % 2 == 1 or self.num_waits == 0:
            super()._wait(shared)
        self.num_waits += 1


def sums_in_a_row(communicator: Communicator, world: World) -> list[float]:
    parts = [torch.full((5,), number * 10.0**world.rank) for number in range(1, SUMS + 1)]
    return [float(communicator.all_reduce(part, "world")[0]) for part in parts]


def test_a_part_stays_while_a_slow_rank_reads_it(ranks: Ranks) -> None:
    """And would not if ranks went on before all had read."""
    expected = [[111.0 * number for number in range(1, SUMS + 1)]] * 3
    ranks.kind = OneReadsLast
    assert ranks.results(sums_in_a_row, 3) == expected
    ranks.kind = AndNobodyWaits
    assert ranks.results(sums_in_a_row, 3) != expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"gpus": ["GPU-a", "GPU-b", "GPU-a"]},
            "rank 0 and rank 2 are both on GPU GPU-a, expected a GPU for each",
        ),
        (
            {"cut_off": {("GPU-0", "GPU-2")}},
            "GPU GPU-0 of rank 0 and GPU GPU-2 of rank 2 have no peer-to-peer access, expected access between all "
            "ranks' GPUs; use communicator=nccl",
        ),
        (
            {"names": ["here", "there", "there"]},
            "rank 0 is on machine here and rank 1 on there, expected one machine; use communicator=nccl",
        ),
    ],
)
def test_all_ranks_refuse_what_one_of_them_sees(ranks: Ranks, change: dict[str, object], said: str) -> None:
    """The first rank sees all GPUs, the others see their own alone."""
    ranks.of = lambda size: Machine(size, **change)
    for error in ranks.run(do_nothing, 3):
        assert isinstance(error, ValueError) and str(error).startswith(f"communicator=symmetric: {said}")


class Unmapped(Machine):
    """Where torch finds out that a GPU cannot map another one's memory."""

    def rendezvous(self, memory: Tensor, group: Meeting) -> Handle:
        raise RuntimeError("CUDA driver error: invalid device ordinal")


def test_what_torch_says_of_memory_that_cannot_be_shared_is_passed_on(ranks: Ranks) -> None:
    ranks.of = Unmapped
    (error, _) = ranks.run(do_nothing, 2)
    assert isinstance(error, CommunicatorError) and str(error) == (
        "communicator=symmetric: rank 0 cannot share memory with other GPUs: CUDA driver error: invalid device "
        "ordinal; use communicator=nccl"
    )


def test_a_build_of_torch_without_symmetric_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", None)
    with pytest.raises(ValueError, match=r"needs torch.distributed._symmetric_memory.*use communicator=nccl"):
        SymmetricCommunicator(CommunicatorConfig(), build_context())


def test_tensors_of_cpus_are_refused() -> None:
    world = World(0, 2, {"world": (0, 1)}, "cpu", 1.0)
    with pytest.raises(ValueError, match="communicator=symmetric moves tensors of GPUs, this rank's device is cpu"):
        SymmetricCommunicator(CommunicatorConfig(), build_context()).start(world, "")


def test_what_stands_for_torch_has_what_is_called_of_it() -> None:
    """Names of arguments are those of this release of torch."""
    module = importlib.import_module("torch.distributed._symmetric_memory")
    assert list(inspect.signature(module.rendezvous).parameters) == ["tensor", "group"]
    assert {"dtype", "device"} <= set(inspect.signature(module.empty).parameters)
    handle = torch._C._distributed_c10d._SymmetricMemory
    for method, arguments in (
        (handle.get_buffer, ("rank: ", "sizes: ", "dtype: ")),
        (handle.barrier, ("channel: ", "timeout_ms: ")),
    ):
        assert all(name in method.__doc__ for name in arguments), method.__doc__
    begun = inspect.signature(torch.distributed.init_process_group).parameters
    assert {"backend", "store", "rank", "world_size", "timeout"} <= set(begun)
    assert next(iter(inspect.signature(torch.distributed.new_group).parameters)) == "ranks"
