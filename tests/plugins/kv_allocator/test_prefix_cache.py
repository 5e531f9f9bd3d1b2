from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from engine.contracts.config import KVAllocatorConfig
from engine.contracts.kv_allocator import KVGroup, Prefix
from engine.testing.context import build_context
from engine.testing.kv_allocator import BLOCK, PartialBlockConformance, anonymous, prefix_of
from engine.testing.simulation import VirtualClock
from engine_plugins.kv_allocator.prefix_cache import PrefixCacheAllocator


def make(block_size: int = BLOCK) -> PrefixCacheAllocator:
    return PrefixCacheAllocator(KVAllocatorConfig(block_size=block_size), build_context(block_size))


class TestPrefixCacheAllocator(PartialBlockConformance):
    def make(self, block_size: int) -> PrefixCacheAllocator:
        return make(block_size)


def started(num_blocks: int) -> PrefixCacheAllocator:
    allocator = make()
    allocator.start([KVGroup(0, (0,), "full", 64, num_blocks)])
    return allocator


def run_to_the_end(allocator: PrefixCacheAllocator, name: str, tokens: list[int]) -> None:
    lease = allocator.open(name, prefix_of(tokens, len(tokens) - 1), len(tokens))
    assert allocator.reserve(lease, len(tokens))
    allocator.commit(lease, prefix_of(tokens))
    allocator.release(lease)


def test_free_blocks_are_used_before_anything_is_evicted() -> None:
    allocator = started(9)
    tokens = list(range(4 * BLOCK))
    run_to_the_end(allocator, "a", tokens)
    lease = allocator.open("b", Prefix(), 4 * BLOCK)
    assert allocator.reserve(lease, 4 * BLOCK)
    assert allocator.match_prefix(prefix_of(tokens)) == 4 * BLOCK


def test_eviction_starts_at_the_tail_of_the_oldest_chain() -> None:
    allocator = started(9)
    old, new = list(range(4 * BLOCK)), list(range(100, 100 + 4 * BLOCK))
    run_to_the_end(allocator, "old", old)
    run_to_the_end(allocator, "new", new)
    lease = allocator.open("next", Prefix(), 3 * BLOCK)
    assert lease is not None and allocator.reserve(lease, 3 * BLOCK)
    assert allocator.match_prefix(prefix_of(old)) == BLOCK
    assert allocator.match_prefix(prefix_of(new)) == 4 * BLOCK


def test_using_a_prefix_again_makes_it_recent() -> None:
    allocator = started(9)
    a, b = list(range(4 * BLOCK)), list(range(100, 100 + 4 * BLOCK))
    run_to_the_end(allocator, "a", a)
    run_to_the_end(allocator, "b", b)
    run_to_the_end(allocator, "a again", a)
    lease = allocator.open("c", Prefix(), 4 * BLOCK)
    assert allocator.reserve(lease, 4 * BLOCK)
    assert (allocator.match_prefix(prefix_of(a)), allocator.match_prefix(prefix_of(b))) == (4 * BLOCK, 0)


def test_a_private_copy_takes_the_key_over_when_the_first_owner_is_gone() -> None:
    allocator = started(5)
    tokens = list(range(2 * BLOCK))
    first = allocator.open("first", Prefix(), 2 * BLOCK)
    copy = allocator.open("copy", Prefix(), 2 * BLOCK)
    for lease in (first, copy):
        assert allocator.reserve(lease, 2 * BLOCK)
        allocator.commit(lease, prefix_of(tokens))
    allocator.release(first)
    allocator.reset_cache()
    assert allocator.match_prefix(prefix_of(tokens)) == 0
    allocator.release(copy)
    assert allocator.match_prefix(prefix_of(tokens)) == 2 * BLOCK
    allocator.check()


def test_releasing_a_private_copy_makes_the_shared_block_recent() -> None:
    allocator = started(6)
    tokens, other = list(range(BLOCK)), list(range(100, 100 + BLOCK))
    first = allocator.open("first", Prefix(), BLOCK)
    copy = allocator.open("copy", Prefix(), BLOCK)
    for lease in (first, copy):
        assert allocator.reserve(lease, BLOCK)
        allocator.commit(lease, prefix_of(tokens))
    allocator.release(first)
    run_to_the_end(allocator, "other", other)
    allocator.release(copy)
    lease = allocator.open("next", Prefix(), 4 * BLOCK)
    assert allocator.reserve(lease, 4 * BLOCK)
    assert (allocator.match_prefix(prefix_of(tokens)), allocator.match_prefix(prefix_of(other))) == (BLOCK, 0)


def test_commit_without_keys_shares_nothing_until_keys_are_given() -> None:
    allocator = started(9)
    tokens = list(range(3 * BLOCK))
    lease = allocator.open("r", Prefix(), 3 * BLOCK)
    assert allocator.reserve(lease, 3 * BLOCK)
    allocator.commit(lease, anonymous(2 * BLOCK))
    assert allocator.match_prefix(prefix_of(tokens)) == 0
    allocator.commit(lease, prefix_of(tokens))
    assert allocator.match_prefix(prefix_of(tokens)) == 3 * BLOCK


