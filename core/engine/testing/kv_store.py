"""Conformance suite for KV stores: what the core relies on before it fills blocks with what a store has.

.. code-block:: python

    class TestMine(KVStoreConformance):
        def make(self):
            return Mine(MineConfig(), build_context())
"""

from __future__ import annotations

import random
import threading
import time
from hashlib import sha256

import pytest

from engine.contracts.kv_store import KVStore, MemoryStore, RecordLayout, RetainingStore, StagedStore
from engine.testing.subject import Subject, Suite, filled

LAYOUT = RecordLayout(sha256(b"the suite").digest(), (4096, 1000))
OTHER = RecordLayout(sha256(b"another model").digest(), LAYOUT.num_bytes)
LONGEST_S = 20.0
"""Whatever is done in the background is done by then, on the slowest machine."""
RecordId = tuple[int, bytes]


def ids_of(count: int, text: str = "a text") -> list[RecordId]:
    """Records of a text, of both groups in turns."""
    return [(number % 2, sha256(f"{text} {number}".encode()).digest()) for number in range(count)]


def record_of(each: RecordId) -> bytes:
    """What belongs to an id."""
    group, key = each
    return random.Random(key + bytes([group])).randbytes(LAYOUT.num_bytes[group])


class KVStoreConformance:
    """Inherit, name the class ``Test...``, and implement :meth:`make`."""

    def make(self) -> KVStore:
        """A store that has room for 64 records of each group at least, not opened."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def opened(self, layout: RecordLayout = LAYOUT) -> KVStore:
        store, self.woken = self.make(), threading.Event()
        store.open(layout, self.woken.set)
        return store

    def staged(self, layout: RecordLayout = LAYOUT) -> StagedStore:
        store = self.opened(layout)
        if not isinstance(store, StagedStore):
            pytest.skip("its records are in memory")
        return store

    def memory(self) -> MemoryStore:
        store = self.opened()
        if not isinstance(store, MemoryStore):
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
        assert store.count(ids) == 0
        self.written(store, ids)
        assert store.count(ids) == 16 and store.count([]) == 0
        assert self.read(store, ids) == [record_of(each) for each in ids]
        assert self.woken.is_set(), "wake() was not called when the read ended"
        assert self.read(store, ids[5:2:-1]) == [record_of(each) for each in ids[5:2:-1]]
        assert list(store.poll()) == [], "a read ended twice"
        store.close(1.0)

    def test_a_missing_record_ends_what_is_found(self) -> None:
        store, ids = self.staged(), ids_of(8)
        self.written(store, [*ids[:3], *ids[4:]])
        assert store.count(ids) == 3 and store.count(ids[3:]) == 0
        assert self.read(store, ids) == [record_of(each) for each in ids[:3]]
        store.close(1.0)

    def test_groups_of_one_block_are_different_records(self) -> None:
        store, (_, key) = self.staged(), ids_of(1)[0]
        self.written(store, [(0, key)])
        assert store.count([(1, key)]) == 0
        self.written(store, [(1, key)])
        assert self.read(store, [(0, key), (1, key)]) == [record_of((0, key)), record_of((1, key))]
        store.close(1.0)

    def test_another_namespace_finds_nothing(self) -> None:
        store, ids = self.staged(), ids_of(4)
        self.written(store, ids)
        other = self.staged(OTHER)
        assert other.count(ids) == 0
        store.close(1.0)
        other.close(1.0)

    def test_nothing_is_found_after_clear(self) -> None:
        store, ids = self.staged(), ids_of(12)
        self.written(store, ids[:8])
        done = threading.Semaphore(0)
        late = [each for each in ids[8:] if store.put(*each, memoryview(bytearray(record_of(each))), done.release)]
        store.clear()
        assert all(store.count([each]) == 0 for each in ids)
        for _ in late:
            assert done.acquire(timeout=LONGEST_S), "done() was not called"
        assert all(store.count([each]) == 0 for each in ids), "found after clear(): what was being written"
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


def suite_for(subject: Subject) -> Suite:
    """For ``engine plugins check``."""
    return filled(subject, [KVStoreConformance], make=lambda self: subject.build())
