"""Conformance suite of the slot ``kv_allocator``. Subclass it in a test file and say how to build yours.

.. code-block:: python

    class TestMine(KVAllocatorConformance):
        def make(self, block_size):
            return Mine(KVAllocatorConfig(block_size=block_size), build_context(block_size))

The heart of it is a state machine: random sequences of calls against a model that writes into an imaginary cache of one
or two KV groups, so that a block handed to two owners, freed too early, found under a wrong key or copied when it is
another's shows as a wrong token. Which idle prefix is evicted first is the plugin's affair: oldest, least recently
used, at random.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
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

from engine.contracts.kv_allocator import (
    BlockUsage,
    KVAllocator,
    KVGroup,
    Lease,
    Prefix,
    RetainingAllocator,
)
from engine.plugin_guard.calls import lacking
from engine.testing.subject import Subject, Suite, filled

BLOCK = 8
"""Block size of the state machine, in tokens."""
WINDOW = 2 * BLOCK
"""Tokens of the window of its second group."""
STEP = 3 * BLOCK
"""Most tokens that it computes before a commit, where they fill the window's blocks."""
WIDE = 1000
"""A window that passes nothing."""


def two_groups(
    num_blocks: int, window: int = WIDE, window_blocks: int | None = None, most_blocks: int | None = None
) -> tuple[KVGroup, KVGroup]:
    """A group that keeps every token, and one with a window, which has ``window_blocks`` blocks (``None``: as many)."""
    full = KVGroup(0, (0, 2), "full", 64, num_blocks)
    return full, KVGroup(1, (1, 3), "window", 32, window_blocks or num_blocks, window, most_blocks)


def alike(allocator: KVAllocator) -> BlockUsage:
    """Blocks by state, the same in all groups."""
    first, *others = allocator.usage()
    assert all(usage == first for usage in others), f"groups of equal blocks differ: {allocator.usage()}"
    return first


def prefix_of(tokens: list[int], num_tokens: int | None = None, block_size: int = BLOCK) -> Prefix:
    """The first ``num_tokens`` of ``tokens`` (``None``: all), with a key for each full block of all: equal keys mean
    that all tokens up to the block's end are equal."""
    ends = range(0, len(tokens) + 1, block_size)
    keys = [sha256(repr(tokens[:end]).encode()).digest() for end in ends]
    return Prefix(keys, tokens, len(tokens) if num_tokens is None else num_tokens)


