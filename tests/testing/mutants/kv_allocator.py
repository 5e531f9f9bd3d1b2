"""Allocators with a bug each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.contracts.config import KVAllocatorConfig
from engine.contracts.kv_allocator import BlockUsage, KVGroup, Lease, Prefix
from engine.testing.context import build_context
from engine.testing.kv_allocator import BLOCK, KVAllocatorConformance, PartialBlockConformance
from engine_plugins.kv_allocator.block_pool import blocks_for
from engine_plugins.kv_allocator.contiguous import ContiguousAllocator
from engine_plugins.kv_allocator.paged import PagedAllocator
from engine_plugins.kv_allocator.prefix_cache import PrefixCacheAllocator
from tests.testing.mutants.mutant import OnPlugin, mutant

HISTORIES = "test_random_histories_keep_the_contract"


class Suite(OnPlugin, KVAllocatorConformance):
    def make(self, block_size: int) -> Any:
        return self.plugin(KVAllocatorConfig(block_size=block_size), build_context(block_size))


class CachingSuite(OnPlugin, PartialBlockConformance):
    def make(self, block_size: int) -> Any:
        return self.plugin(KVAllocatorConfig(block_size=block_size), build_context(block_size))


class Paged(PagedAllocator):
    """Without checks of its own: the suite must see by itself what is wrong."""

    check = None  # type: ignore[assignment]


class Caching(PrefixCacheAllocator):
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

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease:
        self._lease_of[request_id] = super().open(request_id, prefix, max_tokens)
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

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease:
        lease = super().open(request_id, prefix, max_tokens)
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

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease | None:
        if self._free.count <= blocks_for(max_tokens, self._block_size):
            return None
        return super().open(request_id, prefix, max_tokens)


@mutant(CachingSuite, "test_nothing_is_found_before_it_is_committed")
class SharesTheUncommitted(Caching):
    """Publishes every block for which it was given a key, whether or not its tokens are final."""

    def commit(self, lease: Lease, prefix: Prefix) -> None:
        super().commit(lease, prefix)
        full = min(len(prefix.keys) - 1, len(lease.blocks[0]))
        everything = Prefix(prefix.keys, prefix.tokens, full * BLOCK)
        for at in range(full):
            if self._index.find(prefix.keys[at + 1]) is None:
                self._publish(lease.blocks[0][at], everything, at)
        self._committed[id(lease)] = everything


@mutant(CachingSuite, "test_a_hit_covers_no_more_than_it_may", HISTORIES)
class PublishesTheHalfFull(Caching):
    """Counts the block that is being filled as full."""

    def _tokens(self, prefix: Prefix, at: int) -> tuple[int, ...]:
        return tuple(prefix.tokens[at * BLOCK : (at + 1) * BLOCK])


@mutant(CachingSuite, "test_an_idle_prefix_that_is_leased_again_cannot_be_evicted", HISTORIES)
class EvictsTheLeased(Caching):
    """Leaves a block that is leased again among those that may be evicted."""

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease:
        idle = dict.fromkeys(self._cached)
        lease = super().open(request_id, prefix, max_tokens)
        self._cached.update(idle)
        return lease


@mutant(CachingSuite, "test_idle_prefixes_give_way_to_whoever_needs_their_memory", HISTORIES)
class FindsTheEvicted(Caching):
    """Forgets to take an evicted block's key out of its index."""

    def _evict(self, count: int) -> None:
        victims = list(self._cached)[:count]
        held = [(block, self._index._content_of[block]) for block in victims]
        super()._evict(count)
        for block, content in held:
            self._index.add(block, *content)


@mutant(CachingSuite, HISTORIES)
class FreesTheShared(Caching):
    """Counts no leases: the first request that ends frees a prefix that others read."""

    def release(self, lease: Lease) -> None:
        for block in lease.blocks[0]:
            self._num_leases_of[block] = 1
        super().release(lease)


@mutant(CachingSuite, "test_a_hit_takes_over_the_same_blocks_in_every_group", HISTORIES)
class CountsSharedTwice(Caching):
    """Counts a block of two leases as two leased blocks."""

    def usage(self) -> BlockUsage:
        found = super().usage()
        leased = sum(len(lease.blocks[0]) for lease in self._leases)
        return BlockUsage(found.total, found.total - found.cached - leased, found.cached, leased)


