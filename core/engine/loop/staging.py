"""Records on their way to memory, from a disk or another machine, while their request waits; and on their way back.

A waiting request holds no row and no block meanwhile. It is passed over until its records are there or its deadline is
over, and is then computed as far as they do not reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue

from engine.contracts.kv_store import StagedStore
from engine.kv.checked_memory import CheckedMemory
from engine.plugin_guard.calls import PluginError, contract_error, quote

FIRST_RATE = 0.3e9
"""Bytes a second that a store is believed to give before it was measured."""
LAST_WEIGHT = 0.3
"""Of the last read, in the moving mean of the rate."""
LATEST = 0.5
"""Of the time to compute the same tokens: how much longer than expected a read may take; a late one costs that."""
MOST_SHARE = 0.25
"""Of memory: what is being read at once, at most."""
MOST_WRITTEN = 0.5
"""Of memory: what is held at once because it is being written, at most."""

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
        memory: CheckedMemory,
        stores: Sequence[StagedStore],
        num_bytes: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        """``num_bytes``: of a record, by group."""
        self._memory = memory
        self.stores = tuple(stores)
        self._num_bytes = tuple(num_bytes)
        most_bytes = memory.store.usage().most_bytes
        self._most_bytes, self._most_written = MOST_SHARE * most_bytes, MOST_WRITTEN * most_bytes
        self._clock = clock
        self._rates = [FIRST_RATE] * len(stores)
        self._polled_s, self._rests = clock(), False
        self._reads: dict[tuple[int, int], Read] = {}
        self._in_flight = 0
        self._numbers = count()
        self._writes: dict[int, tuple[int, int]] = {}
        """By number: group and slot of a record that a store is writing."""
        self._bytes_written = 0
        """Of these."""
        self._written: SimpleQueue[tuple[StagedStore, int]] = SimpleQueue()

    def count(self, store: StagedStore, ids: Sequence[RecordId]) -> int:
        """As :meth:`StagedStore.count`."""
        found = store.count(ids)
        if type(found) is not int or not 0 <= found <= len(ids):
            raise contract_error(store, "count", f"returned {quote(found)}, expected 0 to {len(ids)} records")
        return found

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
        if type(job) is not int or (number, job) in self._reads:
            raise contract_error(self.stores[number], "get", f"returned {quote(job)}, expected a number of this read")
        self._reads[number, job] = read
        self._in_flight += num_bytes
        return read

    def write(self, group: int, key: bytes, slot: int) -> None:
        """Have every store keep a record that memory has; it is held until they have."""
        for store in self.stores:
            if self._bytes_written + self._num_bytes[group] > self._most_written:
                return
            number = next(self._numbers)
            self._memory.hold(group, [slot])
            self._writes[number] = group, slot
            self._bytes_written += self._num_bytes[group]
            wanted = store.put(group, key, self._record(group, slot), partial(self._written.put, (store, number)))
            if type(wanted) is not bool:
                raise contract_error(store, "put", f"returned {quote(wanted)}, expected True or False")
            if not wanted:
                self._end_write(store, number)

    def rest(self) -> None:
        """The loop sleeps until a store wakes it."""
        self._rests = True

    def poll(self) -> None:
        """Take in what stores have done."""
        now = self._clock()
        for number, store in enumerate(self.stores):
            for job, good in self._ended(store):
                read = self._reads.pop((number, job), None)
                if read is None:
                    raise self._broken_poll(store, f"ended read {job}, which was not begun or has ended")
                if not 0 <= good <= len(read.ids):
                    raise self._broken_poll(store, f"says that {good} of {len(read.ids)} records are there")
                self._take(number, read, good)
        self._polled_s, self._rests = now, False
        while True:
            try:
                store, written = self._written.get_nowait()
            except Empty:
                return
            self._end_write(store, written)

    def _ended(self, store: StagedStore) -> Sequence[tuple[int, int]]:
        ended = store.poll()
        pairs = ended if isinstance(ended, list | tuple) else (None,)
        if not all(isinstance(pair, list | tuple) and [*map(type, pair)] == [int, int] for pair in pairs):
            raise self._broken_poll(store, f"returned {quote(ended)}, expected pairs of a read and a number of records")
        return ended

    def _broken_poll(self, store: StagedStore, problem: str) -> PluginError:
        return contract_error(store, "poll", problem)

    def _end_write(self, store: StagedStore, number: int) -> None:
        if number not in self._writes:
            raise contract_error(store, "put", "called done() twice, or for a record that it did not want")
        group, slot = self._writes.pop(number)
        self._bytes_written -= self._num_bytes[group]
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
            self._learn(number, read)

    def _learn(self, number: int, read: Read) -> None:
        """A read ended between the last poll and this one, which may be a long step later: a rate that agrees with
        that is left as it is. A loop that rests is woken at the end of the read."""
        least = read.num_bytes / max(1e-6, self._clock() - read.begun_s)
        most = least if self._rests else read.num_bytes / max(1e-6, self._polled_s - read.begun_s)
        rate = self._rates[number]
        self._rates[number] += LAST_WEIGHT * (min(max(rate, least), most) - rate)

    def _record(self, group: int, slot: int) -> memoryview:
        size = self._num_bytes[group]
        return self._memory.memory(group)[slot * size : (slot + 1) * size]
