"""Allocators with a bug each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.contracts.config import KVAllocatorConfig
from engine.contracts.kv_allocator import BlockUsage, KVGroup, Lease, Prefix
from engine.testing.context import build_context
from engine.testing.kv_allocator import BLOCK, KVAllocatorConformance, PartialBlockConformance
from engine_plugins.kv_allocator.block_pool import blocks_for, take_out
from engine_plugins.kv_allocator.contiguous import ContiguousAllocator
from engine_plugins.kv_allocator.paged import PagedAllocator
from engine_plugins.kv_allocator.prefix_cache import CachedBlocks, PrefixCacheAllocator, tokens_of
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
    """Without checks of its own. ``Blocks``: what the blocks of a group are kept by."""

    check = None  # type: ignore[assignment]
    Blocks = CachedBlocks

    def start(self, groups: Sequence[KVGroup]) -> None:
        super().start(groups)
        for pool in self._pools:
            pool.__class__ = self.Blocks


class Contiguous(ContiguousAllocator):
    """Without checks of its own."""

    check = None  # type: ignore[assignment]


@mutant(Suite, "test_block_zero_is_never_handed_out", HISTORIES)
class HandsOutBlockZero(Paged):
    """Counts blocks from 0: a request writes where padding rows write."""

    def start(self, groups: Sequence[KVGroup]) -> None:
        super().start(groups)
        for group, free in zip(groups, self._free, strict=True):
            free._stack = list(range(group.num_blocks - 2, -1, -1))


@mutant(Suite, "test_reserve_beyond_the_pool_is_refused_and_changes_nothing", HISTORIES)
class LeaksOnARefusal(Paged):
    """Takes what there is before it finds that it is not enough."""

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        needed = self.blocks_needed(lease, num_tokens, num_tokens)
        for blocks, free, count in zip(lease.blocks, self._free, needed, strict=True):
            blocks.extend(free.take(min(count, len(free))))
        return min(map(len, lease.blocks)) >= blocks_for(num_tokens, self._block_size)


@mutant(Suite, HISTORIES)
class FreesTwice(Paged):
    """Gives the blocks of a lease back at every release."""

    def release(self, lease: Lease) -> None:
        held = [list(blocks) for blocks in lease.blocks]
        super().release(lease)
        for blocks, before in zip(lease.blocks, held, strict=True):
            blocks.extend(before)
        if any(held):
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

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> tuple[int, ...]:
        held = [len(blocks) for blocks in lease.blocks] if lease else [0] * len(self._groups)
        return tuple(max(0, num_tokens // self._block_size + 1 - count) for count in held)


@mutant(Suite, HISTORIES, raises=IndexError)
class OneBlockLess(Paged):
    """Rounds a number of tokens down: the last tokens have no block."""

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> tuple[int, ...]:
        held = [len(blocks) for blocks in lease.blocks] if lease else [0] * len(self._groups)
        return tuple(max(0, num_tokens // self._block_size - count) for count in held)


@mutant(Suite, "test_a_block_holds_as_many_tokens_as_the_configuration_says")
class SixteenTokensABlock(Paged):
    """Takes every block for one of 16 tokens."""

    def __init__(self, config: KVAllocatorConfig, context: Any) -> None:
        super().__init__(config, context)
        self._block_size = 16


@mutant(Suite, "test_reserve_of_what_is_covered_changes_nothing", HISTORIES)
class NegativeNeed(Paged):
    """Says that a lease which holds more than is asked for needs fewer than no blocks."""

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> tuple[int, ...]:
        held = [len(blocks) for blocks in lease.blocks] if lease else [0] * len(self._groups)
        return tuple(blocks_for(num_tokens, self._block_size) - count for count in held)

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        return max(self.blocks_needed(lease, num_tokens, num_tokens)) <= 0 or super().reserve(lease, num_tokens)


@mutant(Suite, "test_block_zero_is_never_handed_out", HISTORIES)
class FirstGroupOnly(Paged):
    """Gives blocks to the first KV group alone."""

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        held = [list(blocks) for blocks in lease.blocks]
        reserved = super().reserve(lease, num_tokens)
        for blocks, before, free in list(zip(lease.blocks, held, self._free, strict=True))[1:]:
            free.give(blocks[len(before) :])
            del blocks[len(before) :]
        return reserved


@mutant(Suite, "test_each_group_has_as_many_blocks_as_it_is_given", HISTORIES)
class OneIdForAllGroups(Paged):
    """Takes a block id for a block of every KV group, as if all had as many."""

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        needed = self.blocks_needed(lease, num_tokens, num_tokens)[0]
        if needed > len(self._free[0]):
            return False
        taken = self._free[0].take(needed)
        for blocks in lease.blocks:
            blocks.extend(taken)
        return True

    def usage(self) -> tuple[BlockUsage, ...]:
        return (super().usage()[0],) * len(self._groups)


@mutant(Suite, "test_each_group_has_as_many_blocks_as_it_is_given", HISTORIES)
class FirstGroupDecides(Paged):
    """Looks for room in the first KV group alone."""

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        needed = self.blocks_needed(lease, num_tokens, num_tokens)
        if needed[0] > len(self._free[0]):
            return False
        for blocks, free, count in zip(lease.blocks, self._free, needed, strict=True):
            blocks.extend(free.take(min(count, len(free))))
        return True


@mutant(Suite, "test_a_window_holds_no_more_blocks_than_it_needs", HISTORIES)
class KeepsWhatIsPassed(Paged):
    """Holds every block of a window until the request ends."""

    def commit(self, lease: Lease, prefix: Prefix) -> None:
        lease.num_committed = prefix.num_tokens


@mutant(Suite, HISTORIES)
class PassesTooEarly(Paged):
    """Takes a window for one of a block less."""

    def start(self, groups: Sequence[KVGroup]) -> None:
        super().start([replace(g, window=max(1, g.window - BLOCK)) if g.window else g for g in groups])


@mutant(Suite, HISTORIES)
class PassesTheReserved(Paged):
    """Frees what a window has passed as soon as room is made for tokens after it, before these are final."""

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        reserved = super().reserve(lease, num_tokens)
        if reserved:
            for group, free, blocks in zip(self._groups, self._free, lease.blocks, strict=True):
                places = [at for at in range(group.num_passed(num_tokens, self._block_size)) if blocks[at]]
                free.give(take_out(blocks, places))
        return reserved


@mutant(Suite, "test_blocks_needed_for_a_new_lease_is_what_it_takes")
class ForgetsThePromise(Contiguous):
    """Reserves a run for all that a request can need, and says that it needs blocks for what it has."""

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> tuple[int, ...]:
        return super().blocks_needed(lease, num_tokens, num_tokens)


@mutant(Suite, "test_a_window_holds_no_more_blocks_than_it_needs")
class RunsForWholeTexts(Contiguous):
    """Reserves blocks for all tokens of a request, also in a group that forgets them."""

    def _run_length(self, group: KVGroup, max_tokens: int) -> int:
        return blocks_for(max_tokens, self._block_size)


@mutant(Suite, HISTORIES)
class RefusesWithRoom(Contiguous):
    """Wants one free block more than a request can need."""

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease | None:
        if any(free.count <= blocks_for(max_tokens, self._block_size) for free in self._free):
            return None
        return super().open(request_id, prefix, max_tokens)


@mutant(CachingSuite, "test_nothing_is_found_before_it_is_committed")
class SharesTheUncommitted(Caching):
    """Publishes every block for which it was given a key, whether or not its tokens are final."""

    def commit(self, lease: Lease, prefix: Prefix) -> None:
        super().commit(lease, prefix)
        full = min(len(prefix.keys) - 1, len(lease.blocks[0]))
        self._publish(lease, Prefix(prefix.keys, prefix.tokens, full * BLOCK))


@mutant(CachingSuite, "test_a_hit_covers_no_more_than_it_may", HISTORIES)
class PublishesTheHalfFull(Caching):
    """Counts the block that is being filled as full."""

    def match_prefix(self, prefix: Prefix) -> int:
        up = Prefix(prefix.keys, prefix.tokens, min(len(prefix.tokens), -(-prefix.num_tokens // BLOCK) * BLOCK))
        return super().match_prefix(up)


@mutant(CachingSuite, "test_an_idle_prefix_that_is_leased_again_cannot_be_evicted", HISTORIES)
class EvictsTheLeased(Caching):
    """Leaves a block that is leased again among those that may be evicted."""

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease:
        idle = [list(pool._cached) for pool in self._pools]
        lease = super().open(request_id, prefix, max_tokens)
        for pool, before in zip(self._pools, idle, strict=True):
            for block in before:
                pool._cached.add(block, b"")
        return lease


@mutant(CachingSuite, "test_idle_prefixes_give_way_to_whoever_needs_their_memory", HISTORIES)
class FindsTheEvicted(Caching):
    """Forgets to take an evicted block's key out of its index."""

    class Blocks(CachedBlocks):
        __slots__ = ()

        def evict(self, count: int) -> None:
            victims = list(self._cached)[:count]
            contents = [self.index._content_of[block] for block in victims]
            super().evict(count)
            for block, content in zip(victims, contents, strict=True):
                self.index.add(block, *content)


