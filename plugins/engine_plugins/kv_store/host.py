"""``host``: records in memory of this machine, in slots with an index by key; the least recently used makes way.

Every group has as many slots as every other: a record of each is stored for each block of a text.

The engines of a server have a segment each (:mod:`engine_plugins.kv_store.segment`) and read those of the others. A
record of another's is copied into an own slot and checked there before it is found, so no engine can change or evict
what a plan loads, and no count of holds must survive a process that is killed. A copy goes when nobody holds it any
more: at rest a record is in memory once, and each use costs a copy and a checksum.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.contracts.config import SlotConfig, at_least
from engine.contracts.kv_store import RecordLayout, StoreUsage
from engine.contracts.provider import BuildContext
from engine_plugins.eviction import EvictionOrder
from engine_plugins.kv_store.segment import Others, Segment, Shape


@dataclass(frozen=True)
class HostConfig(SlotConfig):
    max_bytes: int = 4 * 1024**3
    """Most bytes of records, of all engines of a server on its machine together; memory is taken as they come. A store
    that is smaller than the KV pool adds little."""

    def __post_init__(self) -> None:
        at_least("kv_store.host.max_bytes", self.max_bytes, 1 << 20)


class _Slots:
    """The records of one group."""

    def __init__(self, count: int, memory: memoryview, clock: Callable[[], float]) -> None:
        self.memory = memory
        self.free = list(range(count - 1, -1, -1))
        self.slot_of: dict[bytes, int] = {}
        self.order: EvictionOrder[int] = EvictionOrder(count, clock)
        """Of slots that are found."""
        self.key_of: dict[int, bytes] = {}
        self.filling: dict[int, bytes] = {}
        self.holds: dict[int, int] = {}
        self.copies: set[int] = set()
        """Slots with records of other engines."""

    def victim(self) -> int | None:
        slot = self.order.pop(self.holds)
        if slot is not None:
            self.remove(self.key_of[slot])
        return slot

    def remove(self, key: bytes) -> None:
        slot = self.slot_of.pop(key)
        del self.key_of[slot]
        self.copies.discard(slot)
        self.order.forget(slot)


class HostStore:
    """See :class:`engine.contracts.kv_store.SharedStore` and :class:`engine.contracts.kv_store.RetainingStore`."""

    def __init__(self, config: HostConfig, context: BuildContext) -> None:
        self.most_bytes = config.max_bytes // context.settings.fleet.replicas
        self._clock = context.clock
        self._evicted = self._faults = 0
        self._files: tuple[int, ...] = ()
        self._segment: Segment | None = None
        """Where records outlive this engine."""
        self._others: Others | None = None

    def share(self, files: Sequence[int], own: int) -> None:
        self._files, self._own = tuple(files), own

    def open(self, layout: RecordLayout, wake: Callable[[], None]) -> None:
        self._layout = layout
        self.num_slots = self.most_bytes // max(1, sum(layout.counted))  # of each group
        if not self._files:
            sizes = [self.num_slots * size for size in layout.num_bytes]
            memory = [memoryview(mmap.mmap(-1, max(1, size)))[:size] for size in sizes]
            self._groups = [_Slots(self.num_slots, own, self._clock) for own in memory]
            return
        shape = Shape(layout, self.num_slots)
        self._segment = Segment(self._files[self._own], shape)
        self._groups = [_Slots(self.num_slots, own, self._clock) for own in self._segment.groups]
        self._take_over(self._segment)
        others = [file for number, file in enumerate(self._files) if number != self._own]
        self._others = Others(others, shape, self._drop_copies) if others else None

    def _take_over(self, segment: Segment) -> None:
        """The records that an earlier engine has left."""
        found, self._faults = segment.found()
        for group, slot, key in found:
            own = self._groups[group]
            own.slot_of[key], own.key_of[slot] = slot, key
            own.order.add(slot, b"")
        for own in self._groups:
            own.free = [slot for slot in own.free if slot not in own.key_of]

    def slot_offsets(self) -> Sequence[int]:
        assert self._segment is not None
        return self._segment.shape.records[:-1]

    def others(self) -> Others | None:
        return self._others

    def memory(self, group: int) -> memoryview:
        return self._groups[group].memory

    def find(self, group: int, key: bytes) -> int | None:
        return self._groups[group].slot_of.get(key)

    def use(self, group: int, slots: Sequence[int]) -> None:
        own = self._groups[group]
        for slot in reversed(slots):
            if slot in own.key_of:
                own.order.add(slot, own.order.owner_of(slot))

    def retain(self, tenant: bytes, group: int, slots: Sequence[int], seconds: float) -> None:
        order = self._groups[group].order
        for slot in reversed(slots):
            order.add(slot, tenant)
            if seconds:
                order.retain(slot, seconds)

    def hold(self, group: int, slots: Sequence[int]) -> None:
        holds = self._groups[group].holds
        for slot in slots:
            holds[slot] = holds.get(slot, 0) + 1

    def let_go(self, group: int, slots: Sequence[int]) -> None:
        own = self._groups[group]
        for slot in slots:
            own.holds[slot] -= 1
            if not own.holds[slot]:
                del own.holds[slot]
                if slot not in own.key_of and slot not in own.filling:  # it was forgotten meanwhile
                    own.free.append(slot)

    def room(self, group: int, key: bytes) -> int | None:
        own = self._groups[group]
        if own.free:
            slot = own.free.pop()
        else:
            victim = own.victim()
            if victim is None:
                return None
            self._evicted += 1
            slot = victim
        own.filling[slot] = key
        if self._segment is not None:
            self._segment.begin(group, slot)
        return slot

    def publish(self, group: int, slot: int) -> None:
        own, others = self._groups[group], self._others
        key = own.filling.pop(slot)
        is_copy = others is not None and (group, key) in others.copied
        if not key or key in own.slot_of:  # forgotten meanwhile, or there already
            own.free.append(slot)
            return
        own.slot_of[key], own.key_of[slot] = slot, key
        own.order.add(slot, b"")
        if is_copy:
            own.copies.add(slot)
        elif self._segment is not None:
            self._segment.publish(group, slot, key)

    def _drop_copies(self) -> None:
        """Those that nobody holds."""
        for own in self._groups:
            for slot in own.copies - own.holds.keys():
                own.remove(own.key_of[slot])
                own.free.append(slot)

    def abandon(self, group: int, slot: int) -> None:
        own = self._groups[group]
        del own.filling[slot]
        own.free.append(slot)

    def usage(self) -> StoreUsage:
        counts = [len(own.slot_of) for own in self._groups]
        taken = sum(count * size for count, size in zip(counts, self._layout.counted, strict=True))
        return StoreUsage(sum(counts), taken, self.most_bytes, self._evicted, self._faults)

    def clear(self) -> None:
        for own in self._groups:
            own.free += [slot for slot in own.key_of if slot not in own.holds]
            for slot in own.key_of:
                own.order.forget(slot)
            own.slot_of.clear()
            own.key_of.clear()
            own.copies.clear()
            own.filling = dict.fromkeys(own.filling, b"")  # not found when they are whole
        if self._segment is not None:
            self._segment.forget()

    def close(self, deadline_s: float) -> None:
        """What the segment has stays there."""
        if self._segment is not None:
            self._segment.close(deadline_s)

    def check(self) -> None:
        """Assert that each slot is free, found, being written, or held though forgotten. O(slots); for tests."""
        for own in self._groups:
            assert len(own.slot_of) == len(own.key_of) and own.copies <= own.key_of.keys()
            assert set(own.order) == own.key_of.keys()
            forgotten = own.holds.keys() - own.key_of.keys() - own.filling.keys()
            states = [*own.free, *own.key_of, *own.filling, *forgotten]
            assert sorted(states) == list(range(self.num_slots)), "a slot is in no state, or in two"
