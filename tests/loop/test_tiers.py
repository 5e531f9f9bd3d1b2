"""What of a prefix is found in records and in blocks, in groups that keep every token and in those that forget."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from engine.contracts.config import KVAllocatorConfig
from engine.contracts.kv_allocator import KVGroup, Lease, Prefix
from engine.contracts.kv_store import RecordLayout, StagedStore
from engine.kv.block_keys import BlockKeys
from engine.kv.checked_allocator import CheckedAllocator
from engine.kv.checked_memory import CheckedMemory
from engine.loop.staging import Staging
from engine.loop.tiers import Tiers, Words
from engine.step.plan import RecordMove
from engine.testing.context import build_context
from engine_plugins.kv_allocator.prefix_cache import PrefixCacheAllocator
from engine_plugins.kv_store.host import HostConfig, HostStore

BLOCK, WINDOW, LENGTH = 8, 24, 200
FULL = KVGroup(0, (0,), "full", 64, 60)
WINDOWED = KVGroup(1, (1,), "window", 64, 60, WINDOW)
CHUNKED = KVGroup(1, (1,), "chunked", 64, 60, WINDOW)
STATE = KVGroup(1, (1,), "state", 64, 60)


class House:
    """An allocator, memory, and one text."""

    def __init__(self, *groups: KVGroup, further: Sequence[StagedStore] = ()) -> None:
        self.groups = groups
        allocator = PrefixCacheAllocator(KVAllocatorConfig(block_size=BLOCK), build_context(block_size=BLOCK))
        allocator.start(groups)
        self.inner, self.allocator = allocator, CheckedAllocator(allocator, groups, BLOCK)
        self.memory = HostStore(HostConfig(max_bytes=1 << 20), build_context())
        self.memory.open(RecordLayout(bytes(32), (4096,) * len(groups)), lambda: None)
        self.stored: list[RecordMove] = []
        checked = CheckedMemory(self.memory, (4096,) * len(groups))
        staging = Staging(checked, further, (4096,) * len(groups), lambda: 0.0)
        names = ["host", *("further" for _ in further)]
        self.tiers = Tiers(names, checked, staging, self.allocator, groups, BLOCK, self.store)
        self.tokens = [random.Random(3).randrange(1000) for _ in range(LENGTH)]
        self.keys = BlockKeys(("salt",), BLOCK).extend(self.tokens)

    def store(self, moves, done) -> None:
        self.stored += moves
        done(True)

    def prefix(self, num_tokens: int = LENGTH) -> Prefix:
        return Prefix(self.keys, self.tokens, num_tokens)

    def computed(self, num_tokens: int, step: int = BLOCK * 3, words: Words = ()) -> Lease:
        """A lease whose tokens were computed, a step after the other, and kept; ``words``: with the last step."""
        lease = self.allocator.open("r", self.prefix(num_tokens), num_tokens)
        assert lease is not None
        for end in [*range(lease.num_cached + step, num_tokens, step), num_tokens]:
            assert self.allocator.reserve(lease, end)
            self.commit(lease, end, words if end == num_tokens else ())
        return lease

    def commit(self, lease: Lease, end: int, words: Words = ()) -> None:
        new = self.tiers.unkept(lease, self.prefix(end), words)
        self.allocator.commit(lease, self.prefix(end))
        if new:
            self.tiers.keep(new)
        self.tiers.poll()

    def forget(self, group: int, at: int) -> None:
        """A record."""
        slots = self.memory._groups[group]
        slots.free.append(slots.slot_of[self.keys[at + 1]])
        slots.remove(self.keys[at + 1])


def test_what_waits_for_records_is_called_when_they_can_be_found() -> None:
    house, done, seen = House(FULL), [], []
    house.tiers._store = lambda moves, end: done.append(end)
    house.tiers.when_stored(lambda: seen.append("nothing to wait for"))
    lease = house.computed(4 * BLOCK, step=2 * BLOCK)
    key = house.keys[4]
    house.tiers.when_stored(lambda: seen.append(house.memory.find(0, key)))
    for end in done:
        house.tiers.poll()
        assert len(seen) == 1
        end(True)
    house.tiers.poll()
    assert seen[1] is not None
    house.tiers.when_stored(lambda: seen.append("all is stored"))
    assert len(seen) == 3
    house.allocator.release(lease)


OTHERS = pytest.mark.parametrize("other", [WINDOWED, CHUNKED, STATE], ids=lambda group: group.kind)


@OTHERS
def test_every_block_of_every_group_is_stored_once(other: KVGroup) -> None:
    house = House(FULL, other)
    house.allocator.release(house.computed(LENGTH))
    for group in (0, 1):
        slots = [slot for move in house.stored if move.group == group for slot in move.slots]
        assert len(slots) == len({*slots}) == LENGTH // BLOCK
    house.allocator.release(house.computed(LENGTH))
    assert house.memory.usage().records == 2 * (LENGTH // BLOCK), "nothing was stored again"


def test_what_a_request_wants_to_stay_is_retained_in_memory_the_end_of_the_text_first_to_go() -> None:
    house = House(FULL, STATE)
    house.allocator.release(house.computed(LENGTH, words=((8 * BLOCK, 300.0),)))
    for at in (2, 3):
        other = house.memory.room(0, bytes([at]))
        assert other is not None
        house.memory.publish(0, other)
        house.memory.retain(house.keys[0], 0, [other], 0.0)
    for group in range(2):
        order, at = house.memory._groups[group].order, house.memory._groups[group].slot_of
        others = [at[bytes([name])] for name in (2, 3)] if group == 0 else []
        expected = [at[key] for key in reversed(house.keys[9:])] + others + [at[key] for key in house.keys[8:0:-1]]
        assert [order.pop() for _ in range(len(order))] == expected


def test_a_store_that_wants_what_is_used_again_is_offered_at_once_what_is_to_stay() -> None:
    class SecondSight:
        def __init__(self) -> None:
            self.seen: list[bytes] = []
            self.kept: list[bytes] = []

        def put(self, group: int, key: bytes, record: memoryview, done: Callable[[], None]) -> bool:
            wanted = key in self.seen
            (self.kept if wanted else self.seen).append(key)
            if wanted:
                done()
            return wanted

        def poll(self) -> list[tuple[int, int]]:
            return []

    store = cast(Any, SecondSight())
    house = House(FULL, further=[store])
    house.allocator.release(house.computed(LENGTH, words=((8 * BLOCK, 300.0),)))
    house.tiers.poll()
    assert store.kept == [*house.keys[1:9]]


@OTHERS
def test_a_prefix_reaches_as_far_as_every_group_has_what_is_read_after_it(other: KVGroup) -> None:
    house, draw = House(FULL, other), random.Random(7)
    house.allocator.release(house.computed(LENGTH))
    house.inner.reset_cache()
    assert house.tiers.reach(house.prefix()) == LENGTH // BLOCK * BLOCK
    has = [{*range(LENGTH // BLOCK)}, {*range(LENGTH // BLOCK)}]
    for _ in range(20):
        group = draw.random() < 0.7
        at = draw.choice(sorted(has[group]))
        has[group].discard(at)
        house.forget(int(group), at)
        expected = max(
            full
            for full in range(LENGTH // BLOCK + 1)
            if {*range(full)} <= has[0] and {*range(other.num_passed(full * BLOCK, BLOCK), full)} <= has[1]
        )
        assert house.tiers.reach(house.prefix()) == expected * BLOCK


@OTHERS
def test_a_fill_has_what_blocks_lack_and_nobody_finds_it_before_the_commit(other: KVGroup) -> None:
    house = House(FULL, other)
    house.allocator.release(house.computed(LENGTH))
    house.inner.reset_cache()
    first = house.computed(5 * BLOCK)  # again in blocks
    upto = LENGTH // BLOCK * BLOCK
    lease = house.allocator.open_filling("filled", house.prefix(upto), LENGTH + 20)
    assert lease is not None and lease.num_cached == upto and lease.num_committed == 0
    fill = house.tiers.fill(lease, house.prefix(upto))
    own = [*range(5, upto // BLOCK)], [*range(other.num_passed(upto, BLOCK), upto // BLOCK)]
    for move in fill.moves:
        assert move.blocks == tuple(lease.blocks[move.group][at] for at in own[move.group])
        keys = [house.keys[at + 1] for at in own[move.group]]
        assert [*move.slots] == [house.memory.find(move.group, key) for key in keys]
    assert house.inner.match_prefix(house.prefix()) == 5 * BLOCK
    house.inner.check()
    fill.give_up()
    assert house.allocator.reserve(lease, LENGTH)
    house.commit(lease, LENGTH)
    assert house.inner.match_prefix(house.prefix(upto)) == upto
    for each in (lease, first):
        house.allocator.release(each)
        house.inner.check()
    house.allocator.check_idle()


@OTHERS
def test_a_fill_that_is_given_up_leaves_everything_as_it_was(other: KVGroup) -> None:
    house = House(FULL, other)
    house.allocator.release(house.computed(LENGTH))
    house.inner.reset_cache()
    house.allocator.release(house.computed(5 * BLOCK))
    before, upto = house.allocator.usage(), LENGTH // BLOCK * BLOCK
    lease = house.allocator.open_filling("filled", house.prefix(upto), LENGTH)
    assert lease is not None
    house.allocator.release(lease)
    house.inner.check()
    assert house.allocator.usage() == before
    assert house.inner.match_prefix(house.prefix()) == 5 * BLOCK


def test_without_blocks_for_it_nothing_changes() -> None:
    house = House(FULL)
    house.allocator.release(house.computed(LENGTH))
    house.inner.reset_cache()
    hungry = house.allocator.open("hungry", Prefix(), 8 * BLOCK * 6)
    assert hungry is not None and house.allocator.reserve(hungry, 48 * BLOCK)
    before = house.allocator.usage()
    assert house.allocator.open_filling("filled", house.prefix(LENGTH // BLOCK * BLOCK), LENGTH) is None
    assert house.allocator.usage() == before
    house.inner.check()


def test_a_full_memory_stores_the_beginning_of_a_text() -> None:
    house = House(FULL)
    held = [house.memory.room(0, bytes([number])) for number in range(256 - 10)]
    assert None not in held
    house.allocator.release(house.computed(LENGTH))
    found = [house.memory.find(0, key) is not None for key in house.keys[1:]]
    assert sum(found) == 10 and found[:9] == [True] * 9


def test_nothing_is_found_after_clear() -> None:
    house = House(FULL, WINDOWED)
    house.allocator.release(house.computed(LENGTH))
    house.inner.reset_cache()
    house.tiers.clear()
    assert house.tiers.reach(house.prefix()) == 0 and house.tiers.states()[0].records == 0
