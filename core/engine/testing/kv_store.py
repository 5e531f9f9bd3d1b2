"""Conformance suite for KV stores: what the core relies on before it fills blocks with what a store has.

.. code-block:: python

    class TestMine(KVStoreConformance):
        def make(self):
            return Mine(MineConfig(), build_context())
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from operator import mul

import pytest

from engine.contracts.kv_store import (
    KVStore,
    LendingStore,
    Loan,
    MemoryStore,
    RecordId,
    RecordLayout,
    RetainingStagedStore,
    RetainingStore,
    SharedStore,
    StagedStore,
    StoreUsage,
)
from engine.testing.subject import Subject, Suite, filled

LAYOUT = RecordLayout(sha256(b"the suite").digest(), (4096, 1000))
OTHER = RecordLayout(sha256(b"another model").digest(), LAYOUT.num_bytes)
LONGEST_S = 20.0
"""Whatever is done in the background is done by then, on the slowest machine."""


def ids_of(count: int, text: str = "a text") -> list[RecordId]:
    """Records of a text, of both groups in turns."""
    return [(number % 2, sha256(f"{text} {number}".encode()).digest()) for number in range(count)]


def record_of(each: RecordId) -> bytes:
    """What belongs to an id."""
    group, key = each
    return random.Random(key + bytes([group])).randbytes(LAYOUT.num_bytes[group])


@contextmanager
def files_in_memory(count: int) -> Iterator[tuple[int, ...]]:
    """As a server makes them for its engines."""
    files = tuple([os.memfd_create(f"segment-{number}") for number in range(count)])
    try:
        yield files
    finally:
        for file in files:
            os.close(file)


def num_had(store: StagedStore, ids: Sequence[RecordId]) -> int:
    """How many of these records a store has."""
    return sum([store.has(*each) for each in ids])


def wait_until(seen: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + LONGEST_S
    while not seen():
        assert time.monotonic() < ends, what
        time.sleep(0.001)


class Memory:
    """See :class:`engine.contracts.kv_store.Lender`."""

    def __init__(self) -> None:
        self.records: dict[RecordId, bytearray] = {}
        self.num_lent = 0

    def has(self, group: int, key: bytes) -> bool:
        return (group, key) in self.records

    def lend(self, group: int, key: bytes) -> Loan | None:
        if not self.has(group, key):
            return None
        self.num_lent += 1
        return Loan(memoryview(self.records[group, key]), self._take_back)

    def _take_back(self) -> None:
        self.num_lent -= 1


class Pair:
    """Two stores that lend: what the memory behind one has, the other gets."""

    def __init__(self, gives: LendingStore, asks: LendingStore) -> None:
        self.gives, self.asks, self.memory = gives, asks, Memory()

    def open(self, layout: RecordLayout, wake: Callable[[], None]) -> None:
        for store in (self.gives, self.asks):
            store.open(layout, wake)
        self.gives.serve(self.memory)

    def usage(self) -> StoreUsage:
        return self.asks.usage()

    def clear(self) -> None:
        for store in (self.gives, self.asks):
            store.clear()

    def close(self, deadline_s: float) -> None:
        for store in (self.asks, self.gives):
            store.close(deadline_s)

    def has(self, group: int, key: bytes) -> bool:
        return self.asks.has(group, key)

    def put(self, group: int, key: bytes, record: memoryview, done: Callable[[], None]) -> bool:
        self.memory.records[group, key] = bytearray(record)
        ends, given = time.monotonic() + LONGEST_S, threading.Event()
        while not self.asks.has(group, key) and time.monotonic() < ends:
            if self.gives.put(group, key, memoryview(self.memory.records[group, key]), given.set):
                assert given.wait(LONGEST_S), "done() was not called"
            self.poll_both()
            time.sleep(0.002)
        done()
        return True

    def get(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> int:
        return self.asks.get(ids, into)

    def poll(self) -> Sequence[tuple[int, int]]:
        return self.poll_both()

    def poll_both(self) -> Sequence[tuple[int, int]]:
        assert not self.gives.poll(), "a read ended that was not begun"
        return self.asks.poll()


class KVStoreConformance:
    """Inherit, name the class ``Test...``, and implement :meth:`make`. Of stores that lend (:class:`LendingStore`) it
    makes two that find each other."""

    def make(self) -> KVStore:
        """A store that has room for 64 records of each group at least, not opened."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def opened(self, layout: RecordLayout = LAYOUT) -> KVStore:
        store, self.woken = self.make(), threading.Event()
        if isinstance(store, LendingStore):
            other = self.make()
            assert isinstance(other, LendingStore)
            store = Pair(store, other)
        store.open(layout, self.woken.set)
        return store

    def staged(self, layout: RecordLayout = LAYOUT) -> StagedStore:
        store = self.opened(layout)
        if not isinstance(store, StagedStore):
            store.close(1.0)
            pytest.skip("its records are in memory")
        return store

    def memory(self) -> MemoryStore:
        store = self.opened()
        if not isinstance(store, MemoryStore):
            store.close(1.0)
            pytest.skip("its records are not in memory")
        return store

    def test_it_fulfils_one_of_the_contracts(self) -> None:
        store = self.opened()
        assert isinstance(store, MemoryStore) != isinstance(store, StagedStore)
        usage = store.usage()
        assert usage.records == usage.num_bytes == 0 < usage.most_bytes, "something is there at the beginning"
        store.close(1.0)

    # Stores whose records take time ------------------------------------------------------------------------------

    def written(self, store: StagedStore, ids: list[RecordId]) -> None:
        """Put records and wait until they may be changed again."""
        done = threading.Semaphore(0)
        accepted = [each for each in ids if store.put(*each, memoryview(bytearray(record_of(each))), done.release)]
        assert accepted == ids, "few records on an idle store are wanted"
        for _ in accepted:
            assert done.acquire(timeout=LONGEST_S), "done() was not called"

    def read(self, store: StagedStore, ids: list[RecordId]) -> list[bytes]:
        """What can be read of records, up to the first that is not there."""
        buffers = [bytearray(LAYOUT.num_bytes[group]) for group, _ in ids]
        self.woken.clear()
        job, ends = store.get(ids, [memoryview(buffer) for buffer in buffers]), time.monotonic() + LONGEST_S
        while time.monotonic() < ends:
            for found, good in store.poll():
                assert found == job, "a read ended that was not begun"
                return [bytes(buffer) for buffer in buffers[:good]]
            self.woken.wait(0.1)
        raise AssertionError("the read did not end")

    def test_what_was_put_is_got_back(self) -> None:
        store, ids = self.staged(), ids_of(16)
        assert not any(store.has(*each) for each in ids)
        self.written(store, ids)
        assert all(store.has(*each) for each in ids)
        assert self.read(store, ids) == [record_of(each) for each in ids]
        assert self.woken.is_set(), "wake() was not called when the read ended"
        assert self.read(store, ids[5:2:-1]) == [record_of(each) for each in ids[5:2:-1]]
        assert list(store.poll()) == [], "a read ended twice"
        store.close(1.0)

    def test_a_missing_record_ends_what_is_found(self) -> None:
        store, ids = self.staged(), ids_of(8)
        self.written(store, [*ids[:3], *ids[4:]])
        assert [store.has(*each) for each in ids] == [True] * 3 + [False] + [True] * 4
        assert self.read(store, ids) == [record_of(each) for each in ids[:3]]
        store.close(1.0)

    def test_groups_of_one_block_are_different_records(self) -> None:
        store, (_, key) = self.staged(), ids_of(1)[0]
        self.written(store, [(0, key)])
        assert not store.has(1, key)
        self.written(store, [(1, key)])
        assert self.read(store, [(0, key), (1, key)]) == [record_of((0, key)), record_of((1, key))]
        store.close(1.0)

    def test_another_namespace_finds_nothing(self) -> None:
        store, ids = self.staged(), ids_of(4)
        self.written(store, ids)
        other = self.staged(OTHER)
        assert not any(other.has(*each) for each in ids)
        store.close(1.0)
        other.close(1.0)

    def test_nothing_is_found_after_clear(self) -> None:
        store, ids = self.staged(), ids_of(12)
        self.written(store, ids[:8])
        done = threading.Semaphore(0)
        late = [each for each in ids[8:] if store.put(*each, memoryview(bytearray(record_of(each))), done.release)]
        store.clear()
        assert not any(store.has(*each) for each in ids)
        for _ in late:
            assert done.acquire(timeout=LONGEST_S), "done() was not called"
        assert not any(store.has(*each) for each in ids), "found after clear(): what was being written"
        assert store.usage().records == 0
        self.written(store, ids[:2])
        assert self.read(store, ids[:2]) == [record_of(each) for each in ids[:2]]
        store.close(1.0)

    def test_bytes_may_be_changed_once_it_is_done(self) -> None:
        store, (each, *_), done = self.staged(), ids_of(1), threading.Event()
        own = bytearray(record_of(each))
        assert store.put(*each, memoryview(own), done.set)
        assert done.wait(LONGEST_S)
        own[:] = bytes(len(own))
        assert self.read(store, [each]) == [record_of(each)]
        store.close(1.0)

    def test_what_a_tenant_retains_goes_after_its_others_and_locks_nothing(self) -> None:
        store, kept, missing = self.staged(), ids_of(8, "kept"), ids_of(2, "never written")
        if not isinstance(store, RetainingStagedStore):
            store.close(1.0)
            pytest.skip("it retains nothing")

        def retain(ids: list[RecordId], seconds: float) -> None:
            for group in range(2):
                store.retain(b"t" * 32, group, [key for each, key in ids if each == group], seconds)

        self.written(store, kept)
        retain([*kept, *missing], 3600.0)
        assert num_had(store, missing) == 0, "found, and never written"
        for number in range(10):
            ids = ids_of(40, f"text {number}")
            self.written(store, ids)
            retain(ids, 0.0)
            assert num_had(store, ids) == 40, "no room beside retained records"
        assert self.read(store, kept) == [record_of(each) for each in kept]
        for number in range(10):
            ids = ids_of(40, f"retained text {number}")
            self.written(store, ids)
            retain(ids, 3600.0)
            assert num_had(store, ids) == 40, "no room where all is retained"
        store.clear()
        assert num_had(store, kept) == store.usage().records == 0, "found after clear()"
        store.close(1.0)

    def test_what_another_memory_has_lost_is_a_miss_and_all_that_was_lent_comes_back(self) -> None:
        store, ids = self.staged(), ids_of(8)
        if not isinstance(store, Pair):
            store.close(1.0)
            pytest.skip("it does not lend")
        self.written(store, ids)
        del store.memory.records[ids[4]]
        assert self.read(store, ids) == [record_of(each) for each in ids[:4]]
        assert not store.has(*ids[4]), "it is not asked for again"
        ends = time.monotonic() + LONGEST_S
        while store.memory.num_lent and time.monotonic() < ends:
            store.poll()
            time.sleep(0.002)
        assert store.memory.num_lent == 0, "records are still held"
        store.close(1.0)

    # Stores whose records are in memory --------------------------------------------------------------------------

    def filled(self, store: MemoryStore, each: RecordId) -> int | None:
        """The slot of a record that was just written; ``None``: there is no room."""
        group, key = each
        slot = store.room(group, key)
        if slot is None:
            return None
        assert store.find(group, key) is None, "found before it was whole"
        self.slot_of(store, group, slot)[:] = record_of(each)
        store.publish(group, slot)
        return slot

    def slot_of(self, store: MemoryStore, group: int, slot: int) -> memoryview:
        size = LAYOUT.num_bytes[group]
        return store.memory(group)[slot * size : (slot + 1) * size]

    def test_records_are_found_where_they_were_written(self) -> None:
        store, ids = self.memory(), ids_of(40)
        assert all(len(store.memory(group)) % size == 0 for group, size in enumerate(LAYOUT.num_bytes))
        slots = [self.filled(store, each) for each in ids]
        assert len({*slots[::2]}) == len({*slots[1::2]}) == 20, "two records in one slot"
        for each in ids:
            slot = store.find(*each)
            assert slot is not None and bytes(self.slot_of(store, each[0], slot)) == record_of(each)
        assert store.usage().records == 40

    def test_a_bound_counts_what_all_ranks_have(self) -> None:
        self.memory()  # or it is skipped
        total = tuple([3 * size for size in LAYOUT.num_bytes])
        store = self.opened(RecordLayout(LAYOUT.namespace, LAYOUT.num_bytes, total))
        assert isinstance(store, MemoryStore)
        slots = [len(store.memory(group)) // size for group, size in enumerate(LAYOUT.num_bytes)]
        assert all(slots) and sum(map(mul, slots, total)) <= store.most_bytes

    def test_held_records_stay_whatever_comes(self) -> None:
        store, ids = self.memory(), ids_of(2)
        held = [self.filled(store, each) for each in ids]
        assert None not in held
        for (group, _), slot in zip(ids, held, strict=True):
            assert slot is not None
            store.hold(group, [slot])
            store.hold(group, [slot])
            store.let_go(group, [slot])
        most = len(store.memory(0)) // LAYOUT.num_bytes[0]
        for number, each in enumerate(ids_of(2 * most + 20, "others")):
            assert self.filled(store, each) is not None, f"no room for record {number} beside two that are held"
        for each, slot in zip(ids, held, strict=True):
            assert store.find(*each) == slot is not None
            assert bytes(self.slot_of(store, each[0], slot)) == record_of(each)
        assert store.usage().num_bytes <= store.usage().most_bytes

    def test_there_is_no_room_while_all_is_held(self) -> None:
        store = self.memory()
        for each in ids_of(2 * (len(store.memory(0)) // LAYOUT.num_bytes[0]))[::2]:
            slot = self.filled(store, each)
            assert slot is not None
            store.hold(0, [slot])
        assert store.room(0, b"another") is None
        store.let_go(0, [0])
        assert store.room(0, b"another") == 0

    def test_what_is_retained_locks_nothing(self) -> None:
        store = self.memory()
        if not isinstance(store, RetainingStore):
            return
        most = len(store.memory(0)) // LAYOUT.num_bytes[0]
        for number, each in enumerate(ids_of(4 * most)[::2]):
            slot = self.filled(store, each)
            assert slot is not None, f"no room for record {number} beside retained ones"
            store.retain(b"tenant", 0, [slot], 3600.0)
            assert store.find(*each) == slot and bytes(self.slot_of(store, 0, slot)) == record_of(each)

    def test_an_abandoned_slot_is_free_again(self) -> None:
        store, (each, *_) = self.memory(), ids_of(1)
        most = len(store.memory(0)) // LAYOUT.num_bytes[0]
        for _ in range(3 * most):
            slot = store.room(*each)
            assert slot is not None
            store.abandon(0, slot)
        assert store.find(*each) is None

    def test_nothing_in_memory_is_found_after_clear(self) -> None:
        store, ids = self.memory(), ids_of(6)
        slots = [self.filled(store, each) for each in ids[:4]]
        assert slots[0] is not None
        store.hold(0, [slots[0]])
        coming = store.room(*ids[4])
        assert coming is not None
        store.clear()
        store.publish(0, coming)
        assert [store.find(*each) for each in ids] == [None] * 6
        assert bytes(self.slot_of(store, 0, slots[0])) == record_of(ids[0]), "a held record was changed"
        store.let_go(0, [slots[0]])
        assert self.filled(store, ids[0]) is not None

    # Stores whose memory outlives their engine -------------------------------------------------------------------

    def sharing(self, files: Sequence[int], own: int, layout: RecordLayout = LAYOUT) -> SharedStore:
        """Of the engine with this number."""
        store = self.make()
        if not isinstance(store, SharedStore):
            pytest.skip("its memory ends with its engine")
        self.woken = threading.Event()
        store.share(files, own)
        store.open(layout, self.woken.set)
        if (others := store.others()) is not None:
            others.open(layout, self.woken.set)
        return store

    def copied(self, store: SharedStore, ids: list[RecordId]) -> int:
        """How many of these records of other engines were read and published, from the first on."""
        others = store.others()
        assert others is not None
        slots = [store.room(*each) for each in ids]
        into = [self.slot_of(store, group, slot or 0) for (group, _), slot in zip(ids, slots, strict=True)]
        job, ended = others.get(ids, into), list[tuple[int, int]]()

        def has_ended() -> bool:
            ended.extend(others.poll())
            return bool(ended)

        wait_until(has_ended, "the read did not end")
        assert [found for found, _ in ended] == [job]
        for number, ((group, _), slot) in enumerate(zip(ids, slots, strict=True)):
            assert slot is not None
            (store.publish if number < ended[0][1] else store.abandon)(group, slot)
        return ended[0][1]

    def test_slots_lie_in_the_file_where_other_ranks_look_for_them(self) -> None:
        with files_in_memory(2) as files:
            store = self.sharing(files, 1)
            for group, key in ids_of(6):
                slot, size = self.filled(store, (group, key)), LAYOUT.num_bytes[group]
                assert slot is not None
                assert os.pread(files[1], size, store.slot_offsets()[group] + slot * size) == record_of((group, key))
            store.close(1.0)

    def test_an_engine_finds_what_the_one_before_it_left(self) -> None:
        ids = ids_of(12)
        with files_in_memory(1) as files:
            first = self.sharing(files, 0)
            assert first.others() is None, "there is one engine"
            for each in ids[:10]:
                self.filled(first, each)
            assert first.room(*ids[10]) is not None
            first.close(LONGEST_S)
            then = self.sharing(files, 0)
            assert then.usage().records == 10
            for each in ids[:10]:
                slot = then.find(*each)
                assert slot is not None and bytes(self.slot_of(then, each[0], slot)) == record_of(each)
            assert then.find(*ids[10]) is None, "it was not whole"
            assert self.filled(then, ids[11]) is not None
            then.close(LONGEST_S)
            other = self.sharing(files, 0, OTHER)
            assert [other.find(*each) for each in ids] == [None] * 12
            other.close(LONGEST_S)

    def test_engines_read_what_others_have(self) -> None:
        ids = ids_of(8)
        with files_in_memory(2) as files:
            stranger, reader = self.sharing(files, 0, OTHER), self.sharing(files, 1)
            others = reader.others()
            assert others is not None and others is reader.others()
            for each in ids:
                self.filled(stranger, each)
            stranger.close(LONGEST_S)
            assert num_had(others, ids) == 0, "another namespace"
            writer = self.sharing(files, 0)
            assert num_had(others, ids) == 0
            for each in ids:
                self.filled(writer, each)
            wait_until(lambda: num_had(others, ids) == 8, "what another engine has is not found")
            assert num_had(others, ids_of(1, "another")) == 0
            assert [reader.find(*each) for each in ids] == [None] * 8, "found before it was copied"
            assert self.copied(reader, ids) == 8
            for each in ids:
                slot = reader.find(*each)
                assert slot is not None and bytes(self.slot_of(reader, each[0], slot)) == record_of(each)
            for store in (writer, reader):
                store.close(LONGEST_S)

    def test_a_record_that_another_engine_has_changed_is_missed(self) -> None:
        ids = ids_of(4)
        with files_in_memory(2) as files:
            writer, reader = self.sharing(files, 0), self.sharing(files, 1)
            slots = [self.filled(writer, each) for each in ids]
            others = reader.others()
            assert others is not None and slots[2] is not None
            wait_until(lambda: num_had(others, ids) == 4, "what another engine has is not found")
            self.slot_of(writer, ids[2][0], slots[2])[7] ^= 1
            assert self.copied(reader, ids) == 2
            assert reader.find(*ids[2]) is None and others.usage().faults == 1
            for store in (writer, reader):
                store.close(LONGEST_S)

    def test_no_engine_finds_what_another_has_cleared(self) -> None:
        ids = ids_of(4)
        with files_in_memory(2) as files:
            writer, reader = self.sharing(files, 0), self.sharing(files, 1)
            for each in ids:
                self.filled(writer, each)
            others = reader.others()
            assert others is not None
            wait_until(lambda: num_had(others, ids) == 4, "what another engine has is not found")
            assert self.copied(reader, ids[:1]) == 1
            assert not others.forgot()
            writer.clear()
            assert num_had(others, ids) == 0
            assert others.forgot(), "what was computed from them may be wrong"
            assert not others.forgot(), "said twice"
            self.filled(writer, ids[1])
            wait_until(lambda: num_had(others, ids[1:2]) == 1, "what came after clear() is not found")
            reader.clear()
            others.clear()
            assert num_had(others, ids[1:2]) == 0, "what was there when this engine cleared all is found"
            writer.clear()
            writer.close(LONGEST_S)
            assert self.sharing(files, 0).usage().records == 0, "cleared, and left to the next engine"
            reader.close(LONGEST_S)


def suite_for(subject: Subject) -> Suite:
    """For ``engine plugins check``."""
    return filled(subject, [KVStoreConformance], make=lambda self: subject.build())