def anonymous(num_tokens: int) -> Prefix:
    """So many tokens that share nothing."""
    return Prefix((), range(num_tokens), num_tokens)


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

    @initialize(
        num_blocks=st.integers(min_value=2, max_value=24),
        window_blocks=st.integers(min_value=2, max_value=16),
        groups=st.sampled_from(((0,), (0, 1), (1,))),
    )
    def build(self, num_blocks: int, window_blocks: int, groups: tuple[int, ...]) -> None:
        self.allocator = self.make(BLOCK)
        two = two_groups(num_blocks, WINDOW, window_blocks, most_blocks=-(-(WINDOW + STEP) // BLOCK) + 1)
        self.groups = tuple(replace(two[group], group_id=at) for at, group in enumerate(groups))
        self.allocator.start(self.groups)
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
        tokens = self.text(flavour, length)
        lease = self.open_lease(tokens, length + more)
        if lease is None:
            return multiple()
        for group, source in enumerate(lease.copy_from or ()):
            own = lease.blocks[group][lease.num_cached // BLOCK]
            assert own != source, f"{lease} copies block {own} to itself"
            assert own and source, f"{lease} copies block {source} to {own}: 0 is padding"
            self.memory[group, own] = list(self.memory.get((group, source), [None] * BLOCK))
        owner = Owner(lease, tokens, length + more, self.forgotten)
        self._expect_content(owner, lease.num_cached)
        self.live.append(owner)
        return owner

    @rule(flavour=st.integers(0, 1), length=st.integers(1, 5 * BLOCK))
    def open_in_vain(self, flavour: int, length: int) -> None:
        """A lease that is given back before anything was computed, or copied, for it."""
        lease = self.open_lease(self.text(flavour, length), length)
        if lease is not None:
            self.allocator.release(lease)

    def text(self, flavour: int, length: int) -> list[int]:
        """Texts part inside of the third block. No two places hold the same: a block that is found for another position
        shows."""
        return [1000 * (flavour if position >= 2 * BLOCK + 3 else 7) + position for position in range(length)]

    def open_lease(self, tokens: list[int], max_tokens: int) -> Lease | None:
        prefix = self.prefix(tokens, len(tokens) - 1)
        before = self.allocator.usage()
        hit = self.allocator.match_prefix(prefix)
        assert self.allocator.usage() == before, "looking for a prefix changed something"
        assert 0 <= hit <= prefix.num_tokens, f"{hit} of {prefix.num_tokens} tokens are cached"
        self.serial += 1
        lease = self.allocator.open(f"r{self.serial}", prefix, max_tokens)
        after = self.allocator.usage()
        if lease is None:
            assert after == before, "a refused open changed something"
            is_empty = not any(usage.leased for usage in before)
            assert not (is_empty and self.has_room(max_tokens)), "an empty pool refused a lease"
            return None
        assert lease.num_cached == lease.num_committed
        if lease.num_cached != hit:
            assert lease.num_cached == hit // BLOCK * BLOCK, f"{lease} has {lease.num_cached} of {hit} cached tokens"
            # The block that would have been copied may be all there is.
            assert any(usage.available <= 1 for usage in after), "no copy was made, with a block left for it"
        assert (lease.copy_from is None) == (lease.num_cached % BLOCK == 0), f"{lease} copies {lease.copy_from}"
        assert lease.copy_from is None or len(lease.copy_from) == len(self.groups)
        assert lease.request_id == f"r{self.serial}"
        assert len(lease.blocks) == len(self.groups)
        self.forgotten += lease.copy_from is not None and any(usage.free == 0 for usage in before)
        return lease

    def has_room(self, max_tokens: int) -> bool:
        """Whether an empty pool holds a request of so many tokens."""
        whole = -(-max_tokens // BLOCK)
        most = [min(whole, group.most_blocks) if group.most_blocks else whole for group in self.groups]
        return all(count < group.num_blocks for count, group in zip(most, self.groups, strict=True))

    def prefix(self, tokens: list[int], num_tokens: int) -> Prefix:
        return prefix_of(tokens, num_tokens) if self.allocator.caches_prefixes else Prefix((), tokens, num_tokens)

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
        if not owner.open or upto <= owner.written or self.is_beyond(owner.lease, upto):
            return
        before = self.allocator.usage()
        held = [len(blocks) for blocks in owner.lease.blocks]
        needed = self.allocator.blocks_needed(owner.lease, upto, owner.max_tokens)
        if not self.allocator.reserve(owner.lease, upto):
            short = [count > usage.available for count, usage in zip(needed, before, strict=True)]
            assert any(short), f"{needed} blocks refused with {before}"
            assert self.allocator.usage() == before, "a refused reserve changed something"
            assert [len(blocks) for blocks in owner.lease.blocks] == held, "a refused reserve changed the lease"
            return
        after = self.allocator.usage()
        taken = tuple(was.available - now.available for was, now in zip(before, after, strict=True))
        assert taken == needed, f"{taken} blocks taken, {needed} were said to be needed"
        self.forgotten += any(now.cached < was.cached for was, now in zip(before, after, strict=True))
        for position in range(owner.written, upto):
            for group, blocks in enumerate(owner.lease.blocks):
                assert blocks[position // BLOCK], f"{owner.lease} has no block for token {position} in group {group}"
                page = self.memory.setdefault((group, blocks[position // BLOCK]), [None] * BLOCK)
                page[position % BLOCK] = owner.tokens[position]
        owner.written = upto

    def is_beyond(self, lease: Lease, num_tokens: int) -> bool:
        """Whether a request would hold more blocks of a window than the core ever asks for."""
        end = -(-num_tokens // BLOCK)
        held = [(end - group.num_passed(lease.num_committed, BLOCK), group.most_blocks) for group in self.groups]
        return any(most is not None and count > most for count, most in held)

    @rule(owner=owners, back=st.integers(0, BLOCK))
    def commit_some(self, owner: Owner, back: int) -> None:
        self.commit(owner, back)

    def commit(self, owner: Owner, back: int) -> None:
        """Commit what was written, less ``back`` tokens (as if drafts had been rejected)."""
        upto = max(owner.lease.num_committed, owner.written - back)
        if not owner.open:
            return
        prefix = self.prefix(owner.tokens, upto)
        before, held = self.allocator.usage(), [list(blocks) for blocks in owner.lease.blocks]
        self.allocator.commit(owner.lease, prefix)
        assert owner.lease.num_committed == upto
        for group, was, now, ids in zip(self.groups, before, self.allocator.usage(), held, strict=True):
            blocks, passed = owner.lease.blocks[group.group_id], group.num_passed(upto, BLOCK)
            assert blocks[passed : len(ids)] == ids[passed:], "a commit changes no block that is read"
            assert now == was or (passed and now.leased < was.leased), f"a commit made {now} of {was}"
        owner.written = upto
        # A copy of a prefix that another lease committed first is not found again once that one is evicted.
        if prefix.keys and owner.forgotten == self.forgotten:
            assert self.allocator.match_prefix(prefix) >= upto // BLOCK * BLOCK, "a committed prefix cannot be found"
        if upto % 2 and isinstance(self.allocator, RetainingAllocator):
            before = self.allocator.usage()
            self.allocator.retain(prefix, 3600.0)
            assert self.allocator.usage() == before, "to retain a prefix is a wish, and changed something"

    @rule(owner=owners, num_tokens=st.integers(0, 6 * BLOCK))
    def ask(self, owner: Owner, num_tokens: int) -> None:
        """What a scheduler does with requests that it then leaves out."""
        if owner.open:
            before = self.allocator.usage()
            num_tokens = min(num_tokens, owner.max_tokens)
            needed = self.allocator.blocks_needed(owner.lease, num_tokens, owner.max_tokens)
            assert min(needed) >= 0 and self.allocator.usage() == before
            for count, blocks in zip(needed, owner.lease.blocks, strict=True):
                if num_tokens <= len(blocks) * BLOCK:
                    assert count == 0, f"{needed} blocks for {num_tokens} tokens of {owner.lease}"

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
        assert all(usage.cached == 0 for usage in self.allocator.usage())

    @invariant()
    def blocks_add_up(self) -> None:
        for group, usage in zip(self.groups, self.allocator.usage(), strict=True):
            leased = {block for owner in self.live for block in owner.lease.blocks[group.group_id] if block}
            assert usage.total == group.num_blocks - 1
            assert usage.free + usage.cached + usage.leased == usage.total
            assert min(usage.free, usage.cached) >= 0
            assert self.allocator.caches_prefixes or usage.cached == 0, "nothing is cached"
            assert usage.leased == len(leased), f"{usage.leased} leased, but leases hold {len(leased)} blocks"
            assert all(0 < block < group.num_blocks for block in leased)
        check = getattr(self.allocator, "check", None)
        if check is not None:
            check()

    @invariant()
    def what_a_window_has_passed_is_given_back(self) -> None:
        for owner in self.live:
            for group, blocks in zip(self.groups, owner.lease.blocks, strict=True):
                passed = group.num_passed(owner.lease.num_committed, BLOCK)
                assert not any(blocks[:passed]), f"{owner.lease} holds blocks that group {group.group_id} has passed"
                assert all(blocks[passed:]), f"{owner.lease} lacks blocks that are read in group {group.group_id}"

    @invariant()
    def nobody_lost_a_token(self) -> None:
        for owner in self.live:
            self._expect_content(owner, owner.written)

    def teardown(self) -> None:
        if not hasattr(self, "live"):
            return
        for owner in self.live:
            self.allocator.release(owner.lease)
        for usage in self.allocator.usage():
            assert usage.leased == 0 and usage.available == usage.total, f"blocks leaked: {usage}"

    def _expect_content(self, owner: Owner, upto: int) -> None:
        for group, blocks in zip(self.groups, owner.lease.blocks, strict=True):
            for start in range(group.num_passed(owner.lease.num_committed, BLOCK) * BLOCK, upto, BLOCK):
                wanted = owner.tokens[start : min(start + BLOCK, upto)]
                found = self.memory[group.group_id, blocks[start // BLOCK]][: len(wanted)]
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
        allocator.start(two_groups(num_blocks))
        return allocator

    def test_fulfils_the_protocol(self) -> None:
        allocator = self.started()
        assert isinstance(allocator, KVAllocator), lacking(allocator, KVAllocator)
        lease, usages = allocator.open("r", Prefix(), 2 * BLOCK), allocator.usage()
        assert isinstance(lease, Lease), f"open() returned {lease!r:.60}, expected a Lease"
        assert isinstance(usages, tuple) and len(usages) == 2, f"usage() returned {usages!r:.60}, expected one a group"
        for usage in usages:
            assert isinstance(usage, BlockUsage), f"usage() returned {usage!r:.60}, expected BlockUsages"
        reserved = allocator.reserve(lease, BLOCK)
        assert reserved is True, f"reserve() returned {reserved!r}, expected True"

    def test_block_zero_is_never_handed_out(self) -> None:
        allocator = self.started(num_blocks=5)
        lease = allocator.open("all", Prefix(), 4 * BLOCK)
        assert lease is not None and allocator.reserve(lease, 4 * BLOCK)
        for blocks in lease.blocks:
            assert sorted(blocks) == [1, 2, 3, 4]

    def test_reserve_beyond_the_pool_is_refused_and_changes_nothing(self) -> None:
        allocator = self.started(num_blocks=3)
        lease = allocator.open("r", Prefix(), 2 * BLOCK)
        assert lease is not None
        before = (allocator.usage(), [list(blocks) for blocks in lease.blocks])
        assert not allocator.reserve(lease, 3 * BLOCK)
        assert (allocator.usage(), [list(blocks) for blocks in lease.blocks]) == before

    def test_a_block_holds_as_many_tokens_as_the_configuration_says(self) -> None:
        for block_size in (8, 16, 64):
            allocator = self.started(block_size=block_size)
            lease = allocator.open("r", Prefix(), 2 * block_size)
            assert lease is not None and allocator.reserve(lease, 2 * block_size)
            assert [len(blocks) for blocks in lease.blocks] == [2, 2], f"blocks of {block_size} tokens"

    def test_reserve_of_what_is_covered_changes_nothing(self) -> None:
        allocator = self.started()
        lease = allocator.open("r", Prefix(), 3 * BLOCK)
        assert lease is not None and allocator.reserve(lease, 3 * BLOCK)
        before = (allocator.usage(), [list(blocks) for blocks in lease.blocks])
        for num_tokens in (1, BLOCK, 3 * BLOCK):
            assert allocator.blocks_needed(lease, num_tokens, 3 * BLOCK) == (0, 0)
            assert allocator.reserve(lease, num_tokens)
            assert (allocator.usage(), [list(blocks) for blocks in lease.blocks]) == before

    def test_blocks_needed_for_a_new_lease_is_what_it_takes(self) -> None:
        allocator = self.started()
        needed = allocator.blocks_needed(None, 3 * BLOCK, 5 * BLOCK)
        before = alike(allocator).available
        lease = allocator.open("r", Prefix(), 5 * BLOCK)
        assert lease is not None and allocator.reserve(lease, 3 * BLOCK)
        assert needed == (before - alike(allocator).available,) * 2

    def test_a_released_lease_leaves_everything_available(self) -> None:
        allocator = self.started()
        for turn in range(3):
            lease = allocator.open(f"r{turn}", Prefix(), 5 * BLOCK)
            assert lease is not None and allocator.reserve(lease, 5 * BLOCK)
            text = prefix_of(list(range(5 * BLOCK)))
            allocator.commit(lease, text if allocator.caches_prefixes else anonymous(5 * BLOCK))
            allocator.release(lease)
            assert alike(allocator).available == alike(allocator).total

    def test_a_request_may_start_again_before_its_old_lease_ends(self) -> None:
        allocator = self.started()
        old = allocator.open("r", Prefix(), 4 * BLOCK)
        new = allocator.open("r", Prefix(), 4 * BLOCK)
        assert old is not None and new is not None
        assert allocator.reserve(old, 2 * BLOCK) and allocator.reserve(new, 2 * BLOCK)
        kept = list(new.blocks[0])
        allocator.release(old)
        assert new.blocks[0] == kept
        assert alike(allocator).leased == len(kept)
        allocator.release(new)
        assert alike(allocator).leased == 0

    def test_each_group_has_as_many_blocks_as_it_is_given(self) -> None:
        for full, window in ((9, 5), (5, 9)):
            allocator = self.make(BLOCK)
            allocator.start(two_groups(full, window_blocks=window))
            assert [usage.total for usage in allocator.usage()] == [full - 1, window - 1]
            lease = allocator.open("r", Prefix(), 4 * BLOCK)
            assert lease is not None and allocator.reserve(lease, 4 * BLOCK)
            before = allocator.usage()
            assert sorted(usage.available for usage in before) == [0, 4]
            other = allocator.open("other", Prefix(), BLOCK)
            assert other is None or (allocator.blocks_needed(other, BLOCK, BLOCK) == (1, 1))
            assert other is None or not allocator.reserve(other, BLOCK), "one of the groups has no block left"
            assert allocator.usage() == before, "the group with blocks left gave one for nothing"

    def long_text(self, allocator: KVAllocator, num_blocks: int, name: str = "long", first: int = 0) -> Lease:
        """A lease on a text whose tokens count from ``first``, computed and committed ``STEP`` by ``STEP``; meanwhile
        it holds of the window no more than it needs."""
        tokens, most = list(range(first, first + num_blocks * BLOCK)), -(-(WINDOW + STEP) // BLOCK) + 1
        prefix = prefix_of(tokens, len(tokens) - 1) if allocator.caches_prefixes else Prefix()
        lease = allocator.open(name, prefix, len(tokens))
        assert lease is not None
        for start in range(lease.num_cached, len(tokens), STEP):
            end = min(start + STEP, len(tokens))
            assert allocator.reserve(lease, end), f"{allocator.usage()} do not hold {WINDOW + STEP} tokens"
            held = [sum(map(bool, blocks)) for blocks in lease.blocks]
            assert held[0] == -(-end // BLOCK) or not self.on_demand(allocator)
            assert held[1] <= most, f"{held[1]} blocks for a window of {WINDOW} tokens and a step of {STEP}"
            allocator.commit(lease, prefix_of(tokens, end) if allocator.caches_prefixes else anonymous(end))
        return lease

    @staticmethod
    def on_demand(allocator: KVAllocator) -> bool:
        """Whether blocks are taken when tokens reach them."""
        return allocator.blocks_needed(None, 1, 4 * BLOCK)[0] == 1

    def test_a_window_holds_no_more_blocks_than_it_needs(self) -> None:
        most = -(-(WINDOW + STEP) // BLOCK) + 1
        allocator = self.make(BLOCK)
        allocator.start(two_groups(41, WINDOW, most + 1, most))
        for turn in range(2):
            lease = self.long_text(allocator, 40, first=1000 * turn)
            passed = (40 * BLOCK - WINDOW + 1) // BLOCK
            assert lease.blocks[1][:passed] == [0] * passed and all(lease.blocks[1][passed:])
            assert [usage.leased for usage in allocator.usage()] == [40, 40 - passed]
            allocator.release(lease)
            assert all(usage.available == usage.total for usage in allocator.usage())

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

    def filled(self, allocator: KVAllocator, name: str, tokens: list[int], committed: int | None = None) -> Lease:
        """A lease with all of ``tokens`` computed, and ``committed`` of them (``None``: all) committed."""
        lease = allocator.open(name, prefix_of(tokens, len(tokens) - 1), len(tokens))
        assert lease is not None and allocator.reserve(lease, len(tokens))
        if committed != 0:
            allocator.commit(lease, prefix_of(tokens, committed))
        return lease

    def test_says_that_it_caches(self) -> None:
        assert self.make(BLOCK).caches_prefixes

    def test_nothing_is_found_before_it_is_committed(self) -> None:
        allocator, tokens = self.started(), list(range(4 * BLOCK))
        lease = self.filled(allocator, "a", tokens, committed=0)
        assert allocator.match_prefix(prefix_of(tokens)) == 0
        allocator.commit(lease, prefix_of(tokens, 2 * BLOCK + 3))
        assert 2 * BLOCK <= allocator.match_prefix(prefix_of(tokens)) <= 2 * BLOCK + 3

    def test_a_hit_takes_over_the_same_blocks_in_every_group(self) -> None:
        allocator, tokens = self.started(), list(range(4 * BLOCK))
        first = self.filled(allocator, "a", tokens)
        second = allocator.open("b", prefix_of(tokens, 3 * BLOCK), 5 * BLOCK)
        assert second is not None and second.num_cached == second.num_committed == 3 * BLOCK
        assert second.copy_from is None
        for theirs, ours in zip(first.blocks, second.blocks):
            assert ours == theirs[:3]
        assert alike(allocator).leased == 4

    def test_a_hit_covers_no_more_than_it_may(self) -> None:
        allocator, tokens = self.started(), list(range(4 * BLOCK))
        self.filled(allocator, "a", tokens)
        for most in (0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 1, 3 * BLOCK - 1):
            found = allocator.match_prefix(prefix_of(tokens, most))
            assert most // BLOCK * BLOCK <= found <= most, f"{found} of {most} tokens are cached"

    def test_tokens_without_keys_are_shared_with_nobody(self) -> None:
        allocator = self.started()
        lease = allocator.open("a", anonymous(2 * BLOCK), 2 * BLOCK)
        assert lease is not None and allocator.reserve(lease, 2 * BLOCK)
        allocator.commit(lease, anonymous(BLOCK + 3))
        allocator.release(lease)
        assert alike(allocator).cached == 0
        self.filled(allocator, "b", list(range(2 * BLOCK)))
        assert allocator.match_prefix(anonymous(2 * BLOCK)) == 0

    def test_an_idle_prefix_that_is_leased_again_cannot_be_evicted(self) -> None:
        allocator, tokens = self.started(num_blocks=5), list(range(3 * BLOCK))
        allocator.release(self.filled(allocator, "a", tokens))
        assert alike(allocator).cached == 3
        lease = allocator.open("b", prefix_of(tokens, 2 * BLOCK), 3 * BLOCK)
        assert lease is not None
        usage = alike(allocator)
        assert (usage.free, usage.cached, usage.leased) == (1, 1, 2)
        hungry = allocator.open("c", Prefix(), 3 * BLOCK)
        assert hungry is not None and not allocator.reserve(hungry, 3 * BLOCK)

    def test_another_chain_is_not_found(self) -> None:
        allocator, tokens = self.started(), list(range(4 * BLOCK))
        self.filled(allocator, "a", tokens)
        assert allocator.match_prefix(prefix_of([99, *tokens[1:]])) == 0

    def test_uncommitted_blocks_are_free_after_release(self) -> None:
        allocator, tokens = self.started(), list(range(4 * BLOCK))
        allocator.release(self.filled(allocator, "a", tokens, committed=BLOCK))
        assert (alike(allocator).cached, alike(allocator).free) == (1, 15)

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
            assert (alike(allocator).cached, alike(allocator).free) == (8, 0)
            lease = allocator.open("next", Prefix(), taken * BLOCK)
            assert lease is not None and allocator.reserve(lease, taken * BLOCK)
            assert (alike(allocator).cached, alike(allocator).leased) == (8 - taken, taken)
            for tokens, blocks in zip(chains, held, strict=True):
                found = allocator.match_prefix(prefix_of(tokens))
                again = allocator.open("again", prefix_of(tokens), 4 * BLOCK)
                assert again is not None and again.num_cached == found
                assert again.blocks[0] == blocks[: found // BLOCK], "a block is found for other tokens than it holds"
                assert not set(again.blocks[0]) & set(lease.blocks[0]), "a prefix is found in blocks that are in use"
            assert sum(allocator.match_prefix(prefix_of(tokens)) for tokens in chains) <= (8 - taken) * BLOCK

    def test_a_block_in_use_is_never_evicted(self) -> None:
        allocator, tokens = self.started(num_blocks=5), list(range(2 * BLOCK))
        self.filled(allocator, "holder", tokens)
        lease = allocator.open("hungry", Prefix(), 4 * BLOCK)
        assert lease is not None and not allocator.reserve(lease, 3 * BLOCK)
        assert allocator.reserve(lease, 2 * BLOCK)
        assert allocator.match_prefix(prefix_of(tokens)) == 2 * BLOCK

    def test_two_who_compute_the_same_keep_their_own_blocks(self) -> None:
        allocator, tokens = self.started(), list(range(2 * BLOCK))
        a = self.filled(allocator, "a", tokens, committed=0)
        b = self.filled(allocator, "b", tokens, committed=0)
        for lease in (a, b):
            allocator.commit(lease, prefix_of(tokens))
        assert not set(a.blocks[0]) & set(b.blocks[0])
        allocator.release(a)
        allocator.release(b)
        assert (alike(allocator).cached, allocator.match_prefix(prefix_of(tokens))) == (2, 2 * BLOCK)

    def in_windows(self, num_blocks: int = 41, window_blocks: int = 41) -> KVAllocator:
        allocator = self.make(BLOCK)
        allocator.start(two_groups(num_blocks, WINDOW, window_blocks))
        return allocator

    def test_of_a_window_a_hit_needs_the_last_blocks_only(self) -> None:
        """The pool has not more blocks than the window and a step take: all others were evicted."""
        allocator, tokens = self.in_windows(window_blocks=7), list(range(40 * BLOCK))
        lease = self.long_text(allocator, 40)
        held = [list(blocks) for blocks in lease.blocks]
        assert allocator.match_prefix(prefix_of(tokens)) == 40 * BLOCK
        allocator.release(lease)
        again = allocator.open("again", prefix_of(tokens), 41 * BLOCK)
        assert again is not None and again.num_cached == again.num_committed == 40 * BLOCK
        assert list(again.blocks) == held, "blocks that the window has passed are none of the hit"

    def test_what_a_window_has_passed_is_found_until_it_is_evicted(self) -> None:
        allocator, tokens = self.in_windows(), list(range(40 * BLOCK))
        lease = self.long_text(allocator, 12)
        for blocks in range(13):
            assert allocator.match_prefix(prefix_of(tokens, blocks * BLOCK)) == blocks * BLOCK
        other = allocator.open("other", prefix_of(tokens, 4 * BLOCK), 5 * BLOCK)
        assert other is not None and other.blocks[0] == lease.blocks[0][:4]
        assert [bool(block) for block in other.blocks[1]] == [False, False, True, True]

    def test_a_hit_is_as_long_as_all_groups_allow(self) -> None:
        """Of another text the window has taken all blocks but the last ones of the first."""
        allocator, tokens = self.in_windows(81, window_blocks=9), list(range(40 * BLOCK))
        first = self.long_text(allocator, 20)
        allocator.release(self.long_text(allocator, 20, "other", first=1000))
        assert allocator.usage()[0].leased + allocator.usage()[0].cached == 40
        ends = range(1, 21)
        hits = [allocator.match_prefix(prefix_of(tokens, end * BLOCK)) // BLOCK for end in ends]
        assert hits[-1] == 20, "its last blocks are leased"
        found = [end for end, hit in zip(ends, hits, strict=True) if hit == end]
        assert len(found) <= 8, f"hits of {found} blocks with 8 blocks of a window"
        longest = [max((end for end in found if end <= at), default=0) for at in ends]
        assert hits == longest, "a shorter text is found further than a longer one that begins with it"
        for hit in hits:
            lease = allocator.open("again", prefix_of(tokens, hit * BLOCK), 21 * BLOCK)
            assert lease is not None and lease.num_cached == hit * BLOCK
            allocator.release(lease)
        allocator.release(first)

    def test_reset_forgets_everything_that_nobody_holds(self) -> None:
        allocator = self.started()
        held, idle = list(range(2 * BLOCK)), list(range(50, 50 + 2 * BLOCK + 3))
        self.filled(allocator, "held", held)
        allocator.release(self.filled(allocator, "idle", idle))
        allocator.reset_cache()
        assert allocator.match_prefix(prefix_of(idle)) == 0
        assert allocator.match_prefix(prefix_of(held)) == 2 * BLOCK


def finds_parts(allocator: KVAllocator) -> bool:
    """Whether an allocator, for blocks of :data:`BLOCK` tokens and not started yet, finds the first tokens of a
    block."""
    allocator.start(two_groups(3))
    text = list(range(BLOCK))
    lease = allocator.open("r", Prefix(), BLOCK)
    if lease is None or not allocator.reserve(lease, BLOCK):
        return False
    allocator.commit(lease, prefix_of(text))
    return allocator.match_prefix(prefix_of(text, BLOCK - 1)) > 0


class PartialBlockConformance(PrefixCachingConformance):
    """Further tests of allocators that look inside of blocks: a hit may end anywhere, in a copy."""

    def cached(self, allocator: KVAllocator, tokens: list[int], committed: int | None = None) -> list[int]:
        """A request came and went; the blocks that it had."""
        lease = self.filled(allocator, "before", tokens, committed)
        blocks = list(lease.blocks[0])
        allocator.release(lease)
        return blocks

    def hit(self, allocator: KVAllocator, tokens: list[int], most: int | None = None) -> Lease:
        """A lease on what is cached of ``tokens``."""
        found = allocator.match_prefix(prefix_of(tokens, most))
        lease = allocator.open("again", prefix_of(tokens, most), len(tokens))
        assert lease is not None and lease.num_cached == lease.num_committed == found
        assert len(lease.blocks[0]) == -(-found // BLOCK)
        return lease

    def test_a_repeated_text_is_found_up_to_any_token(self) -> None:
        for length in (5, BLOCK, 3 * BLOCK - 3, 4 * BLOCK):
            allocator, tokens = self.started(num_blocks=17), list(range(length))
            blocks = self.cached(allocator, tokens)
            for most in range(length + 1):
                lease = self.hit(allocator, tokens, most)
                full, part = divmod(most, BLOCK)
                assert lease.num_cached == most and lease.blocks[0][:full] == blocks[:full]
                assert lease.copy_from == ((blocks[full],) * 2 if part else None)
                assert not part or lease.blocks[0][full] not in blocks, "a copy is to be made of a block to itself"
                allocator.release(lease)

    def test_a_text_that_ended_within_a_block_is_found_as_far_as_it_was_committed(self) -> None:
        allocator, tokens = self.started(), list(range(2 * BLOCK))
        self.cached(allocator, tokens, committed=BLOCK + 3)
        assert (alike(allocator).cached, alike(allocator).free) == (2, 14)
        assert allocator.match_prefix(prefix_of(tokens)) == BLOCK + 3

    def test_texts_that_part_within_a_block_share_what_is_the_same(self) -> None:
        allocator, tokens = self.started(num_blocks=33), list(range(3 * BLOCK))
        for same in (1, BLOCK - 1, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK + 3):
            allocator.reset_cache()
            self.cached(allocator, tokens)
            other = tokens[:same] + [500] * (3 * BLOCK - same)
            assert allocator.match_prefix(prefix_of(other)) == same

    def test_of_blocks_that_begin_alike_the_one_with_most_in_common_is_copied(self) -> None:
        beginnings = [[5], [5, 6], [5, 6, 7, 8], [5, 6, 9], [4, 6, 7], [6]]
        for order in (beginnings, beginnings[::-1]):
            allocator = self.started(num_blocks=33)
            held = {tuple(text): self.cached(allocator, [*text, *[100 + i] * (BLOCK - len(text))])
                    for i, text in enumerate(order)}  # fmt: skip
            for wanted, count, holds in (
                ([5, 6, 7, 8, 1], 4, (5, 6, 7, 8)), ([5, 6, 7, 1], 3, (5, 6, 7, 8)), ([5, 6, 9, 1], 3, (5, 6, 9)),
                ([4, 6, 1], 2, (4, 6, 7)), ([6, 1], 1, (6,)), ([7], 0, None),
            ):  # fmt: skip
                lease = self.hit(allocator, [*wanted, 1, 1, 1])
                assert lease.num_cached == count
                assert lease.copy_from == (None if holds is None else (held[holds][0],) * 2)
                allocator.release(lease)

    def test_the_same_tokens_after_another_beginning_are_not_found(self) -> None:
        allocator, tokens = self.started(), list(range(BLOCK + 4))
        self.cached(allocator, tokens)
        other = [99, *tokens[1:]]
        self.cached(allocator, other[:BLOCK])
        assert allocator.match_prefix(prefix_of(other)) == BLOCK

    def test_a_block_is_not_evicted_for_its_own_copy(self) -> None:
        allocator, tokens = self.started(num_blocks=3), list(range(BLOCK + 4))
        self.cached(allocator, tokens)
        lease = allocator.open("again", prefix_of(tokens, BLOCK + 3), 2 * BLOCK)
        assert lease is not None and (lease.num_cached, lease.copy_from) == (BLOCK, None)
        assert (alike(allocator).cached, alike(allocator).leased) == (1, 1)
        assert allocator.match_prefix(prefix_of(tokens)) == BLOCK + 4
        assert allocator.reserve(lease, BLOCK + 4), "the block is as good as free"

    def test_an_idle_block_gives_way_to_a_copy(self) -> None:
        allocator, tokens = self.started(num_blocks=4), list(range(BLOCK + 4))
        self.cached(allocator, list(range(50, 50 + BLOCK)))
        self.cached(allocator, tokens)
        assert alike(allocator).free == 0
        lease = self.hit(allocator, tokens, BLOCK + 3)
        assert lease.num_cached == BLOCK + 3
        assert (alike(allocator).cached, alike(allocator).leased) == (1, 2)

    def test_a_copy_that_was_never_made_is_found_by_nobody(self) -> None:
        allocator, tokens = self.started(), list(range(2 * BLOCK))
        self.cached(allocator, tokens)
        before = allocator.usage()
        allocator.release(self.hit(allocator, tokens, 2 * BLOCK - 1))
        assert allocator.usage() == before
        other = self.hit(allocator, tokens, BLOCK + 3)
        allocator.reset_cache()
        allocator.release(other)
        assert allocator.match_prefix(prefix_of(tokens)) == BLOCK

    def test_requests_that_repeat_a_text_leave_one_copy_of_it(self) -> None:
        allocator, tokens = self.started(), list(range(BLOCK + 4))
        for _ in range(5):
            self.cached(allocator, tokens)
            assert (alike(allocator).cached, alike(allocator).free) == (2, 14)

    def test_what_a_copy_was_made_from_stays_what_it_was(self) -> None:
        allocator, tokens = self.started(), list(range(BLOCK + 4))
        self.cached(allocator, tokens)
        longer = [*tokens, *range(200, 200 + BLOCK)]
        lease = self.hit(allocator, longer)
        assert lease.num_cached == BLOCK + 4 and allocator.reserve(lease, len(longer))
        allocator.commit(lease, prefix_of(longer))
        other = [*tokens, 7, 7]
        assert self.hit(allocator, other).num_cached == BLOCK + 4


def suite_for(subject: Subject) -> Suite:
    """For ``engine plugins check``: of what the allocator offers."""

    def make(block_size: int) -> Any:
        return subject.build(subject.context(block_size), block_size=block_size)

    suite: Suite = KVAllocatorConformance
    if subject.tried(lambda: make(BLOCK).caches_prefixes):
        parts = subject.tried(lambda: finds_parts(make(BLOCK)))
        suite = PartialBlockConformance if parts else PrefixCachingConformance
    return filled(subject, [suite], make=lambda self, block_size: make(block_size))
