"""The KV allocator as the loop calls it: every answer is looked at once, when it comes.

A block that two requests own, or that does not exist, would not fail: one request would read another's keys and values,
or kernels would write outside of the cache.
"""

from __future__ import annotations

from engine.border.calls import broken, shown
from engine.contracts.kv_allocator import BlockUsage, KVAllocator, Lease, Prefix


class CheckedAllocator:
    """Fulfils :class:`~engine.contracts.kv_allocator.KVAllocator` but for ``start``: the allocator is started already.
    Raises :class:`~engine.border.calls.PluginError` for an answer that its contract rules out."""

    def __init__(self, allocator: KVAllocator, block_size: int) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._num_blocks = self.usage().total + 1
        self._holders = [0] * self._num_blocks
        """By block: how many leases hold it."""
        self._open: set[int] = set()
        """Leases, by identity."""
        self.commit = allocator.commit  # these two answer nothing
        self.reset_cache = allocator.reset_cache

    def match_prefix(self, prefix: Prefix) -> int:
        found = self._allocator.match_prefix(prefix)
        if type(found) is not int or not 0 <= found <= prefix.num_tokens:
            raise broken(
                self._allocator, "match_prefix", f"returned {shown(found)}, expected 0 to {prefix.num_tokens} tokens"
            )
        return found

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease | None:
        lease = self._allocator.open(request_id, prefix, max_tokens)
        if lease is None:
            return None
        if not isinstance(lease, Lease) or not lease.blocks or type(lease.num_cached) is not int:
            raise broken(self._allocator, "open", f"returned {shown(lease)}, expected a Lease")
        if not all(type(ids) is list and len(ids) == len(lease.blocks[0]) for ids in lease.blocks):
            raise broken(self._allocator, "open", f"returned {shown(lease)}, expected a list of ids for each group")
        cached, held = lease.num_cached, len(lease.blocks[0])
        most = prefix.num_tokens if prefix.keys else 0
        if not 0 <= cached <= min(most, held * self._block_size):
            raise broken(
                self._allocator, "open", f"says num_cached={cached} of {most} tokens that may be shared, with "
                f"{held} blocks of {self._block_size} tokens",
            )  # fmt: skip
        self._take("open", lease, 0, shared=cached // self._block_size)
        self._check_copy(lease)
        self._open.add(id(lease))
        return lease

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> int:
        needed = self._allocator.blocks_needed(lease, num_tokens, max_tokens)
        if type(needed) is not int or needed < 0:
            raise broken(self._allocator, "blocks_needed", f"returned {shown(needed)}, expected a number of blocks")
        return needed

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        before = len(lease.blocks[0])
        reserved = self._allocator.reserve(lease, num_tokens)
        if type(reserved) is not bool:
            raise broken(self._allocator, "reserve", f"returned {shown(reserved)}, expected True or False")
        after = len(lease.blocks[0])
        if after != before:
            if after < before or not reserved:
                raise broken(self._allocator, "reserve", f"returned {reserved} and made {after} blocks of {before}")
            self._take("reserve", lease, before, shared=0)
        if reserved and after * self._block_size < num_tokens:
            raise broken(self._allocator, "reserve", f"returned True for {num_tokens} tokens and {after} blocks")
        return reserved

    def release(self, lease: Lease) -> None:
        if id(lease) in self._open:  # the first time
            self._open.remove(id(lease))
            for block in lease.blocks[0]:
                self._holders[block] -= 1
        self._allocator.release(lease)

    def usage(self) -> BlockUsage:
        usage = self._allocator.usage()
        if type(usage) is not BlockUsage:
            raise broken(self._allocator, "usage", f"returned {shown(usage)}, expected a BlockUsage")
        return usage

    def check_idle(self) -> None:
        """Nobody runs: all blocks must be back."""
        usage = self.usage()
        if usage.leased or usage.free + usage.cached != usage.total:
            raise broken(self._allocator, "release", f"left {shown(usage)} when every request had ended")

    def _check_copy(self, lease: Lease) -> None:
        """A hit that ends inside of a block says which block of each group to copy; any other says none."""
        sources, (own, part) = lease.copy_from, divmod(lease.num_cached, self._block_size)
        if not part and sources is None:
            return
        if not part or type(sources) is not tuple or len(sources) != len(lease.blocks):
            wanted = f"a block for each of {len(lease.blocks)} groups" if part else "None"
            raise broken(
                self._allocator, "open", f"says copy_from={shown(sources)} with num_cached={lease.num_cached}, "
                f"expected {wanted}",
            )  # fmt: skip
        for source, ids in zip(sources, lease.blocks, strict=True):
            if type(source) is not int or not 0 < source < self._num_blocks or source == ids[own]:
                raise broken(
                    self._allocator, "open", f"copies block {shown(source)} to block {ids[own]}, expected another of 1 "
                    f"to {self._num_blocks - 1}",
                )  # fmt: skip

    def _take(self, call: str, lease: Lease, first: int, shared: int) -> None:
        """Blocks from ``first`` on are new in this lease. Those of a cached prefix, the first ``shared``, others may
        hold as well."""
        for index, block in enumerate(lease.blocks[0][first:], first):
            if type(block) is not int or not 0 < block < self._num_blocks:
                raise broken(
                    self._allocator, call, f"handed out block {shown(block)}, expected 1 to {self._num_blocks - 1}"
                )
            holders = self._holders[block]
            if holders and index >= shared:
                raise broken(self._allocator, call, f"handed out block {block}, which another lease holds")
            self._holders[block] = holders + 1
