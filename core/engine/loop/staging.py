"""Records on their way to memory, from a disk or another machine, while their request waits; and on their way back.

A waiting request holds no row and no block meanwhile. It is passed over until its records are there or its deadline is
over, and is then computed as far as they do not reach.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue

from engine.contracts.kv_store import RecordId, RetainingStagedStore, StagedStore
from engine.contracts.step_cost import NO_WORK, StepWork
from engine.kv.checked_memory import CheckedMemory
from engine.plugin_guard.calls import PluginError, contract_error, quote

FIRST_RATE = 0.3e9
"""Bytes a second that a store is believed to give before it was measured."""
LAST_WEIGHT = 0.3
"""Of the last read, in the moving mean of the rate."""
DOUBT = 0.02
"""What a rate is believed to have grown by whenever nothing was read because of it: so it is measured again."""
LATEST = 0.5
"""Of the time to compute the same tokens: how much longer than expected a read may take, or than others are computed
that come before; a late one costs that."""
MOST_SHARE = 0.25
"""Of memory: what is being read at once, at most."""
MOST_WRITTEN = 0.5
"""Of memory: what is held at once because it is being written, at most."""

SKIPPED = ("few_tokens", "slower", "busy", "no_room", "late", "incomplete")
"""Why tokens are computed that a store has: too few; reading takes longer; others are being read; memory is full of
what is held; they did not come in time; some were gone or damaged."""


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
    store: int = 0
    """Its number, of those behind the first."""
    ended_s: float = 0.0
    """When it was done, or nobody waited for it any more."""
    first: int = 0
    """Tokens of the prefix that were there without it."""
    compute_ms: float = 0.0
    """What computing its tokens would take; 0: not known."""
    expected_s: float = 0.0
    """When it was expected to be done."""
    compute_s: float = math.inf
    """What computing its tokens is believed to take."""
    ahead_s: float = 0.0
    """How long it would have waited without it, for others to be computed."""

    @property
    def waited_ms(self) -> float:
        return (self.ended_s - self.begun_s) * 1e3

    def waits(self, now_s: float) -> bool:
        return not (self.done or self.over) and now_s < self.deadline_s

    def comes_next(self, now_s: float) -> None:
        """Nobody is computed before its request any more, so waiting is no longer free."""
        if self.expected_s - now_s >= self.compute_s:
            self.deadline_s = now_s
        latest_s = max(self.expected_s, now_s) + LATEST * self.compute_s
        self.deadline_s = min(self.deadline_s, latest_s)

    @staticmethod
    def without_records(begun_s: float, deadline_s: float) -> Read:
        """It waits until stores have heard of records."""
        return Read((), (), 0, begun_s, deadline_s)


@dataclass(slots=True)
class Tally:
    """What became of a store's records so far."""

    name: str = ""
    loads: int = 0
    """Requests with tokens from it."""
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_s: float = 0.0
    """That requests waited for it, those of ``skipped`` as well."""
    saved_s: float = 0.0
    """What computing ``loaded_tokens`` would have taken, less the part of ``load_s`` that they would not have waited
    anyway; without those of ``unpriced``."""
    unpriced: StepWork = NO_WORK
    """Loaded tokens of which it is not known what computing them takes, and that part of the waiting for them."""
    unpriced_s: float = 0.0
    skipped: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(SKIPPED, 0)))
    """Requests whose tokens it had and that computed them, by reason."""


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
        self._retaining = [store for store in stores if isinstance(store, RetainingStagedStore)]
        self.num_bytes = tuple(num_bytes)
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
        self.tallies = [Tally() for _ in stores]
        self._declined: list[list[set[int]]] = [[set() for _ in num_bytes] for _ in stores]
        """By store and group: slots of records that it did not want when they were new."""
        self._written: SimpleQueue[tuple[StagedStore, int]] = SimpleQueue()

    def has(self, store: StagedStore, group: int, key: bytes) -> bool:
        """As :meth:`StagedStore.has`."""
        found = store.has(group, key)
        if type(found) is not bool:
            raise contract_error(store, "has", f"returned {quote(found)}, expected True or False")
        return found

    def read(self, number: int, ids: Sequence[RecordId], compute_s: float, ahead_s: float = 0.0) -> Read | None:
        """Bring records from a store, if that is sooner than to compute them, which takes ``compute_s``, after others
        have been computed for ``ahead_s``."""
        num_bytes = sum([self.num_bytes[group] for group, _ in ids])
        expected_s = (self._in_flight + num_bytes) / self._rates[number]
        tally = self.tallies[number]
        if expected_s >= ahead_s + compute_s:
            tally.skipped["slower"] += 1
            if not self._in_flight:
                self._rates[number] *= 1.0 + DOUBT
            return None
        if self._in_flight + num_bytes > self._most_bytes:
            tally.skipped["busy"] += 1
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
            tally.skipped["no_room"] += 1
            return None
        now = self._clock()
        deadline_s = now + max(expected_s, ahead_s) + LATEST * compute_s
        read = Read(ids, slots, num_bytes, now, deadline_s, store=number, expected_s=now + expected_s)
        read.compute_s, read.ahead_s = compute_s, ahead_s
        job = self.stores[number].get(
            ids, [self._record(group, slot) for (group, _), slot in zip(ids, slots, strict=True)]
        )
        if type(job) is not int or (number, job) in self._reads:
            raise contract_error(self.stores[number], "get", f"returned {quote(job)}, expected a number of this read")
        self._reads[number, job] = read
        self._in_flight += num_bytes
        return read

    def write(self, group: int, key: bytes, slot: int) -> None:
        """Offer every store a record that memory has from now on."""
        for number, declined in enumerate(self._declined):
            declined[group].discard(slot)
            if not self._offer(number, group, key, slot):
                declined[group].add(slot)

    def offer_again(self, group: int, keys: Sequence[bytes]) -> None:
        """A request begins with these records: those that a store did not want when they were new are offered once
        more, but what comes after those that were enough for now."""
        for number, by_group in enumerate(self._declined):
            declined, wanted = by_group[group], False
            for key in keys if declined else ():
                slot = self._memory.find(group, key)
                if slot is None or slot not in declined:
                    continue
                if self._offer(number, group, key, slot):
                    wanted = True
                elif wanted:
                    break
                declined.discard(slot)

    def retain(self, tenant: bytes, group: int, keys: Sequence[bytes], seconds: float) -> None:
        """As :meth:`RetainingStagedStore.retain`, in all stores that do it."""
        for store in self._retaining:
            store.retain(tenant, group, keys, seconds)

    def _offer(self, at: int, group: int, key: bytes, slot: int) -> bool:
        """Whether a store keeps a record, which is held until it has."""
        store = self.stores[at]
        if self._bytes_written + self.num_bytes[group] > self._most_written:
            return False
        number = next(self._numbers)
        self._memory.hold(group, [slot])
        self._writes[number] = group, slot
        self._bytes_written += self.num_bytes[group]
        wanted = store.put(group, key, self._record(group, slot), partial(self._written.put, (store, number)))
        if type(wanted) is not bool:
            raise contract_error(store, "put", f"returned {quote(wanted)}, expected True or False")
        if wanted:
            self.tallies[at].stored_bytes += self.num_bytes[group]
        else:
            self._end_write(store, number)
        return wanted

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
        self._bytes_written -= self.num_bytes[group]
        self._memory.let_go(group, [slot])

    def give_up(self, read: Read) -> None:
        """Nobody waits for it any more."""
        if not read.over and not read.done:
            read.ended_s = self._clock()
            self.tallies[read.store].skipped["late"] += read.ended_s >= read.deadline_s
        read.over = True
        for group, slot in read.held:
            self._memory.let_go(group, [slot])
        read.held.clear()

    def _take(self, number: int, read: Read, good: int) -> None:
        read.done = True
        read.ended_s = read.ended_s or self._clock()
        tally = self.tallies[number]
        tally.skipped["incomplete"] += good < len(read.ids)
        tally.loaded_bytes += sum([self.num_bytes[group] for group, _ in read.ids[:good]])
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
        size = self.num_bytes[group]
        return self._memory.memory(group)[slot * size : (slot + 1) * size]
