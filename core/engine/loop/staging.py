"""Records on their way to memory, from a disk or another machine, while their request waits; and on their way back.

A waiting request holds no row and no block meanwhile. It is passed over until its records are there or its deadline is
over, and is then computed as far as they do not reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from engine.contracts.kv_store import MemoryStore, StagedStore

FIRST_RATE = 0.3e9
"""Bytes a second that a store is believed to give before it was measured."""
LAST_WEIGHT = 0.3
"""Of the last read, in the moving mean of the rate."""
LATEST = 0.5
"""Of the time to compute the same tokens: how much longer than expected a read may take; a late one costs that."""
MOST_SHARE = 0.25
"""Of memory: what is being read at once, at most."""

RecordId = tuple[int, bytes]


@dataclass(slots=True)
class Read:
    """Records that a request waits for. They are held until it is over."""

    ids: Sequence[RecordId]
    slots: Sequence[int]
    num_bytes: int
    begun_s: float
    deadline_s: float
    done: bool = False
    over: bool = False
    """Nobody waits for it any more."""
    held: list[tuple[int, int]] = field(default_factory=list)
    """Group and slot."""

    def waits(self, now_s: float) -> bool:
        return not (self.done or self.over) and now_s < self.deadline_s


class Staging:
    """The stores behind the first, and what is read from and written to them."""

    def __init__(
        self,
        memory: MemoryStore,
        stores: Sequence[StagedStore],
        num_bytes: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        """``num_bytes``: of a record, by group."""
        self._memory = memory
        self.stores = tuple(stores)
        self._num_bytes = tuple(num_bytes)
        self._most_bytes = MOST_SHARE * memory.usage().most_bytes
        self._clock = clock
        self._rates = [FIRST_RATE] * len(stores)
        self._reads: dict[tuple[int, int], Read] = {}
        self._in_flight = 0
        self._written: SimpleQueue[tuple[int, int]] = SimpleQueue()

    def read(self, number: int, ids: Sequence[RecordId], compute_s: float) -> Read | None:
        """Bring records from a store, if that is sooner than to compute them, which takes ``compute_s``."""
        num_bytes = sum([self._num_bytes[group] for group, _ in ids])
        expected_s = (self._in_flight + num_bytes) / self._rates[number]
        if expected_s >= compute_s or self._in_flight + num_bytes > self._most_bytes:
            return None
        slots = []
        for group, key in ids:
            slot = self._memory.room(group, key)
            if slot is None:
                break
            slots.append(slot)
        if len(slots) < len(ids):
            for (group, _), slot in zip(ids, slots, strict=False):
                self._memory.abandon(group, slot)
            return None
        now = self._clock()
        read = Read(ids, slots, num_bytes, now, now + expected_s + LATEST * compute_s)
        job = self.stores[number].get(
            ids, [self._record(group, slot) for (group, _), slot in zip(ids, slots, strict=True)]
        )
        self._reads[number, job] = read
        self._in_flight += num_bytes
        return read

    def write(self, group: int, key: bytes, slot: int) -> None:
        """Have every store keep a record that memory has; it is held until they have."""
        for store in self.stores:
            self._memory.hold(group, [slot])
            if not store.put(group, key, self._record(group, slot), lambda: self._written.put((group, slot))):
                self._memory.let_go(group, [slot])

    def poll(self) -> None:
        """Take in what stores have done."""
        for number, store in enumerate(self.stores):
            for job, good in store.poll():
                self._take(number, self._reads.pop((number, job)), good)
        while True:
            try:
                group, slot = self._written.get_nowait()
            except Empty:
                return
            self._memory.let_go(group, [slot])

    def give_up(self, read: Read) -> None:
        """Nobody waits for it any more."""
        read.over = True
        for group, slot in read.held:
            self._memory.let_go(group, [slot])
        read.held.clear()

    def _take(self, number: int, read: Read, good: int) -> None:
        read.done = True
        self._in_flight -= read.num_bytes
        for at, ((group, key), slot) in enumerate(zip(read.ids, read.slots, strict=True)):
            if at >= good:
                self._memory.abandon(group, slot)
                continue
            self._memory.publish(group, slot)
            if not read.over and self._memory.find(group, key) == slot:
                self._memory.hold(group, [slot])
                read.held.append((group, slot))
        if good == len(read.ids):
            rate = read.num_bytes / max(1e-6, self._clock() - read.begun_s)
            self._rates[number] += LAST_WEIGHT * (rate - self._rates[number])

    def _record(self, group: int, slot: int) -> memoryview:
        size = self._num_bytes[group]
        return self._memory.memory(group)[slot * size : (slot + 1) * size]
