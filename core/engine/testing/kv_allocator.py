"""Conformance suite of the slot ``kv_allocator``. Subclass it in a test file and say how to build yours.

.. code-block:: python

    class TestMine(KVAllocatorConformance):
        def make(self, block_size):
            return Mine(KVAllocatorConfig(block_size=block_size), build_context(block_size))

The heart of it is a state machine: random sequences of calls against a model that writes into an imaginary cache,
so that a block handed to two owners, freed too early or found under a wrong key shows as a wrong token. Which idle
prefix is evicted first is the plugin's affair: oldest, least recently used, at random.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from engine.contracts.kv_allocator import BlockUsage, KVAllocator, KVGroup, Lease

GROUPS = (
    KVGroup(group_id=0, layers=(0, 2), kind="full", block_bytes=64),
    KVGroup(group_id=1, layers=(1, 3), kind="window", block_bytes=32, window=16),
)
BLOCK = 8
"""Block size of the state machine, in tokens."""


def keys_of(tokens: list[int], block_size: int = BLOCK) -> list[bytes]:
    """One key per full block; equal keys mean that all tokens up to the block's end are equal."""
    ends = range(block_size, len(tokens) + 1, block_size)
    return [sha256(repr(tokens[:end]).encode()).digest() for end in ends]


class Owner:
    """A request in the model: its tokens and how many of them it has written to the imaginary cache."""

    def __init__(self, lease: Lease, tokens: list[int], max_tokens: int, forgotten: int) -> None:
        self.lease = lease
        self.forgotten = forgotten
        """How often the allocator had forgotten prefixes when the lease began."""
        self.tokens = tokens
        self.max_tokens = max_tokens
        self.written = lease.num_cached
        self.open = True


