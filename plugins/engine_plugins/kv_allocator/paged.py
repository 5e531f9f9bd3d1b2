"""``paged``: blocks on demand from one free list for each KV group, nothing shared (PagedAttention, arXiv
2309.06180)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.contracts.config import KVAllocatorConfig
from engine.contracts.kv_allocator import BlockUsage, KVGroup, Lease, Prefix
from engine.contracts.provider import BuildContext
from engine_plugins.kv_allocator.block_pool import (
    FreeBlocks,
    Leases,
    advance,
    blocks_for,
    check_partition,
    held,
    passed,
    started,
    take_out,
)


class PagedAllocator:
    """A sequence takes a block of each group when its tokens reach it; at most one block per group is partly empty.
    What a window has passed is free at once."""

    caches_prefixes = False

    def __init__(self, config: KVAllocatorConfig, context: BuildContext) -> None:
        self._block_size = config.block_size

    def start(self, groups: Sequence[KVGroup]) -> None:
        self._groups = started(groups)
        self._free = tuple(FreeBlocks(group.num_blocks) for group in groups)
        self._leases = Leases()

    def match_prefix(self, prefix: Prefix) -> int:
        return 0

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease:
        return self._leases.add(request_id, tuple([] for _ in self._groups))

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> tuple[int, ...]:
        total = blocks_for(num_tokens, self._block_size)
        if lease is None:
            return (total,) * len(self._groups)
        return tuple([max(0, total - len(blocks)) for blocks in lease.blocks])

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        needed = self.blocks_needed(lease, num_tokens, num_tokens)
        if any(count > len(free) for count, free in zip(needed, self._free, strict=True)):
            return False
        for blocks, free, count in zip(lease.blocks, self._free, needed, strict=True):
            blocks.extend(free.take(count))
        return True

    def commit(self, lease: Lease, prefix: Prefix) -> None:
        before = lease.num_committed
        advance(lease, prefix.num_tokens, self._block_size)
        for group, free, blocks in zip(self._groups, self._free, lease.blocks, strict=True):
            free.give(take_out(blocks, passed(group, before, lease.num_committed, self._block_size)))

    def release(self, lease: Lease) -> None:
        for free, blocks in zip(self._free, self._leases.remove(lease) or (), strict=False):
            free.give(held(blocks))

    def usage(self) -> tuple[BlockUsage, ...]:
        return tuple([_usage(group.num_blocks - 1, len(free)) for group, free in zip(self._groups, self._free)])

    def reset_cache(self) -> None:
        """Nothing is cached."""

    def check(self) -> None:
        """Assert that every block is free or in exactly one lease. O(blocks); for tests."""
        for at, (group, free, usage) in enumerate(zip(self._groups, self._free, self.usage(), strict=True)):
            leased = [block for lease in self._leases for block in held(lease.blocks[at])]
            check_partition(group.num_blocks, free=free, leased=leased)
            assert usage.leased == len(leased)


def _usage(total: int, free: int) -> BlockUsage:
    return BlockUsage(total, free, 0, total - free)
