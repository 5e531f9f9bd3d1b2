"""``prefix_cache``: paged blocks that are found again by what they hold.

A committed full block has a content key (see the contract). When its last lease ends it stays where it is, and a
later request whose prompt starts with the same tokens takes it over instead of computing it. The block in which equal
texts part, or the last one of a text that ended within a block, is copied instead: a request that repeats a prompt
computes one token. Blocks that no lease holds are evicted least recently used first when memory is needed, and of one
chain the tail goes first, because a block is reachable only through those before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from engine.contracts.config import KVAllocatorConfig
from engine.contracts.kv_allocator import BlockUsage, KVGroup, Lease, Prefix
from engine.contracts.provider import BuildContext
from engine_plugins.kv_allocator.block_index import BlockIndex
from engine_plugins.kv_allocator.block_pool import FreeBlocks, Leases, advance, blocks_for, check_partition


class PrefixCacheAllocator:
    """Reference-counted blocks that an index finds by their content.

    A block is in one of three states: *free* (content worthless), *cached* (indexed, no lease) or *leased* (one or
    more leases). Only *commit* gives a full block its key, and only *release* makes one findable that is not full, so
    nobody ever finds tokens whose keys and values are still being computed. If two requests compute the same content
    at the same time, the first to commit owns the key and the other's block stays private; it takes the key over at its
    release if the first has gone by then.
    """

    caches_prefixes = True

    def __init__(self, config: KVAllocatorConfig, context: BuildContext) -> None:
        self._block_size = config.block_size

    def start(self, groups: Sequence[KVGroup], num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free = FreeBlocks(num_blocks)
        self._leases = Leases(groups)
        self._num_leases_of = [0] * num_blocks  # by block
        self._index = BlockIndex()
        self._cached: OrderedDict[int, None] = OrderedDict()  # no lease, indexed; next victim first
        self._committed: dict[int, Prefix] = {}  # by id of a lease: what was committed with keys

    def match_prefix(self, prefix: Prefix) -> int:
        full = self._full_blocks(prefix)
        return len(full) * self._block_size + self._part(prefix, len(full))[1]

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease:
        blocks = self._full_blocks(prefix)
        for block in blocks:
            self._hold(block)
        num_cached = len(blocks) * self._block_size
        kept = Prefix(prefix.keys, prefix.tokens, num_cached)  # nobody has made the copy yet
        source, count = self._part(prefix, len(blocks))
        copy = self._take_beside(source) if count else None
        if copy is None:
            lease = self._leases.add(request_id, blocks, num_cached)
        else:
            lease = self._leases.add(request_id, [*blocks, *copy], num_cached + count, source)
        self._committed[id(lease)] = kept
        return lease

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> int:
        held = len(lease.blocks[0]) if lease else 0
        return max(0, blocks_for(num_tokens, self._block_size) - held)

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        taken = self._take(self.blocks_needed(lease, num_tokens, num_tokens))
        if taken is None:
            return False
        lease.blocks[0].extend(taken)
        return True

    def commit(self, lease: Lease, prefix: Prefix) -> None:
        """As the contract says. Without keys the tokens are final but their blocks stay private for now."""
        advance(lease, prefix.num_tokens, self._block_size)
        if not prefix.keys:
            return
        full = prefix.num_tokens // self._block_size
        if len(prefix.keys) <= full:
            raise ValueError(
                f"request {lease.request_id!r}: {len(prefix.keys)} keys, expected {full + 1} for {full} full blocks"
            )
        for at in range(self._committed[id(lease)].num_tokens // self._block_size, full):
            if self._index.find(prefix.keys[at + 1]) is None:
                self._publish(lease.blocks[0][at], prefix, at)
        self._committed[id(lease)] = prefix

    def release(self, lease: Lease) -> None:
        blocks = self._leases.remove(lease)
        if blocks is None:
            return
        prefix = self._committed.pop(id(lease))
        full = prefix.num_tokens // self._block_size
        for block in blocks[full:]:
            self._num_leases_of[block] = 0
        worthless = blocks[full + 1 :] if self._keep_part(prefix, blocks, full) else blocks[full:]
        for at in reversed(range(full)):  # tail first: it is to be evicted first
            block = blocks[at]
            self._num_leases_of[block] -= 1
            owner = self._index.find(prefix.keys[at + 1])
            if owner is None:
                owner = block
                self._publish(block, prefix, at)
            if owner != block:
                worthless.append(block)
            self._use(owner)
        self._free.give(worthless)

    def usage(self) -> BlockUsage:
        total, free, cached = self._num_blocks - 1, len(self._free), len(self._cached)
        return BlockUsage(total, free, cached, total - free - cached)

    def reset_cache(self) -> None:
        self._evict(len(self._cached))

    # What blocks hold --------------------------------------------------------------------------------------------

    def _full_blocks(self, prefix: Prefix) -> list[int]:
        """The longest chain of full blocks that are cached."""
        blocks: list[int] = []
        for key in islice(prefix.keys, 1, prefix.num_tokens // self._block_size + 1):
            block = self._index.find(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _part(self, prefix: Prefix, num_full: int) -> tuple[int, int]:
        """The block that has most of the tokens behind the full ones, and how many; 0 and 0 if none has any."""
        tokens = self._tokens(prefix, num_full)
        return self._index.most_in_common(prefix.keys[num_full], tokens) if prefix.keys and tokens else (0, 0)

    def _tokens(self, prefix: Prefix, at: int) -> tuple[int, ...]:
        """Of the block ``at`` of a text."""
        start = at * self._block_size
        return tuple(prefix.tokens[start : min(start + self._block_size, prefix.num_tokens)])

    def _publish(self, block: int, prefix: Prefix, at: int) -> None:
        """Let ``block`` be found as the block ``at`` of a text."""
        tokens = self._tokens(prefix, at)
        key = prefix.keys[at + 1] if len(tokens) == self._block_size else None
        superfluous = self._index.add(block, prefix.keys[at], tokens, key)
        if superfluous is not None:
            self._cached.move_to_end(superfluous, last=False)

    def _keep_part(self, prefix: Prefix, blocks: Sequence[int], full: int) -> bool:
        """Cache the last block of a text that ended within it, unless another one holds the same. Returns whether."""
        tokens = self._tokens(prefix, full)
        if not tokens:
            return False
        other = self._index.beginning_with(prefix.keys[full], tokens)
        if other is None:
            self._publish(blocks[full], prefix, full)
        self._use(blocks[full] if other is None else other)
        return other is None

    # Whose blocks are --------------------------------------------------------------------------------------------

    def _hold(self, block: int) -> None:
        """One more lease holds a block that the index has."""
        self._cached.pop(block, None)
        self._num_leases_of[block] += 1

    def _use(self, block: int) -> None:
        """A block that the index has was just used: if no lease holds it, it is the last to be evicted."""
        if self._num_leases_of[block] == 0:
            self._cached[block] = None
            self._cached.move_to_end(block)

    def _take(self, count: int) -> list[int] | None:
        """Lease ``count`` free blocks, evicting cached ones if need be; ``None``, and nothing changed, if there are too
        few."""
        shortfall = count - len(self._free)
        if shortfall > len(self._cached):
            return None
        if shortfall > 0:
            self._evict(shortfall)
        taken = self._free.take(count)
        for block in taken:
            self._num_leases_of[block] = 1
        return taken

    def _take_beside(self, source: int) -> list[int] | None:
        """A block for a copy of ``source``, which is not evicted for it."""
        self._hold(source)
        taken = self._take(1)
        self._num_leases_of[source] -= 1
        self._use(source)
        return taken

    def _evict(self, count: int) -> None:
        """Make the ``count`` least recently used cached blocks free."""
        victims = [self._cached.popitem(last=False)[0] for _ in range(count)]
        for block in victims:
            self._index.remove(block)
        self._free.give(victims)

    def check(self) -> None:
        """Assert the invariants between leases, counts, contents and states. O(blocks); for tests."""
        counts = [0] * self._num_blocks
        for lease in self._leases:
            assert len(set(lease.blocks[0])) == len(lease.blocks[0]), f"{lease} holds a block twice"
            for block in lease.blocks[0]:
                counts[block] += 1
        assert counts == self._num_leases_of, "lease counts are wrong"
        leased = [block for block, count in enumerate(counts) if count]
        check_partition(self._num_blocks, free=self._free, cached=self._cached, leased=leased)
        self._index.check(self._block_size)
        assert not any(block in self._index for block in self._free), "a free block can be found"
        assert all(block in self._index for block in self._cached), "a cached block cannot be found"
        assert not any(map(self._index.is_partial, leased)), "a leased block that is not full can be found"
        assert self.usage().leased == len(leased)
