from __future__ import annotations

import pytest

from engine.contracts.config import KVAllocatorConfig
from engine.contracts.kv_allocator import KVGroup, Prefix
from engine.testing.context import build_context
from engine.testing.kv_allocator import BLOCK, KVAllocatorConformance
from engine_plugins.kv_allocator.contiguous import ContiguousAllocator


def make(block_size: int = BLOCK) -> ContiguousAllocator:
    return ContiguousAllocator(KVAllocatorConfig(block_size=block_size), build_context(block_size))


class TestContiguousAllocator(KVAllocatorConformance):
    def make(self, block_size: int) -> ContiguousAllocator:
        return make(block_size)


def started(num_blocks: int) -> ContiguousAllocator:
    allocator = make()
    allocator.start([KVGroup(0, (0,), "full", 64, num_blocks)])
    return allocator


def test_a_lease_is_one_run_for_the_most_it_can_need() -> None:
    allocator = started(17)
    lease = allocator.open("r", Prefix(), 5 * BLOCK + 1)
    assert lease is not None
    assert lease.blocks[0] == [1, 2, 3, 4, 5, 6]
    assert allocator.blocks_needed(lease, 5 * BLOCK + 1, 5 * BLOCK + 1) == (0,)


def test_scattered_room_is_no_room() -> None:
    allocator = started(9)
    leases = [allocator.open(f"r{i}", Prefix(), 2 * BLOCK) for i in range(4)]
    for lease in leases[::2]:
        assert lease is not None
        allocator.release(lease)
    assert allocator.usage()[0].free == 4
    assert allocator.open("big", Prefix(), 3 * BLOCK) is None
    allocator.check()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_neighbouring_runs_merge_in_whatever_order_they_come_back(order: tuple[int, ...]) -> None:
    allocator = started(10)
    leases = [allocator.open(f"r{i}", Prefix(), 3 * BLOCK) for i in range(3)]
    for index in order:
        lease = leases[index]
        assert lease is not None
        allocator.release(lease)
        allocator.check()
    assert allocator.open("big", Prefix(), 9 * BLOCK) is not None