@mutant(CachingSuite, "test_reset_forgets_everything_that_nobody_holds")
class ResetsTheLeased(Caching):
    """Forgets prefixes that leases hold when the cache is reset."""

    def reset_cache(self) -> None:
        super().reset_cache()
        for block in list(self._index._content_of):
            self._index.remove(block)


@mutant(CachingSuite, HISTORIES)
class ResetForgetsNothing(Caching):
    """Does nothing when the cache is reset."""

    def reset_cache(self) -> None:
        pass


@mutant(CachingSuite, "test_a_hit_takes_over_the_same_blocks_in_every_group", HISTORIES)
class CountsBlocks(Caching):
    """Says in blocks how much of a prompt is cached, where tokens are meant."""

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease:
        lease = super().open(request_id, prefix, max_tokens)
        lease.num_cached = lease.num_committed = lease.num_cached // self._block_size
        return lease


@mutant(CachingSuite, "test_uncommitted_blocks_are_free_after_release", HISTORIES)
class KeepsRejectedDrafts(Caching):
    """Does not give back blocks that were reserved and never committed."""

    def release(self, lease: Lease) -> None:
        known = self._committed.get(id(lease), Prefix())
        worthless = lease.blocks[0][-(-known.num_tokens // self._block_size) :]
        super().release(lease)
        for _ in worthless:
            self._free._stack.pop()


@mutant(CachingSuite, "test_another_chain_is_not_found", HISTORIES)
class LastKeyOnly(Caching):
    """Knows a block by a part of its key, which chains with other beginnings share."""

    def match_prefix(self, prefix: Prefix) -> int:
        return prefix.num_tokens if prefix.keys and self._index._content_of else 0


@mutant(CachingSuite, HISTORIES)
class LooksAndTakes(Caching):
    """Makes a prefix that is only looked for unevictable."""

    def match_prefix(self, prefix: Prefix) -> int:
        for block in self._full_blocks(prefix):
            self._cached.pop(block, None)
        return super().match_prefix(prefix)


@mutant(CachingSuite, HISTORIES)
class OneListForAll(Caching):
    """Hands out the list of a prefix's blocks that it keeps, so that leases grow into each other."""

    def __init__(self, config: KVAllocatorConfig, context: Any) -> None:
        super().__init__(config, context)
        self._lists: dict[bytes, list[int]] = {}

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease:
        lease = super().open(request_id, prefix, max_tokens)
        full = lease.num_cached // self._block_size
        if not full:
            return lease
        kept = self._lists.setdefault(prefix.keys[full], lease.blocks[0])
        if kept[:full] == lease.blocks[0]:
            lease.blocks = (kept,) * len(lease.blocks)
        return lease


@mutant(CachingSuite, "test_idle_prefixes_give_way_to_whoever_needs_their_memory")
class SkipsGaps(Caching):
    """Counts the blocks of a chain that are there, also those behind one that is gone."""

    def _full_blocks(self, prefix: Prefix) -> list[int]:
        found = [self._index.find(key) for key in prefix.keys[1 : prefix.num_tokens // self._block_size + 1]]
        return [block for block in found if block is not None]

    def _evict(self, count: int) -> None:
        self._cached = type(self._cached).fromkeys(sorted(self._cached))
        super()._evict(count)


@mutant(CachingSuite, HISTORIES)
class ForgetsToCountAHit(Caching):
    """Says of a hit that its tokens are not committed yet."""

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease:
        lease = super().open(request_id, prefix, max_tokens)
        lease.num_committed = 0
        return lease


@mutant(CachingSuite, "test_a_repeated_text_is_found_up_to_any_token")
class WholeBlocksOnly(Caching):
    """Copies where a text ended within a block, and never a part of a full block."""

    def _part(self, prefix: Prefix, num_full: int) -> tuple[int, int]:
        source, count = super()._part(prefix, num_full)
        return (source, count) if count and self._index.is_partial(source) else (0, 0)


@mutant(CachingSuite, "test_a_repeated_text_is_found_up_to_any_token", HISTORIES)
class SharesThePart(Caching):
    """Hands out the block itself where a copy of it is due: two requests write behind the same tokens."""

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease:
        lease = super().open(request_id, prefix, max_tokens)
        if lease.copy_from is not None:
            own, source = lease.blocks[0][-1], lease.copy_from[0]
            self._num_leases_of[own] = 0
            self._free.give([own])
            self._hold(source)
            lease.blocks[0][-1] = source
        return lease


@mutant(CachingSuite, "test_a_block_is_not_evicted_for_its_own_copy", HISTORIES)
class EvictsTheSource(Caching):
    """Evicts the block that is to be copied, for its own copy."""

    def _take_beside(self, source: int) -> list[int] | None:
        return self._take(1)


@mutant(CachingSuite, HISTORIES)
class LeaksTheCopy(Caching):
    """Goes on holding what a copy was made from."""

    def _take_beside(self, source: int) -> list[int] | None:
        taken = super()._take_beside(source)
        self._cached.pop(source, None)
        return taken


@mutant(CachingSuite, "test_a_copy_that_was_never_made_is_found_by_nobody")
class TrustsTheCopy(Caching):
    """Lets a copy be found by others although its request ended before anything was computed."""

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease:
        lease = super().open(request_id, prefix, max_tokens)
        self._committed[id(lease)] = Prefix(prefix.keys, prefix.tokens, lease.num_cached)
        return lease

    def _keep_part(self, prefix: Prefix, blocks: Sequence[int], full: int) -> bool:
        tokens = self._tokens(prefix, full)
        held = [text for text, _ in self._index._behind.get(prefix.keys[full], ())] if tokens else []
        return tokens not in held and super()._keep_part(prefix, blocks, full)


@mutant(CachingSuite, "test_a_text_that_ended_within_a_block_is_found_as_far_as_it_was_committed", HISTORIES)
class OneTokenTooMany(Caching):
    """Counts the token behind the last committed one as final."""

    def _keep_part(self, prefix: Prefix, blocks: Sequence[int], full: int) -> bool:
        more = Prefix(prefix.keys, prefix.tokens, min(prefix.num_tokens + 1, len(prefix.tokens)))
        return super()._keep_part(more if more.num_tokens // BLOCK == full else prefix, blocks, full)


@mutant(CachingSuite, "test_the_same_tokens_behind_another_beginning_are_not_found")
class AnyParent(Caching):
    """Finds parts of blocks by their tokens alone, whatever is before them."""

    def _part(self, prefix: Prefix, num_full: int) -> tuple[int, int]:
        tokens = self._tokens(prefix, num_full)
        found = (self._index.most_in_common(parent, tokens) for parent in self._index._behind)
        return max(found, key=lambda match: match[1], default=(0, 0)) if prefix.keys and tokens else (0, 0)


@mutant(CachingSuite, "test_of_blocks_that_begin_alike_the_one_with_most_in_common_is_copied")
class FirstOfMany(Caching):
    """Copies any block that begins like a text, and not the one that does so for longest."""

    def _part(self, prefix: Prefix, num_full: int) -> tuple[int, int]:
        tokens = self._tokens(prefix, num_full)
        for held, block in self._index._behind.get(prefix.keys[num_full], ()) if prefix.keys else ():
            same = [one == other for one, other in zip((*held, None), (*tokens, None))].index(False)
            if same:
                return block, same
        return 0, 0


@mutant(CachingSuite, "test_requests_that_repeat_a_text_leave_one_copy_of_it")
class KeepsEveryPart(Caching):
    """Keeps the last block of every request, also where another one holds the same tokens."""

    def _keep_part(self, prefix: Prefix, blocks: Sequence[int], full: int) -> bool:
        kept = super()._keep_part(prefix, blocks, full)
        tokens = self._tokens(prefix, full)
        if kept or not tokens:
            return kept
        self._index.add(blocks[full], prefix.keys[full], (*tokens, -1 - blocks[full]), None)
        self._use(blocks[full])
        return True


@mutant(CachingSuite, "test_a_repeated_text_is_found_up_to_any_token", HISTORIES)
class CopiesForOneGroup(Caching):
    """Says what to copy in the first KV group alone."""

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease:
        lease = super().open(request_id, prefix, max_tokens)
        lease.copy_from = None if lease.copy_from is None else lease.copy_from[:1]
        return lease


@mutant(CachingSuite, HISTORIES)
class CopiesAlways(Caching):
    """Says what to copy also where a hit ends at a block's border."""

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease:
        lease = super().open(request_id, prefix, max_tokens)
        if lease.copy_from is None and lease.blocks[0]:
            lease.copy_from = (lease.blocks[0][0],) * len(lease.blocks)
        return lease
