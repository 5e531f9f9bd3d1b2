"""Records on their way: who waits, for how long, and what a late, short or missing read comes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.contracts.kv_store import RecordLayout, StoreUsage
from engine.kv.checked_memory import CheckedMemory
from engine.loop.staging import FIRST_RATE, LATEST, Read, Staging
from engine.plugin_guard.calls import PluginError
from engine.testing.context import build_context
from engine_plugins.kv_store.host import HostConfig, HostStore

SIZE = 1 << 12
SLOTS = 256
IDS = [(0, bytes([number]) * 32) for number in range(8)]
EXPECTED_S = len(IDS) * SIZE / FIRST_RATE


class SlowStore:
    """Reads end when a test says so."""

    def __init__(self) -> None:
        self.begun: list[Sequence[memoryview]] = []
        self.ended: list[tuple[int, int]] = []
        self.puts: list[Callable[[], None]] = []
        self.wanted = True

    def open(self, layout: RecordLayout, wake: Callable[[], None]) -> None:
        raise AssertionError("it is not opened here")

    def usage(self) -> StoreUsage:
        return StoreUsage(0, 0, 1)

    def clear(self) -> None:
        raise AssertionError("nothing is cleared here")

    def close(self, deadline_s: float) -> None:
        raise AssertionError("nothing is closed here")

    def has(self, group: int, key: bytes) -> bool:
        return True

    def put(self, group: int, key: bytes, record: memoryview, done: Callable[[], None]) -> bool:
        self.puts += [done] * self.wanted
        return self.wanted

    def get(self, ids: Sequence[tuple[int, bytes]], into: Sequence[memoryview]) -> int:
        self.begun.append(into)
        return len(self.begun) - 1

    def poll(self) -> Sequence[tuple[int, int]]:
        ended, self.ended = self.ended, []
        return ended


class House:
    """Memory, a slow store, and a clock."""

    def __init__(self) -> None:
        self.now, self.store = 100.0, SlowStore()
        self.memory = HostStore(HostConfig(max_bytes=SLOTS * SIZE), build_context())
        self.memory.open(RecordLayout(bytes(32), (SIZE,)), lambda: None)
        self.staging = Staging(CheckedMemory(self.memory, [SIZE]), [self.store], [SIZE], lambda: self.now)

    def read(self, compute_s: float = 1.0) -> Read | None:
        return self.staging.read(0, IDS, compute_s)

    def ends(self, job: int, good: int) -> None:
        for buffer in self.store.begun[job][:good]:
            buffer[:] = b"r" * SIZE
        self.store.ended.append((job, good))
        self.staging.poll()
        self.memory.check()

    def found(self) -> int:
        return sum(self.memory.find(*each) is not None for each in IDS)

    def fill_up(self) -> int:
        """Write other records as long as there is room. Returns how many."""
        for number in range(2 * SLOTS):
            slot = self.memory.room(0, number.to_bytes(32, "big"))
            if slot is None:
                return number
            self.memory.publish(0, slot)
        return 2 * SLOTS


def test_records_that_came_in_time_are_held_until_nobody_waits() -> None:
    house = House()
    read = house.read()
    assert read is not None and read.waits(house.now) and house.found() == 0
    house.ends(0, len(IDS))
    assert read.done and not read.waits(house.now) and house.found() == len(IDS)
    house.fill_up()
    assert house.found() == len(IDS), "a record that somebody waits for was evicted"
    house.staging.give_up(read)
    house.fill_up()
    assert house.found() == 0


def test_what_is_sooner_computed_is_not_read() -> None:
    house = House()
    assert house.read(compute_s=0.9 * EXPECTED_S) is None and house.store.begun == []
    assert house.read(compute_s=1.1 * EXPECTED_S) is not None


def test_a_read_may_take_as_long_as_others_are_computed_that_come_before() -> None:
    house = House()
    assert house.staging.read(0, IDS, 0.1 * EXPECTED_S, 0.8 * EXPECTED_S) is None
    read = house.staging.read(0, IDS, 0.1 * EXPECTED_S, 2.0 * EXPECTED_S)
    assert read is not None and read.deadline_s == pytest.approx(house.now + (2.0 + LATEST * 0.1) * EXPECTED_S)


@pytest.mark.parametrize(("after_s", "longer_s"), [(0.0, 0.0), (1.5, 0.5 + LATEST), (2.5, LATEST)])
def test_when_nobody_is_computed_before_it_a_request_waits_no_longer_than_that_pays(
    after_s: float, longer_s: float
) -> None:
    """``after_s``: of a read that was expected to take 2 s and of a request that takes 1 s to compute."""
    house = House()
    house.staging._rates[0] = len(IDS) * SIZE / 2.0
    read = house.staging.read(0, IDS, 1.0, 5.0)
    assert read is not None and read.deadline_s == house.now + 5.0 + LATEST
    house.now += after_s
    for _ in range(2):
        read.comes_next(house.now)
        assert read.deadline_s == pytest.approx(house.now + longer_s)
    assert read.waits(house.now) == (longer_s > 0.0)


def test_a_store_that_was_slow_once_is_measured_again() -> None:
    house = House()
    assert house.read() is not None
    house.now += 1000.0
    house.staging.rest()
    house.ends(0, len(IDS))
    house.memory.clear()
    needed = EXPECTED_S * 1.01
    tries = next(number for number in range(1000) if house.read(needed) is not None)
    assert 10 < tries < 30


def test_nobody_waits_longer_than_the_deadline() -> None:
    house = House()
    read = house.read(compute_s=2.0)
    assert read is not None
    house.now += EXPECTED_S + LATEST * 2.0 - 1e-3
    assert read.waits(house.now)
    house.now += 2e-3
    assert not read.waits(house.now)
    house.staging.give_up(read)
    house.ends(0, len(IDS))
    assert house.found() == len(IDS), "what came late is of use to the next"
    house.fill_up()
    assert house.found() == 0, "and held by nobody"


def test_a_short_read_is_what_it_has() -> None:
    house = House()
    read = house.read()
    house.ends(0, 3)
    assert read is not None and read.done and house.found() == 3
    house.staging.give_up(read)


def test_reads_in_flight_are_bounded_and_make_the_next_one_later() -> None:
    house = House()
    assert house.read() is not None
    assert house.read(compute_s=1.5 * EXPECTED_S) is None, "it would wait for the first one"
    begun = 1
    while house.read(compute_s=100.0) is not None:
        begun += 1
    assert begun * len(IDS) == SLOTS // 4
    house.ends(0, 0)
    assert house.read(compute_s=100.0) is not None


def test_without_room_nothing_is_read_and_nothing_is_lost() -> None:
    house = House()
    house.fill_up()
    house.memory.hold(0, list(range(SLOTS - 3)))
    assert house.read() is None and house.store.begun == []
    house.memory.check()


@pytest.mark.parametrize("rests", [True, False])
def test_the_rate_is_learnt(rests: bool) -> None:
    house = House()
    for job in range(40):
        read = house.read(compute_s=100.0)
        assert read is not None
        house.now += 0.97
        house.staging.rest() if rests else house.staging.poll()
        house.now += 0.03
        house.ends(job, len(IDS))
        house.staging.give_up(read)
    assert house.read(compute_s=0.9) is None and house.read(compute_s=1.2) is not None


def test_how_long_a_step_takes_says_nothing_of_the_rate() -> None:
    house = House()
    for job in range(40):
        read = house.read()
        assert read is not None, "reads seem slow that ended during a long step"
        house.now += 1.0
        house.ends(job, len(IDS))
        house.staging.give_up(read)


def test_a_record_is_held_while_it_is_written_on() -> None:
    house = House()
    slot = house.memory.room(*IDS[0])
    assert slot is not None
    house.memory.publish(0, slot)
    house.staging.write(*IDS[0], slot)
    house.fill_up()
    assert house.memory.find(*IDS[0]) == slot
    house.store.puts[0]()
    house.staging.poll()
    house.fill_up()
    assert house.memory.find(*IDS[0]) is None


def test_a_record_that_no_store_wants_is_not_held() -> None:
    house = House()
    house.store.wanted = False
    slot = house.memory.room(*IDS[0])
    assert slot is not None
    house.memory.publish(0, slot)
    house.staging.write(*IDS[0], slot)
    house.fill_up()
    assert house.memory.find(*IDS[0]) is None


def test_what_a_store_did_not_want_is_offered_once_more_when_it_is_used() -> None:
    house, key = House(), IDS[0][1]
    slot = house.memory.room(*IDS[0])
    assert slot is not None
    house.memory.publish(0, slot)
    house.store.wanted = False
    house.staging.write(*IDS[0], slot)
    house.store.wanted = True
    house.staging.offer_again(0, [bytes(32), key])
    assert len(house.store.puts) == 1 and house.staging.tallies[0].stored_bytes == SIZE
    house.staging.offer_again(0, [key])
    assert len(house.store.puts) == 1, "it has it"


def test_what_is_too_much_at_once_is_offered_when_it_is_used_again() -> None:
    house, keys = House(), [key for _, key in IDS]
    house.store.wanted = False
    for each in IDS:
        slot = house.memory.room(*each)
        assert slot is not None
        house.memory.publish(0, slot)
        house.staging.write(*each, slot)
    put, before, counts = house.store.put, [0], []

    def three(group: int, key: bytes, record: memoryview, done: Callable[[], None]) -> bool:
        house.store.wanted = len(house.store.puts) < before[0] + 3
        return put(group, key, record, done)

    house.store.put = three  # type: ignore[method-assign]
    for _ in range(3):
        before[0] = len(house.store.puts)
        house.staging.offer_again(0, keys)
        counts.append(len(house.store.puts))
    assert counts == [3, 6, 8]


def test_requests_that_compute_what_a_store_has_are_counted_by_reason() -> None:
    house = House()
    house.read(compute_s=0.9 * EXPECTED_S)
    late, short = house.read(), house.read()
    assert late is not None and short is not None
    house.ends(1, 3)
    house.now += 100.0
    house.staging.give_up(late)
    house.staging.give_up(late)
    house.ends(0, len(IDS))
    house.staging.give_up(short)
    skipped = house.staging.tallies[0].skipped
    assert {reason: count for reason, count in skipped.items() if count} == {"slower": 1, "late": 1, "incomplete": 1}
    assert house.staging.tallies[0].loaded_bytes == (len(IDS) + 3) * SIZE and late.waited_ms == 100_000.0


def test_what_is_being_written_leaves_room_for_the_rest() -> None:
    """A store that never ends what it writes."""
    house = House()
    for number in range(SLOTS):
        each = (0, number.to_bytes(32, "big"))
        slot = house.memory.room(*each)
        assert slot is not None
        house.memory.publish(0, slot)
        house.staging.write(*each, slot)
    assert len(house.store.puts) == SLOTS // 2
    for done in house.store.puts:
        done()
    house.staging.poll()
    house.staging.write(*each, slot)
    assert len(house.store.puts) == SLOTS // 2 + 1


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        ([(7, 1)], r"ended read 7, which was not begun or has ended"),
        ([(0, 8), (0, 8)], r"ended read 0, which was not begun or has ended"),
        ([(0, 9)], r"says that 9 of 8 records are there"),
        ([(0, -1)], r"says that -1 of 8 records are there"),
        ([0], r"returned \[0\], expected pairs"),
        ([(0, None)], r"returned .*, expected pairs"),
        (None, r"returned None, expected pairs"),
    ],
)
def test_a_store_that_ends_what_it_should_not_is_reported(ended: Any, words: str) -> None:
    house = House()
    assert house.read() is not None
    house.store.ended = ended
    with pytest.raises(PluginError, match=rf"SlowStore: poll\(\) {words}"):
        house.staging.poll()


@pytest.mark.parametrize("job", [0, None, "1", True])
def test_a_read_without_a_number_of_its_own_is_reported(job: Any) -> None:
    """What came for one would count for the other."""
    house = House()
    assert house.read() is not None
    house.store.get = lambda ids, into: job  # type: ignore[method-assign]
    with pytest.raises(PluginError, match=r"SlowStore: get\(\) returned .*, expected a number of this read"):
        house.read(compute_s=100.0)


@pytest.mark.parametrize("found", [1, None])
def test_a_store_that_does_not_say_whether_it_has_a_record_is_reported(found: Any) -> None:
    house = House()
    house.store.has = lambda group, key: found  # type: ignore[method-assign]
    with pytest.raises(PluginError, match=r"SlowStore: has\(\) returned .*, expected True or False"):
        house.staging.has(house.store, *IDS[0])


def test_a_write_that_ends_twice_is_reported() -> None:
    """Somebody else may hold the record by then."""
    house = House()
    slot = house.memory.room(*IDS[0])
    assert slot is not None
    house.memory.publish(0, slot)
    house.staging.write(*IDS[0], slot)
    house.memory.hold(0, [slot])
    house.store.puts[0]()
    house.store.puts[0]()
    with pytest.raises(PluginError, match=r"SlowStore: put\(\) called done\(\) twice"):
        house.staging.poll()
    house.fill_up()
    assert house.memory.find(*IDS[0]) == slot


def test_a_write_of_which_nobody_knows_whether_it_is_wanted_is_reported() -> None:
    house = House()
    house.store.put = lambda *args: None  # type: ignore[assignment, return-value]
    with pytest.raises(PluginError, match=r"SlowStore: put\(\) returned None, expected True or False"):
        house.staging.write(*IDS[0], 0)
