from __future__ import annotations

from engine.contracts.config import KVAllocatorConfig
from engine.contracts.kv_allocator import KVGroup, Prefix
from engine.testing.context import build_context
from engine.testing.kv_allocator import BLOCK, KVAllocatorConformance
from engine_plugins.kv_allocator.paged import PagedAllocator


def make(block_size: int = BLOCK) -> PagedAllocator:
    return PagedAllocator(KVAllocatorConfig(block_size=block_size), build_context(block_size))


class TestPagedAllocator(KVAllocatorConformance):
    def make(self, block_size: int) -> PagedAllocator:
        return make(block_size)


def started(num_blocks: int) -> PagedAllocator:
    allocator = make()
    allocator.start([KVGroup(0, (0,), "full", 64, num_blocks)])
    return allocator


def test_a_block_is_taken_when_a_token_reaches_it() -> None:
    allocator = started(9)
    lease = allocator.open("r", Prefix(), 8 * BLOCK)
    held = []
    for num_tokens in (1, BLOCK, BLOCK + 1):
        assert allocator.reserve(lease, num_tokens)
        held.append(len(lease.blocks[0]))
    assert held == [1, 1, 2]


def test_fresh_and_returned_blocks_come_out_as_ascending_runs() -> None:
    allocator = started(9)
    for name in ("first", "second"):
        lease = allocator.open(name, Prefix(), 5 * BLOCK)
        assert allocator.reserve(lease, 5 * BLOCK)
        assert lease.blocks[0] == [1, 2, 3, 4, 5]
        allocator.release(lease)
