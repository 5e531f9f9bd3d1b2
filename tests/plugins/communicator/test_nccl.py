"""What a sum between GPUs launches and where, by what stands for NCCL's process group and for symmetric memory. Runs in
Triton's interpreter (see ``tests/interpreted.py``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contracts.communicator import World
from engine.contracts.config import CommunicatorConfig
from engine.testing.context import build_context
from engine_plugins.communicator.calls import in_rank_order
from engine_plugins.communicator.nccl import NcclCommunicator
from engine_plugins.communicator.symmetric import Shared, SymmetricCommunicator

from ...launches import count_launches


class Group:
    """The process group of rank 1 of three: it brings what the others have."""

    def __init__(self, others: dict[int, Tensor]) -> None:
        self.others = others
        self.on_own_stream: list[bool] = []

    def _allgather_base(self, given: Tensor, mine: Tensor, options: Any) -> None:
        self.on_own_stream.append(options.asyncOp)
        rows = given.view(3, -1)
        for rank in range(3):
            rows[rank] = mine if rank == 1 else self.others[rank].view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sum_is_one_gathering_on_the_current_stream_and_one_kernel_in_the_order_of_ranks(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [(torch.randn(2, 50, generator=generator) * 10.0**rank).to(dtype) for rank in range(3)]
    communicator, group = NcclCommunicator(CommunicatorConfig(), build_context()), Group({0: parts[0], 2: parts[2]})
    communicator._world = World(1, 3, {"tp": (0, 1, 2)}, "cuda", 5.0)
    communicator._groups["tp"] = group
    x = parts[1].clone()
    with count_launches() as launches:
        assert communicator.all_reduce(x, "tp") is x
    assert launches.kernels == ["add_in_order"]
    assert set(launches.torch_ops) <= {"aten.copy_"}, "what stands for NCCL copies, nothing else does"
    assert group.on_own_stream == [False]
    assert torch.equal(x, in_rank_order(parts).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_small_sum_in_symmetric_memory_is_a_copy_two_barriers_and_one_kernel(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [(torch.randn(2, 50, generator=generator) * 10.0**rank).to(dtype) for rank in range(3)]
    memory = [torch.zeros(1024, dtype=torch.uint8) for _ in parts]
    for rank in (0, 2):
        memory[rank][: parts[rank].nbytes] = parts[rank].view(-1).view(torch.uint8)
    communicator = SymmetricCommunicator(CommunicatorConfig(), build_context())
    communicator._world = World(1, 3, {"tp": (0, 1, 2)}, "cuda", 5.0)
    communicator._groups["tp"] = None
    for _ in range(2):  # a replayed graph does what the call that it captured did
        x = parts[1].clone()
        with count_launches() as launches:
            barriers = Barriers(launches.names)
            communicator._shared[0, 1, 2] = Shared(memory[1], barriers, tuple(memory))
            assert communicator.all_reduce(x, "tp") is x
        assert launches.names == ["aten.copy_", "barrier for 5000 ms", "add_in_order", "barrier for 5000 ms"]
        assert torch.equal(x, in_rank_order(parts).to(dtype))


class Barriers:
    """The handle of symmetric memory: its barriers are noted among launches."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def barrier(self, channel: int, timeout_ms: int) -> None:
        self.names.append(f"barrier for {timeout_ms} ms")