@mutant(CachingSuite, HISTORIES)
class FreesTheShared(Caching):
    """Counts no leases: the first request that ends frees a prefix that others read."""

    def release(self, lease: Lease) -> None:
        for pool, blocks in zip(self._pools, lease.blocks, strict=True):
            for block in blocks:
                pool._num_leases_of[block] = 1
        super().release(lease)


@mutant(CachingSuite, "test_a_hit_takes_over_the_same_blocks_in_every_group", HISTORIES)
class CountsSharedTwice(Caching):
    """Counts a block of two leases as two leased blocks."""

    def usage(self) -> tuple[BlockUsage, ...]:
        counts = []
        for at, found in enumerate(super().usage()):
            leased = sum(len(lease.blocks[at]) for lease in self._leases)
            counts.append(BlockUsage(found.total, found.total - found.cached - leased, found.cached, leased))
        return tuple(counts)


@mutant(CachingSuite, "test_reset_forgets_everything_that_nobody_holds")
class ResetsTheLeased(Caching):
    """Forgets prefixes that leases hold when the cache is reset."""

    def reset_cache(self) -> None:
        super().reset_cache()
        for pool in self._pools:
            for block in list(pool.index._content_of):
                pool.index.remove(block)


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
        counts = [len(blocks) - -(-known.num_tokens // self._block_size) for blocks in lease.blocks]
        super().release(lease)
        for pool, count in zip(self._pools, counts, strict=True):
            for _ in range(count):
                pool.free._stack.pop()


@mutant(CachingSuite, "test_another_chain_is_not_found", HISTORIES)
class LastKeyOnly(Caching):
    """Knows a block by a part of its key, which chains with other beginnings share."""

    def match_prefix(self, prefix: Prefix) -> int:
        return prefix.num_tokens if prefix.keys and self._pools[0].index._content_of else 0


@mutant(CachingSuite, HISTORIES)
class LocksTheRetained(Caching):
    """Holds the blocks of a prefix that is retained."""

    def retain(self, prefix: Prefix, seconds: float) -> None:
        super().retain(prefix, seconds)
        for key in prefix.keys[1 : prefix.num_tokens // self._block_size + 1]:
            for pool in self._pools:
                if block := pool.index.find(key):
                    pool.hold(block)


@mutant(CachingSuite, HISTORIES)
class LooksAndTakes(Caching):
    """Makes a prefix that is only looked for unevictable."""

    def match_prefix(self, prefix: Prefix) -> int:
        for at in range(self._full_blocks(prefix)):
            for pool in self._pools:
                pool._cached.take(pool.index.find(prefix.keys[at + 1]) or 0)
        return super().match_prefix(prefix)


@mutant(CachingSuite, HISTORIES, raises=IndexError)
class OneListForAll(Caching):
    """Hands out the list of a prefix's blocks that it keeps, so that leases grow into each other."""

    def __init__(self, config: KVAllocatorConfig, context: Any) -> None:
        super().__init__(config, context)
        self._lists: dict[bytes, tuple[list[int], ...]] = {}

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease:
        lease = super().open(request_id, prefix, max_tokens)
        full = lease.num_cached // self._block_size
        if not full:
            return lease
        kept = self._lists.setdefault(prefix.keys[full], lease.blocks)
        if [blocks[:full] for blocks in kept] == list(lease.blocks):
            lease.blocks = kept
        return lease


@mutant(CachingSuite, "test_idle_prefixes_give_way_to_whoever_needs_their_memory")
class SkipsGaps(Caching):
    """Counts the blocks of a chain that are there, also those after one that is gone."""

    class Blocks(CachedBlocks):
        __slots__ = ()

        def evict(self, count: int) -> None:
            for block in sorted(self._cached):
                self._cached.add(block, self._cached.owner_of(block))
            super().evict(count)

    def match_prefix(self, prefix: Prefix) -> int:
        keys = prefix.keys[1 : prefix.num_tokens // self._block_size + 1]
        return self._block_size * sum(self._pools[0].index.find(key) is not None for key in keys)


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

    def _part(self, prefix: Prefix, full: int) -> tuple[tuple[int, ...], int]:
        sources, count = super()._part(prefix, full)
        partial = [pool.index.is_partial(block) for pool, block in zip(self._pools, sources, strict=False)]
        return (sources, count) if count and all(partial) else ((), 0)


@mutant(CachingSuite, "test_a_repeated_text_is_found_up_to_any_token", HISTORIES)
class SharesThePart(Caching):
    """Hands out the block itself where a copy of it is due: two requests write after the same tokens."""

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease:
        lease = super().open(request_id, prefix, max_tokens)
        for pool, blocks, source in zip(self._pools, lease.blocks, lease.copy_from or (), strict=False):
            pool._num_leases_of[blocks[-1]] = 0
            pool.free.give([blocks[-1]])
            pool.hold(source)
            blocks[-1] = source
        return lease


@mutant(CachingSuite, "test_a_block_is_not_evicted_for_its_own_copy", HISTORIES)
class EvictsTheSource(Caching):
    """Evicts the block that is to be copied, for its own copy."""

    class Blocks(CachedBlocks):
        __slots__ = ()

        def has_room_beside(self, source: int) -> bool:
            return self.available > 0

        def take_beside(self, source: int, prefix: Prefix) -> list[int]:
            return self.take(1)


@mutant(CachingSuite, HISTORIES)
class LeaksTheCopy(Caching):
    """Goes on holding what a copy was made from."""

    class Blocks(CachedBlocks):
        __slots__ = ()

        def take_beside(self, source: int, prefix: Prefix) -> list[int]:
            taken = super().take_beside(source, prefix)
            self._cached.take(source)
            return taken


@mutant(CachingSuite, "test_a_copy_that_was_never_made_is_found_by_nobody")
class TrustsTheCopy(Caching):
    """Lets a copy be found by others although its request ended before anything was computed."""

    class Blocks(CachedBlocks):
        __slots__ = ()

        def keep_part(self, block: int, prefix: Prefix, at: int) -> bool:
            tokens = tokens_of(prefix, at, self.block_size)
            held = [text for text, _ in self.index._after.get(prefix.keys[at], ())] if tokens else []
            return tokens not in held and super().keep_part(block, prefix, at)

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease:
        lease = super().open(request_id, prefix, max_tokens)
        self._committed[id(lease)] = Prefix(prefix.keys, prefix.tokens, lease.num_cached)
        return lease


@mutant(CachingSuite, "test_a_text_that_ended_within_a_block_is_found_as_far_as_it_was_committed")
class OneTokenTooMany(Caching):
    """Counts the token after the last committed one as final."""

    class Blocks(CachedBlocks):
        __slots__ = ()

        def keep_part(self, block: int, prefix: Prefix, at: int) -> bool:
            more = Prefix(prefix.keys, prefix.tokens, min(prefix.num_tokens + 1, len(prefix.tokens)))
            return super().keep_part(block, more if more.num_tokens // BLOCK == at else prefix, at)


@mutant(CachingSuite, "test_the_same_tokens_after_another_beginning_are_not_found")
class AnyParent(Caching):
    """Finds parts of blocks by their tokens alone, whatever is before them."""

    def _part(self, prefix: Prefix, full: int) -> tuple[tuple[int, ...], int]:
        tokens = tokens_of(prefix, full, BLOCK)
        if not prefix.keys or not tokens:
            return (), 0
        best = []
        for pool in self._pools:
            found = (pool.index.most_in_common(parent, tokens) for parent in pool.index._after)
            best.append(max(found, key=lambda match: match[1], default=(0, 0)))
        return tuple(block for block, _ in best), min(count for _, count in best)


@mutant(CachingSuite, "test_of_blocks_that_begin_alike_the_one_with_most_in_common_is_copied")
class FirstOfMany(Caching):
    """Copies any block that begins like a text, and not the one that does so for longest."""

    def _part(self, prefix: Prefix, full: int) -> tuple[tuple[int, ...], int]:
        tokens = tokens_of(prefix, full, BLOCK)
        for held, block in self._pools[0].index._after.get(prefix.keys[full], ()) if prefix.keys else ():
            same = [one == other for one, other in zip((*held, None), (*tokens, None))].index(False)
            if same:
                return (block,) * len(self._pools), same
        return (), 0


@mutant(CachingSuite, "test_requests_that_repeat_a_text_leave_one_copy_of_it")
class KeepsEveryPart(Caching):
    """Keeps the last block of every request, also where another one holds the same tokens."""

    class Blocks(CachedBlocks):
        __slots__ = ()

        def keep_part(self, block: int, prefix: Prefix, at: int) -> bool:
            kept, tokens = super().keep_part(block, prefix, at), tokens_of(prefix, at, self.block_size)
            if kept or not tokens:
                return kept
            self.index.add(block, prefix.keys[at], (*tokens, -1 - block), None)
            self._use(block, prefix)
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
            lease.copy_from = tuple(blocks[0] for blocks in lease.blocks)
        return lease


@mutant(CachingSuite, "test_a_hit_is_as_long_as_all_groups_allow")
class HitsOfTheFirstGroup(Caching):
    """Takes what is cached in the first KV group for cached in all."""

    def match_prefix(self, prefix: Prefix) -> int:
        found, at = self._pools[0].index.find, 0
        while at < prefix.num_tokens // BLOCK and prefix.keys and found(prefix.keys[at + 1]) is not None:
            at += 1
        return max(at * BLOCK, super().match_prefix(prefix))


@mutant(CachingSuite, "test_of_a_window_a_hit_needs_the_last_blocks_only")
class WantsWholeWindows(Caching):
    """Wants all blocks of a text in every group, also those that a window has passed."""

    def start(self, groups: Sequence[KVGroup]) -> None:
        super().start(groups)
        self._lasting = self._pools


@mutant(CachingSuite, "test_what_a_window_has_passed_is_found_until_it_is_evicted")
class ForgetsWhatIsPassed(Caching):
    """Frees what a window has passed, content and all."""

    def commit(self, lease: Lease, prefix: Prefix) -> None:
        super().commit(lease, prefix)
        for _, pool in self._forgetful:
            pool.evict_all()
