"""``prefix_cache``: paged blocks that are found again by what they hold.

A committed full block has a content key (see the contract). When its last lease ends it stays where it is, and a
later request whose prompt starts with the same tokens takes it over instead of computing it. Blocks that no lease
holds are evicted least recently used first when memory is needed, and of one chain the tail goes first, because a
block is reachable only through those before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from engine.contracts.config import KVAllocatorConfig
from engine.contracts.kv_allocator import BlockUsage, KVGroup, Lease
from engine.contracts.provider import BuildContext
from engine_plugins.kv_allocator.block_pool import FreeBlocks, Leases, advance, blocks_for, check_partition


class PrefixCacheAllocator:
    """Reference-counted blocks with content keys.

    A block is in one of three states: *free* (content worthless), *cached* (has a key, no lease) or *leased* (one
    or more leases). Only *commit* gives a block its key, so nobody ever finds a block whose keys and values are
    still being computed. If two requests compute the same content at the same time, the first to commit owns the
    key and the other's block stays private; it takes the key over at its release if the first has gone by then.
    """

    caches_prefixes = True

    def __init__(self, config: KVAllocatorConfig, context: BuildContext) -> None:
        self._block_size = config.block_size

    def start(self, groups: Sequence[KVGroup], num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free = FreeBlocks(num_blocks)
        self._leases = Leases(groups)
        self._num_leases_of = [0] * num_blocks  # by block
        self._key_of: list[bytes | None] = [None] * num_blocks  # by block; None: private or free
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # no lease, has a key; next victim first
        self._keys_of: dict[int, list[bytes]] = {}  # by id of a lease: keys of its committed full blocks

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        for index, key in enumerate(keys):
            if key not in self._block_of:
                return index
        return len(keys)

    def open(self, request_id: str, keys: Sequence[bytes], max_tokens: int) -> Lease:
        hit = list(keys[: self.match_prefix(keys)])
        blocks = [self._block_of[key] for key in hit]
        lease = self._leases.add(request_id, blocks, num_cached=len(hit) * self._block_size)
        self._keys_of[id(lease)] = hit
        for block in blocks:
            self._cached.pop(block, None)
            self._num_leases_of[block] += 1
        return lease

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> int:
        held = len(lease.blocks[0]) if lease else 0
        return max(0, blocks_for(num_tokens, self._block_size) - held)

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        needed = self.blocks_needed(lease, num_tokens, num_tokens)
        shortfall = needed - len(self._free)
        if shortfall > len(self._cached):
            return False
        if shortfall > 0:
            self._evict(shortfall)
        for block in self._free.take(needed):
            self._num_leases_of[block] = 1
            lease.blocks[0].append(block)
        return True

    def commit(self, lease: Lease, num_tokens: int, keys: Sequence[bytes]) -> None:
        """As the contract says. With empty ``keys`` the tokens are final but their blocks stay private for now."""
        advance(lease, num_tokens, self._block_size)
        full = num_tokens // self._block_size
        if not keys:
            return
        if len(keys) < full:
            raise ValueError(f"request {lease.request_id!r}: {len(keys)} keys for {full} full blocks")
        own = self._keys_of[id(lease)]
        for index in range(len(own), full):
            own.append(keys[index])
            if keys[index] not in self._block_of:
                self._publish(keys[index], lease.blocks[0][index])

    def release(self, lease: Lease) -> None:
        blocks = self._leases.remove(lease)
        if blocks is None:
            return
        keys = self._keys_of.pop(id(lease))
        worthless = blocks[len(keys) :]
        for key, block in reversed(list(zip(keys, blocks))):  # tail first: it is to be evicted first
            self._num_leases_of[block] -= 1
            if key not in self._block_of:
                self._publish(key, block)
            owner = self._block_of[key]
            if owner != block:
                worthless.append(block)
            if self._num_leases_of[owner] == 0:
                self._cached[owner] = None
                self._cached.move_to_end(owner)
        for block in worthless:
            self._num_leases_of[block] = 0
        self._free.give(worthless)

    def usage(self) -> BlockUsage:
        total, free, cached = self._num_blocks - 1, len(self._free), len(self._cached)
        return BlockUsage(total, free, cached, total - free - cached)

    def reset_cache(self) -> None:
        self._evict(len(self._cached))

    def _publish(self, key: bytes, block: int) -> None:
        self._block_of[key] = block
        self._key_of[block] = key

    def _evict(self, count: int) -> None:
        """Make the ``count`` least recently used cached blocks free."""
        victims = [self._cached.popitem(last=False)[0] for _ in range(count)]
        for block in victims:
            key = self._key_of[block]
            assert key is not None
            del self._block_of[key]
            self._key_of[block] = None
        self._free.give(victims)

    def check(self) -> None:
        """Assert the invariants between leases, counts, keys and states. O(blocks); for tests."""
        counts = [0] * self._num_blocks
        for lease in self._leases:
            assert len(set(lease.blocks[0])) == len(lease.blocks[0]), f"{lease} holds a block twice"
            for block in lease.blocks[0]:
                counts[block] += 1
        assert counts == self._num_leases_of, "lease counts are wrong"
        leased = [block for block, count in enumerate(counts) if count]
        check_partition(self._num_blocks, free=self._free, cached=self._cached, leased=leased)
        assert all(self._key_of[block] is None for block in self._free), "a free block has a key"
        assert all(self._key_of[block] is not None for block in self._cached), "a cached block has no key"
        keyed = {key: block for block, key in enumerate(self._key_of) if key is not None}
        assert keyed == self._block_of, "keys and blocks disagree"
        assert self.usage().leased == len(leased)
