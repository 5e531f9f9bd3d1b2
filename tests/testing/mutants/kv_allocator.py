"""Allocators with a bug each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.contracts.config import KVAllocatorConfig
from engine.contracts.kv_allocator import BlockUsage, KVGroup, Lease
from engine.testing.context import build_context
from engine.testing.kv_allocator import KVAllocatorConformance, PrefixCachingConformance
from engine_plugins.kv_allocator.block_pool import blocks_for
from engine_plugins.kv_allocator.contiguous import ContiguousAllocator
from engine_plugins.kv_allocator.paged import PagedAllocator
from engine_plugins.kv_allocator.prefix_cache import PrefixCacheAllocator
from tests.testing.mutants.mutant import OnPlugin, mutant

HISTORIES = "test_random_histories_keep_the_contract"


class Suite(OnPlugin, KVAllocatorConformance):
    def make(self, block_size: int) -> Any:
        return self.plugin(KVAllocatorConfig(block_size=block_size), build_context(block_size))


class CachingSuite(OnPlugin, PrefixCachingConformance):
    def make(self, block_size: int) -> Any:
        return self.plugin(KVAllocatorConfig(block_size=block_size), build_context(block_size))


class Paged(PagedAllocator):
    """Without checks of its own: the suite must see by itself what is wrong."""

    check = None  # type: ignore[assignment]


class Prefix(PrefixCacheAllocator):
    """Without checks of its own."""

    check = None  # type: ignore[assignment]


class Contiguous(ContiguousAllocator):
    """Without checks of its own."""

    check = None  # type: ignore[assignment]


@mutant(Suite, "test_block_zero_is_never_handed_out", HISTORIES)
class HandsOutBlockZero(Paged):
    """Counts blocks from 0: a request writes where padding rows write."""

    def start(self, groups: Sequence[KVGroup], num_blocks: int) -> None:
        super().start(groups, num_blocks)
        self._free._stack = list(range(num_blocks - 2, -1, -1))


@mutant(Suite, "test_reserve_beyond_the_pool_is_refused_and_changes_nothing", HISTORIES)
class LeaksOnARefusal(Paged):
    """Takes what there is before it finds that it is not enough."""

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        needed = self.blocks_needed(lease, num_tokens, num_tokens)
        lease.blocks[0].extend(self._free.take(min(needed, len(self._free))))
        return len(lease.blocks[0]) >= blocks_for(num_tokens, self._block_size)


@mutant(Suite, HISTORIES)
class FreesTwice(Paged):
    """Gives the blocks of a lease back at every release."""

    def release(self, lease: Lease) -> None:
        blocks = list(lease.blocks[0])
        super().release(lease)
        if not blocks:
            return
        lease.blocks[0].extend(blocks)
        self._leases._open[id(lease)] = lease


@mutant(Suite, "test_a_request_may_start_again_before_its_old_lease_ends")
class LeaseByRequest(Paged):
    """Knows leases by request: the release of an old lease frees the new one's blocks."""

    def __init__(self, config: KVAllocatorConfig, context: Any) -> None:
        super().__init__(config, context)
        self._lease_of: dict[str, Lease] = {}

    def open(self, request_id: str, keys: Sequence[bytes], max_tokens: int) -> Lease:
        self._lease_of[request_id] = super().open(request_id, keys, max_tokens)
        return self._lease_of[request_id]

    def release(self, lease: Lease) -> None:
        super().release(self._lease_of.pop(lease.request_id, lease))


