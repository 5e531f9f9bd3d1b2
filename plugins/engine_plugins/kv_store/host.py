"""``host``: records in memory of this machine, in slots with an index by key; the least recently used makes way.

Every group has as many slots as every other: a record of each is stored for each block of a text.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.contracts.config import SlotConfig, at_least
from engine.contracts.kv_store import RecordLayout, StoreUsage
from engine.contracts.provider import BuildContext
from engine_plugins.eviction import EvictionOrder


@dataclass(frozen=True)
class HostConfig(SlotConfig):
    max_bytes: int = 4 * 1024**3
    """Most bytes of records; memory is taken as they come. A store that is smaller than the KV pool adds little."""

    def __post_init__(self) -> None:
        at_least("kv_store.host.max_bytes", self.max_bytes, 1 << 20)


class _Slots:
    """The records of one group."""

    def __init__(self, count: int, num_bytes: int, clock: Callable[[], float]) -> None:
        self.memory = mmap.mmap(-1, max(1, count * num_bytes))
        self.num_bytes = count * num_bytes
        self.free = list(range(count - 1, -1, -1))
        self.slot_of: dict[bytes, int] = {}
        self.order: EvictionOrder[int] = EvictionOrder(count, clock)
        """Of slots that are found."""
        self.key_of: dict[int, bytes] = {}
        self.filling: dict[int, bytes] = {}
        self.holds: dict[int, int] = {}

    def victim(self) -> int | None:
        slot = self.order.pop(self.holds)
        if slot is not None:
            self.remove(self.key_of[slot])
        return slot

    def remove(self, key: bytes) -> None:
        slot = self.slot_of.pop(key)
        del self.key_of[slot]
        self.order.forget(slot)


class HostStore:
    """See :class:`engine.contracts.kv_store.RetainingStore`."""

    def __init__(self, config: HostConfig, context: BuildContext) -> None:
        self.most_bytes = config.max_bytes
        self._clock = context.clock
        self._evicted = 0

    def open(self, layout: RecordLayout, wake: Callable[[], None]) -> None:
        count = self.most_bytes // max(1, sum(layout.num_bytes))
        self._groups = [_Slots(count, size, self._clock) for size in layout.num_bytes]
        self._layout = layout

    @property
    def num_slots(self) -> int:
        """Of each group."""
        return self._groups[0].num_bytes // max(1, self._layout.num_bytes[0])

    def memory(self, group: int) -> memoryview:
        slots = self._groups[group]
        return memoryview(slots.memory)[: slots.num_bytes]

    def find(self, group: int, key: bytes) -> int | None:
        return self._groups[group].slot_of.get(key)

    def use(self, group: int, slots: Sequence[int]) -> None:
        own = self._groups[group]
        for slot in reversed(slots):
            if slot in own.key_of:
                own.order.use(slot)

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
        return slot

    def publish(self, group: int, slot: int) -> None:
        own = self._groups[group]
        key = own.filling.pop(slot)
        if not key or key in own.slot_of:  # forgotten meanwhile, or there already
            own.free.append(slot)
            return
        own.slot_of[key], own.key_of[slot] = slot, key
        own.order.add(slot, b"")

    def abandon(self, group: int, slot: int) -> None:
        own = self._groups[group]
        del own.filling[slot]
        own.free.append(slot)

    def usage(self) -> StoreUsage:
        counts = [len(own.slot_of) for own in self._groups]
        taken = sum(count * size for count, size in zip(counts, self._layout.num_bytes, strict=True))
        return StoreUsage(sum(counts), taken, self.most_bytes, self._evicted)

    def clear(self) -> None:
        for own in self._groups:
            own.free += [slot for slot in own.key_of if slot not in own.holds]
            for slot in own.key_of:
                own.order.forget(slot)
            own.slot_of.clear()
            own.key_of.clear()
            own.filling = dict.fromkeys(own.filling, b"")  # not found when they are whole

    def close(self, deadline_s: float) -> None:
        """Nothing lasts."""

    def check(self) -> None:
        """Assert that each slot is free, found, being written, or held though forgotten. O(slots); for tests."""
        for own in self._groups:
            assert len(own.slot_of) == len(own.key_of) and set(own.order) == own.key_of.keys()
            forgotten = own.holds.keys() - own.key_of.keys() - own.filling.keys()
            states = [*own.free, *own.key_of, *own.filling, *forgotten]
            assert sorted(states) == list(range(self.num_slots)), "a slot is in no state, or in two"
