"""``paged``: blocks on demand from one free list, nothing shared (PagedAttention, arXiv 2309.06180)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.contracts.config import KVAllocatorConfig
from engine.contracts.kv_allocator import BlockUsage, KVGroup, Lease, Prefix
from engine.contracts.provider import BuildContext
from engine_plugins.kv_allocator.block_pool import FreeBlocks, Leases, advance, blocks_for, check_partition


class PagedAllocator:
    """A sequence takes a block when its tokens reach it; at most one block per sequence is partly empty."""

    caches_prefixes = False

    def __init__(self, config: KVAllocatorConfig, context: BuildContext) -> None:
        self._block_size = config.block_size

    def start(self, groups: Sequence[KVGroup], num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free = FreeBlocks(num_blocks)
        self._leases = Leases(groups)

    def match_prefix(self, prefix: Prefix) -> int:
        return 0

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease:
        return self._leases.add(request_id, [])

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> int:
        held = len(lease.blocks[0]) if lease else 0
        return max(0, blocks_for(num_tokens, self._block_size) - held)

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        needed = self.blocks_needed(lease, num_tokens, num_tokens)
        if needed > len(self._free):
            return False
        lease.blocks[0].extend(self._free.take(needed))
        return True

    def commit(self, lease: Lease, prefix: Prefix) -> None:
        advance(lease, prefix.num_tokens, self._block_size)

    def release(self, lease: Lease) -> None:
        self._free.give(self._leases.remove(lease) or [])

    def usage(self) -> BlockUsage:
        total = self._num_blocks - 1
        return BlockUsage(total, len(self._free), 0, total - len(self._free))

    def reset_cache(self) -> None:
        """Nothing is cached."""

    def check(self) -> None:
        """Assert that every block is free or in exactly one lease. O(blocks); for tests."""
        leased = [block for lease in self._leases for block in lease.blocks[0]]
        check_partition(self._num_blocks, free=self._free, leased=leased)
        assert self.usage().leased == len(leased)
