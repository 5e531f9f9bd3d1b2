"""What of a prefix is found in records and in blocks, in groups that keep every token and in those that forget."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from engine.contracts.config import KVAllocatorConfig
from engine.contracts.kv_allocator import KVGroup, Lease, Prefix
from engine.contracts.kv_store import RecordLayout, StagedStore
from engine.contracts.request import Retained
from engine.contracts.step_cost import StepCost, StepWork
from engine.kv.block_keys import BlockKeys
from engine.kv.checked_allocator import CheckedAllocator
from engine.loop.staging import Read
from engine.loop.tiers import Tiers
from engine.step.plan import RecordMove
from engine.testing.context import build_context
from engine_plugins.kv_allocator.prefix_cache import PrefixCacheAllocator
from engine_plugins.kv_store.host import HostConfig, HostStore
from tests.loop.test_staging import SlowStore

BLOCK, WINDOW, LENGTH = 8, 24, 200
UNKNOWN = StepCost(0.0, 0.0, 0)
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
        sizes, names = (4096,) * len(groups), ["host", *("further" for _ in further)]
        stores = [self.memory, *further]
        self.tiers = Tiers(names, stores, sizes, self.allocator, groups, BLOCK, self.store, lambda: 0.0, UNKNOWN)
        self.tokens = [random.Random(3).randrange(1000) for _ in range(LENGTH)]
        self.keys = BlockKeys(("salt",), BLOCK).extend(self.tokens)

    def store(self, moves, done) -> None:
        self.stored += moves
        done(True)

    def prefix(self, num_tokens: int = LENGTH) -> Prefix:
        return Prefix(self.keys, self.tokens, num_tokens)

    def computed(self, num_tokens: int, step: int = BLOCK * 3, retain: tuple[Retained, ...] = ()) -> Lease:
        """A lease whose tokens were computed, a step after the other, and kept; ``retain``: with the last step."""
        lease = self.allocator.open("r", self.prefix(num_tokens), num_tokens)
        assert lease is not None
        for end in [*range(lease.num_cached + step, num_tokens, step), num_tokens]:
            assert self.allocator.reserve(lease, end)
            self.commit(lease, end, retain if end == num_tokens else ())
        return lease

    def commit(self, lease: Lease, end: int, retain: tuple[Retained, ...] = ()) -> None:
        new = self.tiers.storing.begin(lease, self.prefix(end), retain)
        self.allocator.commit(lease, self.prefix(end))
        if new:
            self.tiers.storing.store(new)
        self.tiers.poll()

    def forget(self, group: int, at: int) -> None:
        """A record."""
        slots = self.memory._groups[group]
        slots.free.append(slots.slot_of[self.keys[at + 1]])
        slots.remove(self.keys[at + 1])


def test_what_an_allocator_can_do_is_not_looked_up_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 15 us, and a prompt has thousands of blocks."""
    house = House(FULL)
    house.allocator.release(house.computed(LENGTH))
    monkeypatch.delattr("engine.kv.checked_allocator.FillingAllocator")
    assert house.tiers.reach(house.prefix()) == LENGTH


OTHERS = pytest.mark.parametrize("other", [WINDOWED, CHUNKED, STATE], ids=lambda group: group.kind)


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


def test_what_loads_save_is_counted_once_a_step_has_shown_what_a_prompt_takes() -> None:
    house = House(FULL)
    house.tiers.count({"host": 20_480}, 0)
    house.tiers.count({"host": 20_480}, 0)
    small = StepCost(1.0, 2.0, 8, per_prefill_context_ms=3.6, largest=StepWork.chunk(3))
    for cost in (UNKNOWN, small):
        state = house.tiers.states(cost)[0]
        assert (state.loaded_tokens, state.unpriced_tokens, state.saved_s) == (40_960, 40_960, 0.0)
    measured = StepCost(10.0, 0.1, 9, per_prefill_context_ms=1e-3, largest=StepWork.chunk(512))
    for _ in range(2):
        state = house.tiers.states(measured)[0]
        mean = 513 // 2  # tokens before each of that step's, and before no others'
        assert state.unpriced_tokens == 0
        assert house.tiers.states(measured)[0] == state
        assert state.saved_s == pytest.approx(0.01 + 40_960 * (1e-4 + 1e-6 * mean), rel=0.01)


def test_waiting_while_others_are_computed_costs_nothing() -> None:
    house = House(FULL, further=[SlowStore()])
    read = Read((), (), 0, 10.0, 20.0, done=True, ended_s=12.0, ahead_s=1.5)
    assert house.tiers.give_up(read, {"further": 64}).ms == 2000.0
    measured = StepCost(0.0, 100.0, 9, largest=StepWork.chunk(512))
    state = house.tiers.states(measured)[1]
    assert (state.load_s, state.saved_s) == (2.0, pytest.approx(6.4 - 0.5))


def test_nothing_is_found_after_clear() -> None:
    house = House(FULL, WINDOWED)
    house.allocator.release(house.computed(LENGTH))
    house.inner.reset_cache()
    house.tiers.clear()
    assert house.tiers.reach(house.prefix()) == 0 and house.tiers.states(UNKNOWN)[0].records == 0
