"""``prefix_cache``: paged blocks that are found again by what they hold.

A committed full block has a content key (see the contract). When its last lease ends it stays where it is, and a
later request whose prompt starts with the same tokens takes it over instead of computing it. The block in which equal
texts part, or the last one of a text that ended within a block, is copied instead: a request that repeats a prompt
computes one token. Blocks that no lease holds are evicted least recently used first when memory is needed, and of one
chain the tail goes first, because a block is reachable only through those before it. Blocks that a tenant retains go
after its others (:mod:`engine_plugins.eviction`).

Each KV group has its own blocks, and finds them by the same keys. A hit is as long as all groups allow: one that keeps
every token needs all blocks of it, one with a window those that a query after the hit can read. What the window of a
running request has passed stays cached like what an ended one had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.contracts.config import KVAllocatorConfig
from engine.contracts.kv_allocator import BlockUsage, KVGroup, Lease, Prefix
from engine.contracts.provider import BuildContext
from engine_plugins.eviction import EvictionOrder
from engine_plugins.kv_allocator.block_index import BlockIndex
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


class CachedBlocks:
    """The blocks of one KV group: reference-counted, and found by their content.

    A block is in one of three states: *free* (content worthless), *cached* (indexed, no lease) or *leased* (one or
    more leases). Only *commit* gives a full block its key, and only *release* makes one findable that is not full, so
    nobody ever finds tokens whose keys and values are still being computed. If two requests compute the same content
    at the same time, the first to commit owns the key and the other's block stays private; it takes the key over when
    it gives the block back if the first has gone by then.
    """

    __slots__ = ("_cached", "_num_leases_of", "block_size", "free", "group", "index")

    def __init__(self, group: KVGroup, block_size: int, clock: Callable[[], float]) -> None:
        self.group = group
        self.block_size = block_size
        self.free = FreeBlocks(group.num_blocks)
        self.index = BlockIndex()
        self._num_leases_of = [0] * group.num_blocks  # by block
        self._cached: EvictionOrder[int] = EvictionOrder(group.num_blocks - 1, clock)  # no lease, indexed

    def usage(self) -> BlockUsage:
        total, free, cached = self.group.num_blocks - 1, len(self.free), len(self._cached)
        return BlockUsage(total, free, cached, total - free - cached)

    # What blocks hold --------------------------------------------------------------------------------------------

    def publish(self, block: int, prefix: Prefix, at: int) -> None:
        """Let ``block`` be found as the block ``at`` of a text."""
        tokens = tokens_of(prefix, at, self.block_size)
        key = prefix.keys[at + 1] if len(tokens) == self.block_size else None
        superfluous = self.index.add(block, prefix.keys[at], tokens, key)
        if superfluous is not None:
            self._cached.first(superfluous)

    def keep_part(self, block: int, prefix: Prefix, at: int) -> bool:
        """Cache the last block of a text that ended within it, unless another one holds the same. Returns whether."""
        tokens = tokens_of(prefix, at, self.block_size)
        if not tokens:
            return False
        other = self.index.beginning_with(prefix.keys[at], tokens)
        if other is None:
            self.publish(block, prefix, at)
        self._use(block if other is None else other, prefix)
        return other is None

    # Whose blocks are --------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        return len(self.free) + len(self._cached)

    def hold(self, block: int) -> None:
        """One more lease holds a block that the index has."""
        self._cached.take(block)
        self._num_leases_of[block] += 1

    def take(self, count: int) -> list[int]:
        """Lease ``count`` free blocks, evicting cached ones if need be. As many are available."""
        if count > len(self.free):
            self.evict(count - len(self.free))
        taken = self.free.take(count)
        for block in taken:
            self._num_leases_of[block] = 1
        return taken

    def has_room_beside(self, source: int) -> bool:
        """Whether there is a block for a copy of ``source``, which is not evicted for it."""
        return self.available > (source in self._cached)

    def take_beside(self, source: int, prefix: Prefix) -> list[int]:
        """That block. ``prefix``: of the tenant whose block ``source`` is, here and below."""
        self.hold(source)
        taken = self.take(1)
        self._num_leases_of[source] -= 1
        self._use(source, prefix)
        return taken

    def give_back(self, block: int, prefix: Prefix, at: int) -> bool:
        """A lease ends its hold on the full block ``at`` of a text. Returns whether it is worthless: another one is
        found for this content."""
        self._num_leases_of[block] -= 1
        owner = self.index.find(prefix.keys[at + 1])
        if owner is None:
            owner = block
            self.publish(block, prefix, at)
        self._use(owner, prefix)
        return owner != block

    def let_go(self, block: int, prefix: Prefix) -> None:
        """A lease ends its hold on a block that the index has."""
        self._num_leases_of[block] -= 1
        self._use(block, prefix)

    def drop(self, blocks: Sequence[int], prefix: Prefix) -> list[int]:
        """A lease ends its hold on blocks past what it has committed. Returns those that nobody may find; the others
        were found when it was opened."""
        worthless = [block for block in blocks if block not in self.index]
        for block in worthless:
            self._num_leases_of[block] = 0
        for block in reversed(blocks):
            if block in self.index:
                self.let_go(block, prefix)
        return worthless

    def evict(self, count: int) -> None:
        """Make ``count`` cached blocks free."""
        victims = []
        for _ in range(count):
            block = self._cached.pop()
            assert block is not None
            self.index.remove(block)
            victims.append(block)
        self.free.give(victims)

    def evict_all(self) -> None:
        self.evict(len(self._cached))

    def retain(self, key: bytes, seconds: float) -> None:
        block = self.index.find(key)
        if block is not None:
            self._cached.retain(block, seconds)

    def _use(self, block: int, prefix: Prefix) -> None:
        """A block that the index has was just used: if no lease holds it, it is the last to be evicted."""
        if self._num_leases_of[block] == 0:
            self._cached.add(block, prefix.keys[0])

    def check(self, leases: Sequence[Sequence[int]]) -> None:
        """Assert the invariants between leases, counts, contents and states. O(blocks); for tests."""
        counts = [0] * self.group.num_blocks
        for blocks in leases:
            assert len(set(blocks)) == len(blocks), f"a lease holds a block twice: {blocks}"
            for block in blocks:
                counts[block] += 1
        assert counts == self._num_leases_of, "lease counts are wrong"
        leased = [block for block, count in enumerate(counts) if count]
        check_partition(self.group.num_blocks, free=self.free, cached=self._cached, leased=leased)
        self.index.check(self.block_size)
        assert not any(block in self.index for block in self.free), "a free block can be found"
        assert all(block in self.index for block in self._cached), "a cached block cannot be found"
        assert not any(map(self.index.is_partial, leased)), "a leased block that is not full can be found"
        assert self.usage().leased == len(leased)


class PrefixCacheAllocator:
    """See the module."""

    caches_prefixes = True

    def __init__(self, config: KVAllocatorConfig, context: BuildContext) -> None:
        self._block_size = config.block_size
        self._clock = context.clock

    def start(self, groups: Sequence[KVGroup]) -> None:
        self._pools = tuple(CachedBlocks(group, self._block_size, self._clock) for group in started(groups))
        self._lasting = tuple(pool for pool in self._pools if not pool.group.forgets)
        self._forgetful = tuple((at, pool) for at, pool in enumerate(self._pools) if pool.group.forgets)
        self._leases = Leases()
        self._committed: dict[int, Prefix] = {}  # by id of a lease: what was committed with keys

    def match_prefix(self, prefix: Prefix) -> int:
        full = self._full_blocks(prefix)
        return full * self._block_size + self._part(prefix, full)[1]

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease:
        full = self._full_blocks(prefix)
        num_cached = full * self._block_size
        blocks = tuple(self._take_over(pool, prefix, full) for pool in self._pools)
        kept = Prefix(prefix.keys, prefix.tokens, num_cached)  # nobody has made the copy yet
        sources, count = self._part(prefix, full)
        copied = count > 0 and all(pool.has_room_beside(own) for pool, own in zip(self._pools, sources, strict=True))
        if copied:
            for pool, own, ids in zip(self._pools, sources, blocks, strict=True):
                ids.extend(pool.take_beside(own, prefix))
            for at, pool in self._forgetful:
                self._give_back_passed(pool, blocks[at], kept, num_cached, num_cached + count)
        lease = self._leases.add(
            request_id, blocks, num_cached + count if copied else num_cached, sources if copied else None
        )
        self._committed[id(lease)] = kept
        return lease

    def has_block(self, group: int, key: bytes) -> bool:
        return self._pools[group].index.find(key) is not None

    def open_filling(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease | None:
        full = prefix.num_tokens // self._block_size
        blocks, to_fill = [], []
        for pool in self._pools:
            first = pool.group.num_passed(prefix.num_tokens, self._block_size)
            found = [pool.index.find(prefix.keys[at + 1]) or 0 for at in range(first, full)]
            for block in held(found):
                pool.hold(block)
            blocks.append([0] * first + found)
            to_fill.append(tuple([at for at in range(first, full) if not blocks[-1][at]]))
        if any(len(places) > pool.available for pool, places in zip(self._pools, to_fill, strict=True)):
            for pool, ids in zip(self._pools, blocks, strict=True):
                for block in reversed(held(ids)):
                    pool.let_go(block, prefix)
            return None
        for pool, ids, places in zip(self._pools, blocks, to_fill, strict=True):
            for at, block in zip(places, pool.take(len(places)), strict=True):
                ids[at] = block
        lease = self._leases.add(request_id, tuple(blocks), prefix.num_tokens)
        lease.num_committed, lease.to_fill = 0, tuple(to_fill)
        self._committed[id(lease)] = Prefix(prefix.keys, prefix.tokens, 0)
        return lease

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> tuple[int, ...]:
        total = blocks_for(num_tokens, self._block_size)
        if lease is None:
            return (total,) * len(self._pools)
        return tuple([max(0, total - len(blocks)) for blocks in lease.blocks])

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        needed = self.blocks_needed(lease, num_tokens, num_tokens)
        if any(count > pool.available for count, pool in zip(needed, self._pools, strict=True)):
            return False
        for blocks, pool, count in zip(lease.blocks, self._pools, needed, strict=True):
            if count:
                blocks.extend(pool.take(count))
        return True

    def commit(self, lease: Lease, prefix: Prefix) -> None:
        """As the contract says. Without keys the tokens are final but their blocks stay private for now."""
        before = lease.num_committed
        advance(lease, prefix.num_tokens, self._block_size)
        if prefix.keys:
            self._publish(lease, prefix)
        for at, pool in self._forgetful:
            self._give_back_passed(pool, lease.blocks[at], prefix, before, lease.num_committed)

    def release(self, lease: Lease) -> None:
        blocks = self._leases.remove(lease)
        if blocks is None:
            return
        prefix = self._committed.pop(id(lease))
        for pool, ids in zip(self._pools, blocks, strict=True):
            self._release(pool, ids, prefix)

    def retain(self, prefix: Prefix, seconds: float) -> None:
        for pool in self._pools:
            for at in range(prefix.num_tokens // self._block_size - 1, -1, -1):
                pool.retain(prefix.keys[at + 1], seconds)

    def usage(self) -> tuple[BlockUsage, ...]:
        return tuple([pool.usage() for pool in self._pools])

    def reset_cache(self) -> None:
        for pool in self._pools:
            pool.evict_all()

    def check(self) -> None:
        """Assert the invariants of every group. O(blocks); for tests."""
        for at, pool in enumerate(self._pools):
            pool.check([held(lease.blocks[at]) for lease in self._leases])

    # What is found -----------------------------------------------------------------------------------------------

    def _full_blocks(self, prefix: Prefix) -> int:
        """How many full blocks a hit has: the most that all groups allow."""
        most = prefix.num_tokens // self._block_size if prefix.keys else 0
        for pool in self._lasting:
            for at in range(most):
                if pool.index.find(prefix.keys[at + 1]) is None:
                    most = at
                    break
        while (gap := self._gap(prefix, most)) is not None:
            most = gap  # any end after it, up to here, needs this block
        return most

    def _gap(self, prefix: Prefix, full: int) -> int | None:
        """The last block that a hit of ``full`` blocks needs in a group that forgets, and that is not there."""
        for _, pool in self._forgetful:
            for at in range(full - 1, pool.group.num_passed(full * self._block_size, self._block_size) - 1, -1):
                if pool.index.find(prefix.keys[at + 1]) is None:
                    return at
        return None

    def _part(self, prefix: Prefix, full: int) -> tuple[tuple[int, ...], int]:
        """In each group the block that has most of the tokens after the full ones, and how many all groups have."""
        tokens = tokens_of(prefix, full, self._block_size)
        if not prefix.keys or not tokens:
            return (), 0
        found = [pool.index.most_in_common(prefix.keys[full], tokens) for pool in self._pools]
        return tuple([block for block, _ in found]), min([count for _, count in found])

    def _take_over(self, pool: CachedBlocks, prefix: Prefix, full: int) -> list[int]:
        """The blocks of a hit, padding where a group has passed them."""
        first = pool.group.num_passed(full * self._block_size, self._block_size)
        blocks = [0] * first
        for at in range(first, full):
            block = pool.index.find(prefix.keys[at + 1])
            assert block is not None
            pool.hold(block)
            blocks.append(block)
        return blocks

    # What is given back ------------------------------------------------------------------------------------------

    def _publish(self, lease: Lease, prefix: Prefix) -> None:
        full = prefix.num_tokens // self._block_size
        if len(prefix.keys) <= full:
            raise ValueError(
                f"request {lease.request_id!r}: {len(prefix.keys)} keys, expected {full + 1} for {full} full blocks"
            )
        for at in range(self._committed[id(lease)].num_tokens // self._block_size, full):
            for pool, blocks in zip(self._pools, lease.blocks, strict=True):
                if blocks[at] and pool.index.find(prefix.keys[at + 1]) is None:
                    pool.publish(blocks[at], prefix, at)
        self._committed[id(lease)] = prefix

    def _give_back_passed(self, pool: CachedBlocks, blocks: list[int], prefix: Prefix, before: int, now: int) -> None:
        """The blocks that a group passes between two numbers of tokens leave a lease."""
        places = [at for at in passed(pool.group, before, now, self._block_size) if blocks[at]]
        taken = take_out(blocks, places)
        if prefix.keys:
            worthless = [block for block, at in zip(taken, places, strict=True) if pool.give_back(block, prefix, at)]
        else:
            worthless = pool.drop(taken, prefix)
        pool.free.give(worthless)

    def _release(self, pool: CachedBlocks, blocks: Sequence[int], prefix: Prefix) -> None:
        full = prefix.num_tokens // self._block_size
        worthless = pool.drop(held(blocks[full:]), prefix)
        if full < len(blocks) and blocks[full] in worthless and pool.keep_part(blocks[full], prefix, full):
            worthless.remove(blocks[full])
        for at in reversed(range(full)):  # tail first: it is to be evicted first
            if blocks[at] and pool.give_back(blocks[at], prefix, at):
                worthless.append(blocks[at])
        pool.free.give(worthless)


def tokens_of(prefix: Prefix, at: int, block_size: int) -> tuple[int, ...]:
    """Those of the block ``at`` of a text."""
    start = at * block_size
    return tuple(prefix.tokens[start : min(start + block_size, prefix.num_tokens)])
