"""The memory of a KV store as the loop uses it: what it answers is looked at before anything is copied.

A slot that two records share, or one with another record, would not fail: a request would be given another's keys and
values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.contracts.kv_store import MemoryStore, RetainingStore
from engine.plugin_guard.calls import PluginError, contract_error, quote


class CheckedMemory:
    """The part of :class:`~engine.contracts.kv_store.MemoryStore` that the loop needs.

    Raises :class:`~engine.plugin_guard.calls.PluginError` for an answer that the contract rules out."""

    def __init__(self, store: MemoryStore, num_bytes: Sequence[int]) -> None:
        """``num_bytes``: of a record, by group."""
        self.store = store
        self._num_slots = [len(store.memory(group)) // size for group, size in enumerate(num_bytes)]
        self._writing: list[dict[int, bytes]] = [{} for _ in num_bytes]
        """By group and slot: the key of the record that is being written."""
        self._held: list[Counter[int]] = [Counter() for _ in num_bytes]
        self._key_of: list[dict[int, bytes]] = [{} for _ in num_bytes]
        """By group and slot: the record that was published there last."""
        self.memory = store.memory
        self.find = store.find
        self._retaining = store if isinstance(store, RetainingStore) else None

    def touch(self, tenant: bytes, group: int, slots: Sequence[int], seconds: float = 0.0) -> None:
        """As :meth:`RetainingStore.retain` where the store does that, else as :meth:`MemoryStore.use`."""
        if self._retaining is not None:
            self._retaining.retain(tenant, group, slots, seconds)
        else:
            self.store.use(group, slots)

    def found(self, group: int, key: bytes) -> int:
        """The slot of a record that was found just now, and is to be copied."""
        slot = self.find(group, key)
        if slot is None:
            raise self._broken("find", "does not find a record that it found just now")
        if not self._is_slot(group, slot) or slot in self._writing[group] or self._key_of[group].get(slot, key) != key:
            raise self._broken("find", f"returned slot {quote(slot)} of group {group}, which holds another record")
        return slot

    def room(self, group: int, key: bytes) -> int | None:
        slot = self.store.room(group, key)
        if slot is None:
            return None
        if not self._is_slot(group, slot):
            most = self._num_slots[group] - 1
            raise self._broken("room", f"returned slot {quote(slot)} of group {group}, expected 0 to {most} or None")
        if slot in self._writing[group] or self._held[group][slot]:
            raise self._broken("room", f"returned slot {slot} of group {group}, which is in use")
        self._writing[group][slot] = key
        self._key_of[group].pop(slot, None)
        return slot

    def publish(self, group: int, slot: int) -> None:
        self._key_of[group][slot] = self._writing[group].pop(slot)
        self.store.publish(group, slot)

    def abandon(self, group: int, slot: int) -> None:
        del self._writing[group][slot]
        self.store.abandon(group, slot)

    def hold(self, group: int, slots: Sequence[int]) -> None:
        self._held[group].update(slots)
        self.store.hold(group, slots)

    def let_go(self, group: int, slots: Sequence[int]) -> None:
        self._held[group].subtract(slots)
        self.store.let_go(group, slots)

    def _is_slot(self, group: int, slot: object) -> bool:
        return type(slot) is int and 0 <= slot < self._num_slots[group]

    def _broken(self, call: str, problem: str) -> PluginError:
        return contract_error(self.store, call, problem)
