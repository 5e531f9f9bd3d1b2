"""KV allocators."""

from __future__ import annotations

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
        self._free.give(blocks)


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

    def open(self, request_id: str, keys: Any, max_tokens: int) -> Any:
        lease = super().open(request_id, keys, max_tokens)
        return Lease(lease.request_id, lease.blocks, 64, 64)


class Tuples(PagedAllocator):
    """Counts blocks in a tuple."""

    says = r"usage\(\) returned \(\d+, \d+, 0, 0\)"

    def usage(self) -> Any:
        found = super().usage()
        return found.total, found.free, found.cached, found.leased


class OpenRaises(PagedAllocator):
    """``open`` raises at every call."""

    says = r"open\(\) raised IndexError: pop from empty list"

    def open(self, request_id: str, keys: Any, max_tokens: int) -> Any:
        return [].pop()


class Leaks(PagedAllocator):
    """Never takes a block back."""

    says = r"release\(\) left BlockUsage\(total=\d+, free=\d+, cached=0, leased=\d+\) when every request had ended"

    def release(self, lease: Any) -> None:
        self._leases.remove(lease)


class HalfThePool(PagedAllocator):
    """Takes charge of half of the blocks."""

    says = r"usage\(\) returned BlockUsage\(.*after start\(\), expected"

    def start(self, groups: Any, num_blocks: int) -> None:
        super().start(groups, num_blocks // 2)


class WrongKeys(PagedAllocator):
    """Finds more blocks than there are keys."""

    says = r"match_prefix\(\) returned 99, expected 0 to \d+ blocks"
    caches_prefixes = True

    def match_prefix(self, keys: Any) -> int:
        return 99