@mutant(Suite, "test_block_zero_is_never_handed_out", HISTORIES)
class OneBlockMore(Paged):
    """Rounds a number of tokens up wrongly: full blocks need another one."""

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> int:
        held = len(lease.blocks[0]) if lease else 0
        return max(0, num_tokens // self._block_size + 1 - held)


@mutant(Suite, HISTORIES)
class OneBlockLess(Paged):
    """Rounds a number of tokens down: the last tokens have no block."""

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> int:
        held = len(lease.blocks[0]) if lease else 0
        return max(0, num_tokens // self._block_size - held)


@mutant(Suite, "test_a_block_holds_as_many_tokens_as_the_configuration_says")
class SixteenTokensABlock(Paged):
    """Takes every block for one of 16 tokens."""

    def __init__(self, config: KVAllocatorConfig, context: Any) -> None:
        super().__init__(config, context)
        self._block_size = 16


@mutant(Suite, "test_reserve_of_what_is_covered_changes_nothing", HISTORIES)
class NegativeNeed(Paged):
    """Says that a lease which holds more than is asked for needs fewer than no blocks."""

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> int:
        return blocks_for(num_tokens, self._block_size) - (len(lease.blocks[0]) if lease else 0)

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        return self.blocks_needed(lease, num_tokens, num_tokens) <= 0 or super().reserve(lease, num_tokens)


@mutant(Suite, "test_block_zero_is_never_handed_out", HISTORIES)
class FirstGroupOnly(Paged):
    """Gives blocks to the first KV group alone."""

    def open(self, request_id: str, keys: Sequence[bytes], max_tokens: int) -> Lease:
        lease = super().open(request_id, keys, max_tokens)
        lease.blocks = (lease.blocks[0], *([] for _ in lease.blocks[1:]))
        return lease


@mutant(Suite, "test_blocks_needed_for_a_new_lease_is_what_it_takes")
class ForgetsThePromise(Contiguous):
    """Reserves a run for all that a request can need, and says that it needs blocks for what it has."""

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> int:
        return super().blocks_needed(lease, num_tokens, num_tokens)


@mutant(Suite, HISTORIES)
class RefusesWithRoom(Contiguous):
    """Wants one free block more than a request can need."""

    def open(self, request_id: str, keys: Sequence[bytes], max_tokens: int) -> Lease | None:
        if self._free.count <= blocks_for(max_tokens, self._block_size):
            return None
        return super().open(request_id, keys, max_tokens)


@mutant(CachingSuite, "test_nothing_is_found_before_it_is_committed")
class SharesTheUncommitted(Prefix):
    """Publishes every block for which it was given a key, whether or not its tokens are final."""

    def commit(self, lease: Lease, num_tokens: int, keys: Sequence[bytes]) -> None:
        super().commit(lease, num_tokens, keys)
        own = self._keys_of[id(lease)]
        for key, block in list(zip(keys, lease.blocks[0]))[len(own) :]:
            own.append(key)
            if key not in self._block_of:
                self._publish(key, block)


@mutant(CachingSuite, HISTORIES)
class PublishesTheHalfFull(Prefix):
    """Counts the block that is being filled as full."""

    def commit(self, lease: Lease, num_tokens: int, keys: Sequence[bytes]) -> None:
        super().commit(lease, num_tokens, keys)
        if keys and num_tokens % self._block_size:
            self._key_of[lease.blocks[0][num_tokens // self._block_size]] = keys[-1]
            self._block_of[keys[-1]] = lease.blocks[0][num_tokens // self._block_size]


@mutant(CachingSuite, "test_an_idle_prefix_that_is_leased_again_cannot_be_evicted", HISTORIES)
class EvictsTheLeased(Prefix):
    """Leaves a block that is leased again among those that may be evicted."""

    def open(self, request_id: str, keys: Sequence[bytes], max_tokens: int) -> Lease:
        idle = dict.fromkeys(self._cached)
        lease = super().open(request_id, keys, max_tokens)
        self._cached.update(idle)
        return lease


@mutant(CachingSuite, "test_idle_prefixes_give_way_to_whoever_needs_their_memory", HISTORIES)
class FindsTheEvicted(Prefix):
    """Forgets to take an evicted block's key out of its index."""

    def _evict(self, count: int) -> None:
        index = dict(self._block_of)
        super()._evict(count)
        self._block_of = index


@mutant(CachingSuite, HISTORIES)
class FreesTheShared(Prefix):
    """Counts no leases: the first request that ends frees a prefix that others read."""

    def release(self, lease: Lease) -> None:
        for block in lease.blocks[0]:
            self._num_leases_of[block] = 1
        super().release(lease)


@mutant(CachingSuite, "test_a_hit_takes_over_the_same_blocks_in_every_group", HISTORIES)
class CountsSharedTwice(Prefix):
    """Counts a block of two leases as two leased blocks."""

    def usage(self) -> BlockUsage:
        found = super().usage()
        leased = sum(len(lease.blocks[0]) for lease in self._leases)
        return BlockUsage(found.total, found.total - found.cached - leased, found.cached, leased)


@mutant(CachingSuite, "test_reset_forgets_everything_that_nobody_holds")
class ResetsTheLeased(Prefix):
    """Forgets prefixes that leases hold when the cache is reset."""

    def reset_cache(self) -> None:
        super().reset_cache()
        self._block_of.clear()


@mutant(CachingSuite, HISTORIES)
class ResetForgetsNothing(Prefix):
    """Does nothing when the cache is reset."""

    def reset_cache(self) -> None:
        pass


@mutant(CachingSuite, "test_a_hit_takes_over_the_same_blocks_in_every_group", HISTORIES)
class CountsBlocks(Prefix):
    """Says in blocks how much of a prompt is cached, where tokens are meant."""

    def open(self, request_id: str, keys: Sequence[bytes], max_tokens: int) -> Lease:
        lease = super().open(request_id, keys, max_tokens)
        lease.num_cached = lease.num_committed = lease.num_cached // self._block_size
        return lease


@mutant(CachingSuite, "test_uncommitted_blocks_are_free_after_release", HISTORIES)
class KeepsRejectedDrafts(Prefix):
    """Does not give back blocks that were reserved and never committed."""

    def release(self, lease: Lease) -> None:
        worthless = lease.blocks[0][len(self._keys_of.get(id(lease), ())) :]
        super().release(lease)
        for _ in worthless:
            self._free._stack.pop()


@mutant(CachingSuite, "test_another_chain_is_not_found", HISTORIES)
class LastKeyOnly(Prefix):
    """Knows a block by a part of its key, which chains with other beginnings share."""

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        return len(keys) if keys and self._block_of else 0


@mutant(CachingSuite, HISTORIES)
class LooksAndTakes(Prefix):
    """Makes a prefix that is only looked for unevictable."""

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        found = super().match_prefix(keys)
        for key in keys[:found]:
            self._cached.pop(self._block_of[key], None)
        return found


@mutant(CachingSuite, HISTORIES)
class OneListForAll(Prefix):
    """Hands out the list of a prefix's blocks that it keeps, so that leases grow into each other."""

    def __init__(self, config: KVAllocatorConfig, context: Any) -> None:
        super().__init__(config, context)
        self._lists: dict[tuple[bytes, ...], list[int]] = {}

    def open(self, request_id: str, keys: Sequence[bytes], max_tokens: int) -> Lease:
        lease = super().open(request_id, keys, max_tokens)
        hit = tuple(keys[: lease.num_cached // self._block_size])
        kept = self._lists.setdefault(hit, lease.blocks[0])
        if hit and kept[: len(hit)] == lease.blocks[0]:
            lease.blocks = (kept,) * len(lease.blocks)
        return lease


@mutant(CachingSuite, "test_idle_prefixes_give_way_to_whoever_needs_their_memory")
class SkipsGaps(Prefix):
    """Counts the blocks of a chain that are there, also those behind one that is gone."""

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        return sum(key in self._block_of for key in keys)

    def open(self, request_id: str, keys: Sequence[bytes], max_tokens: int) -> Lease:
        return super().open(request_id, [key for key in keys if key in self._block_of], max_tokens)

    def _evict(self, count: int) -> None:
        self._cached = type(self._cached).fromkeys(sorted(self._cached))
        super()._evict(count)


@mutant(CachingSuite, HISTORIES)
class ForgetsToCountAHit(Prefix):
    """Says of a hit that its tokens are not committed yet."""

    def open(self, request_id: str, keys: Sequence[bytes], max_tokens: int) -> Lease:
        lease = super().open(request_id, keys, max_tokens)
        lease.num_committed = 0
        return lease