def test_too_few_keys_are_refused() -> None:
    allocator = started(9)
    lease = allocator.open("r", Prefix(), 3 * BLOCK)
    assert allocator.reserve(lease, 3 * BLOCK)
    with pytest.raises(ValueError, match="request 'r': 2 keys, expected 4 for 3 full blocks"):
        allocator.commit(lease, prefix_of(list(range(BLOCK)), 3 * BLOCK))


def test_the_last_block_of_a_text_is_evicted_before_those_it_is_found_after() -> None:
    allocator = started(6)
    tokens = list(range(2 * BLOCK + 4))
    run_to_the_end(allocator, "r", tokens)
    lease = allocator.open("next", Prefix(), 5 * BLOCK)
    for blocks, found in ((2, 2 * BLOCK + 4), (3, 2 * BLOCK), (4, BLOCK), (5, 0)):
        assert allocator.reserve(lease, blocks * BLOCK)
        assert allocator.match_prefix(prefix_of(tokens)) == found


def test_a_block_that_another_one_holds_the_tokens_of_is_evicted_first() -> None:
    """A conversation goes on: the block in which its last turn ended is of no use beside the full one."""
    allocator = started(7)
    turn, other = list(range(BLOCK + 4)), list(range(100, 100 + BLOCK))
    run_to_the_end(allocator, "other", other)
    run_to_the_end(allocator, "turn", turn)
    run_to_the_end(allocator, "next turn", [*turn, *range(200, 200 + BLOCK)])
    assert allocator.usage()[0].cached == 5
    lease = allocator.open("newcomer", Prefix(), 2 * BLOCK)
    assert allocator.reserve(lease, 2 * BLOCK)
    assert allocator.match_prefix(prefix_of(turn)) == BLOCK + 4
    assert allocator.match_prefix(prefix_of(other)) == BLOCK


def test_a_block_that_is_copied_is_recent() -> None:
    allocator = started(9)
    a, b = list(range(BLOCK + 4)), list(range(100, 100 + BLOCK + 4))
    run_to_the_end(allocator, "a", a)
    run_to_the_end(allocator, "b", b)
    run_to_the_end(allocator, "a again", a)
    lease = allocator.open("c", Prefix(), 6 * BLOCK)
    assert allocator.reserve(lease, 6 * BLOCK)
    assert (allocator.match_prefix(prefix_of(a)), allocator.match_prefix(prefix_of(b))) == (BLOCK + 4, 0)


def tenants_prefix(tenant: int, tokens: list[int], num_tokens: int | None = None) -> Prefix:
    keys = prefix_of([tenant] * BLOCK + tokens).keys[1:]  # keys that no other tenant has
    return Prefix(keys, tokens, len(tokens) if num_tokens is None else num_tokens)


def test_a_thousand_retained_prefixes_of_a_tenant_cost_another_no_hit() -> None:
    def hits_of_another(retains: bool) -> tuple[list[int], int]:
        random, allocator = Random(5), started(65)
        texts = [[random.randrange(1000) for _ in range(random.randrange(1, 6) * BLOCK)] for _ in range(12)]
        found, mine = [], [1] * (3 * BLOCK)
        for number in range(1000):
            for tenant, tokens in ((1, [number] * (3 * BLOCK)), (2, random.choice(texts))):
                prefix = tenants_prefix(tenant, tokens)
                lease = allocator.open("r", tenants_prefix(tenant, tokens, len(tokens) - 1), len(tokens))
                if tenant == 2:
                    found.append(lease.num_cached)
                assert allocator.reserve(lease, len(tokens))
                allocator.commit(lease, prefix)
                if tenant == 1 and retains:
                    allocator.retain(prefix, 3600.0)
                allocator.release(lease)
        return found, allocator.match_prefix(tenants_prefix(1, mine))

    (plain, _), (beside, kept) = hits_of_another(False), hits_of_another(True)
    assert plain == beside and sum(plain) > 0 and kept == 0


def test_no_block_of_a_text_stays_without_those_before_it() -> None:
    clock = VirtualClock()
    allocator = PrefixCacheAllocator(KVAllocatorConfig(block_size=BLOCK), replace(build_context(BLOCK), clock=clock))
    allocator.start([KVGroup(0, (0,), "full", 64, 33)])
    random = Random(3)
    texts = [[kind] * (2 * BLOCK) + [number] * (number % 5 * BLOCK) for kind in range(2) for number in range(1, 9)]
    for number in range(400):
        clock.now += random.choice((1.0, 100.0))
        tokens = random.choice(texts)
        lease = allocator.open(str(number), prefix_of(tokens, len(tokens) - 1), len(tokens))
        assert allocator.reserve(lease, len(tokens))
        allocator.commit(lease, prefix_of(tokens))
        if random.random() < 0.5:
            allocator.retain(
                prefix_of(tokens, random.randrange(BLOCK, len(tokens) + 1)), random.choice((300.0, 3600.0))
            )
        allocator.release(lease)
        allocator.check()
        for text in texts:
            there = [allocator.has_block(0, key) for key in prefix_of(text).keys[1:]]
            assert there == sorted(there, reverse=True), f"a hole in {text} after {number} requests"
