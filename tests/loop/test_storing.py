"""Which blocks become records, when they are found, and what stays longest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.contracts.kv_allocator import KVGroup
from tests.loop.test_staging import SlowStore
from tests.loop.test_tiers import BLOCK, FULL, LENGTH, OTHERS, STATE, House


def test_what_waits_for_records_is_called_when_they_can_be_found() -> None:
    house, done, seen = House(FULL), [], []
    house.tiers.storing._store = lambda moves, end: done.append(end)
    house.tiers.storing.when_stored(lambda: seen.append("nothing to wait for"))
    lease = house.computed(4 * BLOCK, step=2 * BLOCK)
    key = house.keys[4]
    house.tiers.storing.when_stored(lambda: seen.append(house.memory.find(0, key)))
    for end in done:
        house.tiers.poll()
        assert len(seen) == 1
        end(True)
    house.tiers.poll()
    assert seen[1] is not None
    house.tiers.storing.when_stored(lambda: seen.append("all is stored"))
    assert len(seen) == 3
    house.allocator.release(lease)


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
    house.allocator.release(house.computed(LENGTH, retain=((8 * BLOCK, 300.0),)))
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


def test_a_store_that_wants_what_is_used_again_is_offered_at_once_what_is_to_stay_and_told_how_long() -> None:
    class SecondSight(SlowStore):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[bytes] = []
            self.kept: list[bytes] = []
            self.stays = dict[bytes, float]()

        def retain(self, tenant: bytes, group: int, keys: Sequence[bytes], seconds: float) -> None:
            assert tenant == house.keys[0] and {*keys} <= {*self.seen}
            self.stays.update(dict.fromkeys(keys, seconds))

        def put(self, group: int, key: bytes, record: memoryview, done: Callable[[], None]) -> bool:
            wanted = key in self.seen
            (self.kept if wanted else self.seen).append(key)
            if wanted:
                done()
            return wanted

    store = SecondSight()
    house = House(FULL, further=[store])
    house.allocator.release(house.computed(LENGTH, retain=((8 * BLOCK, 300.0),)))
    house.tiers.poll()
    assert store.kept == [*house.keys[1:9]]
    assert store.stays == {key: 300.0 * (key in store.kept) for key in house.keys[1:]}


def test_a_full_memory_stores_the_beginning_of_a_text() -> None:
    house = House(FULL)
    held = [house.memory.room(0, bytes([number])) for number in range(256 - 10)]
    assert None not in held
    house.allocator.release(house.computed(LENGTH))
    found = [house.memory.find(0, key) is not None for key in house.keys[1:]]
    assert sum(found) == 10 and found[:9] == [True] * 9
