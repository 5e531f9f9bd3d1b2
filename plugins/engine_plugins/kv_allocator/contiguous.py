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
from engine_plugins.kv_allocator.block_pool import (
    Leases,
    advance,
    blocks_for,
    check_partition,
    held,
    passed,
    started,
    take_out,
)


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
    """One run per request and KV group, first fit. ``open`` answers ``None`` while no free run is long enough.

    Of a group with a window the run is a ring (the rolling buffer of Mistral 7B, arXiv 2310.06825): the block that the
    window has passed is the one that the request takes next. So ``reserve`` refuses what runs into tokens that are
    still read, until a commit has moved the window on.
    """

    caches_prefixes = False

    def __init__(self, config: KVAllocatorConfig, context: BuildContext) -> None:
        self._block_size = config.block_size

    def start(self, groups: Sequence[KVGroup]) -> None:
        self._groups = started(groups)
        self._free = tuple(FreeRuns(group.num_blocks) for group in groups)
        self._leases = Leases()
        self._blocks_of: dict[int, int] = {}  # by id of a lease: blocks of the most tokens it may have

    def match_prefix(self, prefix: Prefix) -> int:
        return 0

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease | None:
        runs: list[range] = []
        for group, free in zip(self._groups, self._free, strict=True):
            run = free.take(self._run_length(group, max_tokens))
            if run is None:
                for taken, from_there in zip(runs, self._free):
                    from_there.give(taken)
                return None
            runs.append(run)
        lease = self._leases.add(request_id, tuple(list(run) for run in runs))
        self._blocks_of[id(lease)] = blocks_for(max_tokens, self._block_size)
        return lease

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> tuple[int, ...]:
        if lease is None:
            return tuple(self._run_length(group, max_tokens) for group in self._groups)
        beyond = blocks_for(num_tokens, self._block_size) - self._blocks_of[id(lease)]
        return (max(0, beyond),) * len(self._groups)

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        """True up to the ``max_tokens`` the lease was opened with (rounded up to a block), as far as rings hold."""
        return blocks_for(num_tokens, self._block_size) <= min(map(len, lease.blocks))

    def commit(self, lease: Lease, prefix: Prefix) -> None:
        before = lease.num_committed
        advance(lease, prefix.num_tokens, self._block_size)
        for group, free, blocks in zip(self._groups, self._free, lease.blocks, strict=True):
            for block in take_out(blocks, passed(group, before, lease.num_committed, self._block_size)):
                if len(blocks) < self._blocks_of[id(lease)]:
                    blocks.append(block)
                else:
                    free.give([block])

    def release(self, lease: Lease) -> None:
        runs = self._leases.remove(lease)
        if runs is None:
            return
        del self._blocks_of[id(lease)]
        for group, free, blocks in zip(self._groups, self._free, runs, strict=True):
            for run in [[block] for block in held(blocks)] if group.forgets else [blocks]:
                free.give(run)

    def usage(self) -> tuple[BlockUsage, ...]:
        totals = [(group.num_blocks - 1, free.count) for group, free in zip(self._groups, self._free, strict=True)]
        return tuple([BlockUsage(total, free, 0, total - free) for total, free in totals])

    def reset_cache(self) -> None:
        """Nothing is cached."""

    def _run_length(self, group: KVGroup, max_tokens: int) -> int:
        """Blocks of a lease that may have ``max_tokens`` tokens."""
        whole = blocks_for(max_tokens, self._block_size)
        return min(whole, group.most_blocks or whole) if group.forgets else whole

    def check(self) -> None:
        """Assert that leases are runs, and every block is free or in exactly one lease. O(blocks); for tests."""
        for at, (group, free, usage) in enumerate(zip(self._groups, self._free, self.usage(), strict=True)):
            free.check()
            leased: list[int] = []
            for lease in self._leases:
                blocks = lease.blocks[at]
                assert group.forgets or blocks == list(range(blocks[0], blocks[0] + len(blocks))), f"{lease} is no run"
                leased += held(blocks)
            check_partition(group.num_blocks, free=free.blocks(), leased=leased)
            assert usage.leased == len(leased)
