"""``contiguous``: each request reserves one run of blocks for the most tokens it may ever have.

This is how engines kept keys and values before paging, and the honest baseline for it: no request is ever short
of memory once it runs, and the memory of tokens that are never produced is lost to everybody else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from engine.contracts.config import KVAllocatorConfig
from engine.contracts.kv_allocator import BlockUsage, KVGroup, Lease, Prefix
from engine.contracts.provider import BuildContext
from engine_plugins.kv_allocator.block_pool import Leases, advance, blocks_for, check_partition


class FreeRuns:
    """Free blocks as runs of consecutive ids, in order of address; neighbouring runs are always merged.

    There are at most as many runs as leases plus one, so the linear search is short.
    """

    __slots__ = ("_runs", "count")

    def __init__(self, num_blocks: int) -> None:
        self.count = num_blocks - 1
        """Free blocks in all runs."""
        self._runs: list[tuple[int, int]] = [(1, self.count)] if self.count else []

    def take(self, length: int) -> range | None:
        """The first run of ``length`` free blocks, or ``None`` if no free run is that long."""
        for index, (start, available) in enumerate(self._runs):
            if available >= length:
                rest = (start + length, available - length)
                self._runs[index : index + 1] = [rest] if rest[1] else []
                self.count -= length
                return range(start, start + length)
        return None

    def give(self, blocks: Sequence[int]) -> None:
        """Give back a run of consecutive ids."""
        if not blocks:
            return
        start, length = blocks[0], len(blocks)
        self.count += length
        index = bisect_left(self._runs, (start, 0))
        if index < len(self._runs) and self._runs[index][0] == start + length:
            length += self._runs.pop(index)[1]
        if index > 0 and sum(self._runs[index - 1]) == start:
            before = self._runs.pop(index - 1)
            index, start, length = index - 1, before[0], before[1] + length
        self._runs.insert(index, (start, length))

    def blocks(self) -> list[int]:
        return [block for start, length in self._runs for block in range(start, start + length)]

    def check(self) -> None:
        """Assert that runs are ordered, non-empty and merged."""
        for (start, length), (following, _) in zip(self._runs, self._runs[1:]):
            assert start + length < following, f"runs {start}+{length} and {following} should be one"
        assert all(length > 0 for _, length in self._runs)
        assert self.count == sum(length for _, length in self._runs)


class ContiguousAllocator:
    """One run per request, first fit. ``open`` answers ``None`` while no free run is long enough."""

    caches_prefixes = False

    def __init__(self, config: KVAllocatorConfig, context: BuildContext) -> None:
        self._block_size = config.block_size

    def start(self, groups: Sequence[KVGroup], num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free = FreeRuns(num_blocks)
        self._leases = Leases(groups)

    def match_prefix(self, prefix: Prefix) -> int:
        return 0

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease | None:
        run = self._free.take(blocks_for(max_tokens, self._block_size))
        return None if run is None else self._leases.add(request_id, list(run))

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> int:
        if lease is None:
            return blocks_for(max_tokens, self._block_size)
        return max(0, blocks_for(num_tokens, self._block_size) - len(lease.blocks[0]))

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        """True up to the ``max_tokens`` the lease was opened with (rounded up to a block); False beyond."""
        return blocks_for(num_tokens, self._block_size) <= len(lease.blocks[0])

    def commit(self, lease: Lease, prefix: Prefix) -> None:
        advance(lease, prefix.num_tokens, self._block_size)

    def release(self, lease: Lease) -> None:
        self._free.give(self._leases.remove(lease) or [])

    def usage(self) -> BlockUsage:
        total = self._num_blocks - 1
        return BlockUsage(total, self._free.count, 0, total - self._free.count)

    def reset_cache(self) -> None:
        """Nothing is cached."""

    def check(self) -> None:
        """Assert that leases are runs, and every block is free or in exactly one lease. O(blocks); for tests."""
        self._free.check()
        leased: list[int] = []
        for lease in self._leases:
            blocks = lease.blocks[0]
            assert blocks == list(range(blocks[0], blocks[0] + len(blocks))), f"{lease} is not one run"
            leased += blocks
        check_partition(self._num_blocks, free=self._free.blocks(), leased=leased)
        assert self.usage().leased == len(leased)