class AllocatorMachine(RuleBasedStateMachine):
    """Random calls on an allocator, checked against an imaginary cache and by the contract's own equations."""

    make: Callable[[int], KVAllocator]
    """Set on a subclass by :meth:`KVAllocatorConformance.test_random_histories_keep_the_contract`."""
    owners = Bundle("owners")

    @initialize(num_blocks=st.integers(min_value=2, max_value=24), groups=st.integers(1, 2))
    def build(self, num_blocks: int, groups: int) -> None:
        self.allocator = self.make(BLOCK)
        self.groups = GROUPS[:groups]
        self.allocator.start(self.groups, num_blocks)
        self.num_blocks = num_blocks
        self.memory: dict[tuple[int, int], list[int | None]] = {}  # (group, block) -> tokens
        self.live: list[Owner] = []
        self.serial = 0
        self.forgotten = 0

    @rule(
        target=owners,
        # Few different prompts, so that prefixes are shared often.
        flavour=st.integers(0, 1),
        length=st.integers(1, 5 * BLOCK),
        more=st.integers(0, 3 * BLOCK),
    )
    def open(self, flavour: int, length: int, more: int) -> Any:
        # No two places hold the same: a block that is found for another position shows.
        tokens = [1000 * (flavour if position >= 2 * BLOCK else 7) + position for position in range(length)]
        keys = keys_of(tokens)[: (length - 1) // BLOCK] if self.allocator.caches_prefixes else []
        before = self.allocator.usage()
        hit = self.allocator.match_prefix(keys)
        assert self.allocator.usage() == before, "looking for a prefix changed something"
        self.serial += 1
        lease = self.allocator.open(f"r{self.serial}", keys, length + more)
        if lease is None:
            assert self.allocator.usage() == before, "a refused open changed something"
            assert before.leased or length + more > before.total * BLOCK, "an empty pool refused a lease"
            return multiple()
        assert lease.num_cached == lease.num_committed == hit * BLOCK
        assert lease.request_id == f"r{self.serial}"
        assert len(lease.blocks) == len(self.groups)
        owner = Owner(lease, tokens, length + more, self.forgotten)
        self._expect_content(owner, lease.num_cached)
        self.live.append(owner)
        return owner

    @rule(owner=owners, count=st.integers(1, 3 * BLOCK))
    def compute_some(self, owner: Owner, count: int) -> None:
        self.compute(owner, count)

    @rule(owner=owners, count=st.integers(BLOCK, 5 * BLOCK))
    def compute_and_commit(self, owner: Owner, count: int) -> None:
        """The common case, often enough that prefixes are found."""
        self.compute(owner, count)
        self.commit(owner, 0)

    def compute(self, owner: Owner, count: int) -> None:
        """Reserve room and write tokens, as a step does."""
        upto = min(owner.written + count, len(owner.tokens), owner.max_tokens)
        if not owner.open or upto <= owner.written:
            return
        before = self.allocator.usage()
        held = len(owner.lease.blocks[0])
        needed = self.allocator.blocks_needed(owner.lease, upto, owner.max_tokens)
        if not self.allocator.reserve(owner.lease, upto):
            assert needed > before.available, f"{needed} blocks refused with {before.available} available"
            assert self.allocator.usage() == before and len(owner.lease.blocks[0]) == held
            return
        after = self.allocator.usage()
        assert before.available - after.available == needed
        self.forgotten += after.cached < before.cached
        for position in range(owner.written, upto):
            for group, blocks in enumerate(owner.lease.blocks):
                page = self.memory.setdefault((group, blocks[position // BLOCK]), [None] * BLOCK)
                page[position % BLOCK] = owner.tokens[position]
        owner.written = upto

    @rule(owner=owners, back=st.integers(0, BLOCK))
    def commit_some(self, owner: Owner, back: int) -> None:
        self.commit(owner, back)

    def commit(self, owner: Owner, back: int) -> None:
        """Commit what was written, less ``back`` tokens (as if drafts had been rejected)."""
        upto = max(owner.lease.num_committed, owner.written - back)
        if not owner.open:
            return
        keys = keys_of(owner.tokens[:upto]) if self.allocator.caches_prefixes else []
        before = self.allocator.usage()
        self.allocator.commit(owner.lease, upto, keys)
        assert owner.lease.num_committed == upto
        assert self.allocator.usage() == before, "a commit moves no blocks"
        owner.written = upto
        # A copy of a prefix that another lease committed first is not found again once that one is evicted.
        if keys and owner.forgotten == self.forgotten:
            assert self.allocator.match_prefix(keys) == len(keys), "a committed prefix cannot be found"

    @rule(owner=owners, num_tokens=st.integers(0, 6 * BLOCK))
    def ask(self, owner: Owner, num_tokens: int) -> None:
        """What a scheduler does with requests that it then leaves out."""
        if owner.open:
            before = self.allocator.usage()
            num_tokens = min(num_tokens, owner.max_tokens)
            needed = self.allocator.blocks_needed(owner.lease, num_tokens, owner.max_tokens)
            assert needed >= 0 and self.allocator.usage() == before
            if num_tokens <= len(owner.lease.blocks[0]) * BLOCK:
                assert needed == 0, f"{needed} blocks for {num_tokens} tokens of {owner.lease}"

    @rule(owner=owners, count=st.integers(1, 2 * BLOCK), token=st.integers(0, 2))
    def sample(self, owner: Owner, count: int, token: int) -> None:
        """The request gets more tokens."""
        owner.tokens.extend(1000 * token + len(owner.tokens) + i for i in range(count))

    @rule(owner=consumes(owners), twice=st.booleans())
    def release(self, owner: Owner, twice: bool) -> None:
        self.allocator.release(owner.lease)
        if owner.open:
            self.live.remove(owner)
        owner.open = False
        if twice:
            before = self.allocator.usage()
            self.allocator.release(owner.lease)
            assert self.allocator.usage() == before, "the second release of a lease did something"

    @rule()
    def reset_cache(self) -> None:
        self.allocator.reset_cache()
        self.forgotten += 1
        assert self.allocator.usage().cached == 0

    @invariant()
    def blocks_add_up(self) -> None:
        usage = self.allocator.usage()
        leased = {block for owner in self.live for block in owner.lease.blocks[0]}
        assert usage.total == self.num_blocks - 1
        assert usage.free + usage.cached + usage.leased == usage.total
        assert min(usage.free, usage.cached) >= 0
        assert self.allocator.caches_prefixes or usage.cached == 0, "nothing is cached"
        assert usage.leased == len(leased), f"{usage.leased} leased, but leases hold {len(leased)} blocks"
        assert all(0 < block < self.num_blocks for block in leased)
        check = getattr(self.allocator, "check", None)
        if check is not None:
            check()

    @invariant()
    def nobody_lost_a_token(self) -> None:
        for owner in self.live:
            self._expect_content(owner, owner.written)

    def teardown(self) -> None:
        if not hasattr(self, "live"):
            return
        for owner in self.live:
            self.allocator.release(owner.lease)
        usage = self.allocator.usage()
        assert usage.leased == 0 and usage.available == usage.total, f"blocks leaked: {usage}"

    def _expect_content(self, owner: Owner, upto: int) -> None:
        for group, blocks in enumerate(owner.lease.blocks):
            for start in range(0, upto, BLOCK):
                wanted = owner.tokens[start : min(start + BLOCK, upto)]
                found = self.memory[group, blocks[start // BLOCK]][: len(wanted)]
                assert found == wanted, f"{owner.lease} holds {found} at {start}, expected {wanted}"


class KVAllocatorConformance(ABC):
    """Tests every KV allocator passes."""

    num_examples = 100
    """Random histories tried by the state machine."""

    @abstractmethod
    def make(self, block_size: int) -> KVAllocator:
        """A fresh allocator for blocks of ``block_size`` tokens; :meth:`KVAllocator.start` is not called yet."""

    def started(self, num_blocks: int = 17, block_size: int = BLOCK) -> KVAllocator:
        allocator = self.make(block_size)
        allocator.start(GROUPS, num_blocks)
        return allocator

    def test_fulfils_the_protocol(self) -> None:
        allocator = self.started()
        assert isinstance(allocator, KVAllocator)
        lease, usage = allocator.open("r", [], 2 * BLOCK), allocator.usage()
        assert isinstance(lease, Lease), f"open() returned {lease!r:.60}, expected a Lease"
        assert isinstance(usage, BlockUsage), f"usage() returned {usage!r:.60}, expected a BlockUsage"
        reserved = allocator.reserve(lease, BLOCK)
        assert reserved is True, f"reserve() returned {reserved!r}, expected True"

    def test_block_zero_is_never_handed_out(self) -> None:
        allocator = self.started(num_blocks=5)
        lease = allocator.open("all", [], 4 * BLOCK)
        assert lease is not None and allocator.reserve(lease, 4 * BLOCK)
        for blocks in lease.blocks:
            assert sorted(blocks) == [1, 2, 3, 4]

    def test_reserve_beyond_the_pool_is_refused_and_changes_nothing(self) -> None:
        allocator = self.started(num_blocks=3)
        lease = allocator.open("r", [], 2 * BLOCK)
        assert lease is not None
        before = (allocator.usage(), [list(blocks) for blocks in lease.blocks])
        assert not allocator.reserve(lease, 3 * BLOCK)
        assert (allocator.usage(), [list(blocks) for blocks in lease.blocks]) == before

    def test_a_block_holds_as_many_tokens_as_the_configuration_says(self) -> None:
        for block_size in (8, 16, 64):
            allocator = self.started(block_size=block_size)
            lease = allocator.open("r", [], 2 * block_size)
            assert lease is not None and allocator.reserve(lease, 2 * block_size)
            assert [len(blocks) for blocks in lease.blocks] == [2, 2], f"blocks of {block_size} tokens"

    def test_reserve_of_what_is_covered_changes_nothing(self) -> None:
        allocator = self.started()
        lease = allocator.open("r", [], 3 * BLOCK)
        assert lease is not None and allocator.reserve(lease, 3 * BLOCK)
        before = (allocator.usage(), [list(blocks) for blocks in lease.blocks])
        for num_tokens in (1, BLOCK, 3 * BLOCK):
            assert allocator.blocks_needed(lease, num_tokens, 3 * BLOCK) == 0
            assert allocator.reserve(lease, num_tokens)
            assert (allocator.usage(), [list(blocks) for blocks in lease.blocks]) == before

    def test_blocks_needed_for_a_new_lease_is_what_it_takes(self) -> None:
        allocator = self.started()
        needed = allocator.blocks_needed(None, 3 * BLOCK, 5 * BLOCK)
        before = allocator.usage().available
        lease = allocator.open("r", [], 5 * BLOCK)
        assert lease is not None and allocator.reserve(lease, 3 * BLOCK)
        assert before - allocator.usage().available == needed

    def test_a_released_lease_leaves_everything_available(self) -> None:
        allocator = self.started()
        for turn in range(3):
            lease = allocator.open(f"r{turn}", [], 5 * BLOCK)
            assert lease is not None and allocator.reserve(lease, 5 * BLOCK)
            tokens = list(range(5 * BLOCK))
            allocator.commit(lease, 5 * BLOCK, keys_of(tokens) if allocator.caches_prefixes else [])
            allocator.release(lease)
            assert allocator.usage().available == allocator.usage().total

    def test_a_request_may_start_again_before_its_old_lease_ends(self) -> None:
        allocator = self.started()
        old = allocator.open("r", [], 4 * BLOCK)
        new = allocator.open("r", [], 4 * BLOCK)
        assert old is not None and new is not None
        assert allocator.reserve(old, 2 * BLOCK) and allocator.reserve(new, 2 * BLOCK)
        kept = list(new.blocks[0])
        allocator.release(old)
        assert new.blocks[0] == kept
        assert allocator.usage().leased == len(kept)
        allocator.release(new)
        assert allocator.usage().leased == 0

    def test_random_histories_keep_the_contract(self) -> None:
        suite = self

        class Machine(AllocatorMachine):
            def make(self, block_size: int) -> KVAllocator:
                return suite.make(block_size)

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=self.num_examples,
                stateful_step_count=40,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


class PrefixCachingConformance(KVAllocatorConformance):
    """Further tests of allocators whose ``caches_prefixes`` is true."""

    def filled(self, allocator: KVAllocator, name: str, tokens: list[int], commit: bool = True) -> Lease:
        """A lease with all of ``tokens`` computed."""
        keys = keys_of(tokens)
        lease = allocator.open(name, keys[: (len(tokens) - 1) // BLOCK], len(tokens))
        assert lease is not None and allocator.reserve(lease, len(tokens))
        if commit:
            allocator.commit(lease, len(tokens), keys)
        return lease

    def test_says_that_it_caches(self) -> None:
        assert self.make(BLOCK).caches_prefixes

    def test_nothing_is_found_before_it_is_committed(self) -> None:
        allocator, tokens = self.started(), list(range(4 * BLOCK))
        lease = self.filled(allocator, "a", tokens, commit=False)
        assert allocator.match_prefix(keys_of(tokens)) == 0
        allocator.commit(lease, 2 * BLOCK + 3, keys_of(tokens))
        assert allocator.match_prefix(keys_of(tokens)) == 2

    def test_a_hit_takes_over_the_same_blocks_in_every_group(self) -> None:
        allocator, tokens = self.started(), list(range(4 * BLOCK))
        first = self.filled(allocator, "a", tokens)
        second = allocator.open("b", keys_of(tokens)[:3], 5 * BLOCK)
        assert second is not None and second.num_cached == second.num_committed == 3 * BLOCK
        for theirs, ours in zip(first.blocks, second.blocks):
            assert ours == theirs[:3]
        assert allocator.usage().leased == 4

    def test_an_idle_prefix_that_is_leased_again_cannot_be_evicted(self) -> None:
        allocator, tokens = self.started(num_blocks=5), list(range(3 * BLOCK))
        allocator.release(self.filled(allocator, "a", tokens))
        assert allocator.usage().cached == 3
        lease = allocator.open("b", keys_of(tokens)[:2], 3 * BLOCK)
        assert lease is not None
        usage = allocator.usage()
        assert (usage.free, usage.cached, usage.leased) == (1, 1, 2)
        hungry = allocator.open("c", [], 3 * BLOCK)
        assert hungry is not None and not allocator.reserve(hungry, 3 * BLOCK)

    def test_another_chain_is_not_found(self) -> None:
        allocator, tokens = self.started(), list(range(4 * BLOCK))
        self.filled(allocator, "a", tokens)
        assert allocator.match_prefix(keys_of([99, *tokens[1:]])) == 0

    def test_uncommitted_blocks_are_free_after_release(self) -> None:
        allocator, tokens = self.started(), list(range(4 * BLOCK))
        lease = self.filled(allocator, "a", tokens, commit=False)
        allocator.commit(lease, BLOCK + 1, keys_of(tokens))
        allocator.release(lease)
        assert (allocator.usage().cached, allocator.usage().free) == (1, 15)

    def test_idle_prefixes_give_way_to_whoever_needs_their_memory(self) -> None:
        """Whichever goes first: what is still found is still there, and what is gone is not found."""
        for taken in (3, 5, 8):
            allocator = self.started(num_blocks=9)
            chains = [list(range(start, start + 4 * BLOCK)) for start in (0, 100)]
            held = []
            for name, tokens in zip("ab", chains):
                filled = self.filled(allocator, name, tokens)
                held.append(list(filled.blocks[0]))
                allocator.release(filled)
            assert (allocator.usage().cached, allocator.usage().free) == (8, 0)
            lease = allocator.open("next", [], taken * BLOCK)
            assert lease is not None and allocator.reserve(lease, taken * BLOCK)
            assert (allocator.usage().cached, allocator.usage().leased) == (8 - taken, taken)
            for tokens, blocks in zip(chains, held, strict=True):
                found = allocator.match_prefix(keys_of(tokens))
                again = allocator.open("again", keys_of(tokens), 4 * BLOCK)
                assert again is not None and again.num_cached == found * BLOCK
                assert again.blocks[0] == blocks[:found], "a block is found for other tokens than it holds"
                assert not set(again.blocks[0]) & set(lease.blocks[0]), "a prefix is found in blocks that are in use"
            assert sum(allocator.match_prefix(keys_of(tokens)) for tokens in chains) <= 8 - taken

    def test_a_block_in_use_is_never_evicted(self) -> None:
        allocator, tokens = self.started(num_blocks=5), list(range(2 * BLOCK))
        self.filled(allocator, "holder", tokens)
        lease = allocator.open("hungry", [], 4 * BLOCK)
        assert lease is not None and not allocator.reserve(lease, 3 * BLOCK)
        assert allocator.reserve(lease, 2 * BLOCK)
        assert allocator.match_prefix(keys_of(tokens)) == 2

    def test_two_who_compute_the_same_keep_their_own_blocks(self) -> None:
        allocator, tokens = self.started(), list(range(2 * BLOCK))
        a = self.filled(allocator, "a", tokens, commit=False)
        b = self.filled(allocator, "b", tokens, commit=False)
        for lease in (a, b):
            allocator.commit(lease, 2 * BLOCK, keys_of(tokens))
        assert not set(a.blocks[0]) & set(b.blocks[0])
        allocator.release(a)
        allocator.release(b)
        assert (allocator.usage().cached, allocator.match_prefix(keys_of(tokens))) == (2, 2)

    def test_reset_forgets_everything_that_nobody_holds(self) -> None:
        allocator = self.started()
        held, idle = list(range(2 * BLOCK)), list(range(50, 50 + 2 * BLOCK))
        self.filled(allocator, "held", held)
        allocator.release(self.filled(allocator, "idle", idle))
        allocator.reset_cache()
        assert allocator.match_prefix(keys_of(idle)) == 0
        assert allocator.match_prefix(keys_of(held)) == 2
