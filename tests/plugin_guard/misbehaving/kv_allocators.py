"""KV allocators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.contracts.kv_allocator import Lease
from engine_plugins.kv_allocator.paged import PagedAllocator


class BlockZero(PagedAllocator):
    """Hands out the padding block."""

    says = r"reserve\(\) handed out block 0, expected 1 to \d+"

    def reserve(self, lease: Any, num_tokens: int) -> bool:
        before = len(lease.blocks[0])
        found = super().reserve(lease, num_tokens)
        lease.blocks[0][before:] = [block - 1 for block in lease.blocks[0][before:]]
        return found


class BeyondThePool(PagedAllocator):
    """Hands out blocks that do not exist."""

    says = r"reserve\(\) handed out block \d+, expected 1 to \d+"

    def reserve(self, lease: Any, num_tokens: int) -> bool:
        before = len(lease.blocks[0])
        found = super().reserve(lease, num_tokens)
        lease.blocks[0][before:] = [block + 10_000_000 for block in lease.blocks[0][before:]]
        return found


class TwiceFreed(PagedAllocator):
    """Gives back every block twice."""

    says = r"handed out block \d+, which another lease holds|usage\(\)|release\(\) left"

    def release(self, lease: Any) -> None:
        blocks = list(lease.blocks[0])
        super().release(lease)
        self._free[0].give(blocks)


class SameBlocks(PagedAllocator):
    """Everybody gets the same blocks."""

    says = r"reserve\(\) handed out block \d+, which another lease holds"

    def reserve(self, lease: Any, num_tokens: int) -> bool:
        needed = -(-num_tokens // self._block_size)
        lease.blocks[0][:] = [1] * needed
        return True


class Promises(PagedAllocator):
    """``reserve`` says yes and does nothing."""

    says = r"reserve\(\) returned True for \d+ tokens and 0 blocks"

    def reserve(self, lease: Any, num_tokens: int) -> bool:
        return True


class SaysNothing(PagedAllocator):
    """``reserve`` returns nothing."""

    says = r"reserve\(\) returned None, expected True or False"

    def reserve(self, lease: Any, num_tokens: int) -> Any:
        super().reserve(lease, num_tokens)


class FalseHit(PagedAllocator):
    """Says that tokens are cached which nobody asked for."""

    says = r"open\(\) says num_cached=64"

    def open(self, request_id: str, prefix: Any, max_tokens: int) -> Any:
        lease = super().open(request_id, prefix, max_tokens)
        return Lease(lease.request_id, lease.blocks, 64, 64)


class Tuples(PagedAllocator):
    """Counts blocks in a tuple."""

    says = r"usage\(\) returned \(\d+, \d+, 0, 0\)"

    def usage(self) -> Any:
        (found,) = super().usage()
        return found.total, found.free, found.cached, found.leased


class OneForAll(PagedAllocator):
    """Counts the blocks of all KV groups together."""

    says = r"usage\(\) returned BlockUsage\(.*\), expected"

    def usage(self) -> Any:
        return super().usage()[0]


class OpenRaises(PagedAllocator):
    """``open`` raises at every call."""

    says = r"open\(\) raised IndexError: pop from empty list"

    def open(self, request_id: str, prefix: Any, max_tokens: int) -> Any:
        return [].pop()


class Leaks(PagedAllocator):
    """Never takes a block back."""

    says = r"release\(\) left BlockUsage\(total=\d+, free=\d+, cached=0, leased=\d+\) when every request had ended"

    def release(self, lease: Any) -> None:
        self._leases.remove(lease)


class HalfThePool(PagedAllocator):
    """Takes charge of half of the blocks."""

    says = r"usage\(\) returned \(BlockUsage\(.*after start\(\), expected"

    def start(self, groups: Any) -> None:
        super().start([replace(group, num_blocks=group.num_blocks // 2) for group in groups])


class MoreThanThereIs(PagedAllocator):
    """Finds more tokens than the request has."""

    says = r"match_prefix\(\) returned 99999, expected 0 to \d+ tokens"
    caches_prefixes = True

    def match_prefix(self, prefix: Any) -> int:
        return 99999


class InsideOfABlock(PagedAllocator):
    """Has a hit end inside of a block, and does not say what to copy."""

    says = r"open\(\) says copy_from=None with num_cached=3, expected a block for each of 1 groups"
    caches_prefixes = True
    copy_from: Any = None
    num_cached = 3

    def open(self, request_id: str, prefix: Any, max_tokens: int) -> Any:
        lease = super().open(request_id, prefix, max_tokens)
        lease.blocks[0].extend(self._free[0].take(1))
        lease.num_cached = lease.num_committed = self.num_cached if prefix.num_tokens >= self.num_cached else 0
        lease.copy_from = self.copy_from
        return lease


class CopiesNowhere(InsideOfABlock):
    """Says what to copy where a hit is of whole blocks."""

    says = r"open\(\) says copy_from=\(2,\) with num_cached=0, expected None"
    copy_from = (2,)
    num_cached = 0


class CopiesPadding(InsideOfABlock):
    """Copies the padding block."""

    says = r"open\(\) copies block 0 to block \d+, expected another of 1 to \d+"
    copy_from = (0,)


class CopiesItself(InsideOfABlock):
    """Copies a block to itself: it would have been shared with whoever writes to it."""

    says = r"open\(\) copies block (\d+) to block \1, expected another of 1 to \d+"

    def open(self, request_id: str, prefix: Any, max_tokens: int) -> Any:
        lease = super().open(request_id, prefix, max_tokens)
        lease.copy_from = (lease.blocks[0][0],) if lease.num_cached else None
        return lease
