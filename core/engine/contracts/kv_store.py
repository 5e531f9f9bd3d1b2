"""Slot ``kv_store``: where else may keys and values live?

A **record** is one block of one KV group as bytes: what all caches of the group hold of its tokens on one rank. Its id
is the block's key and the group's number. Keys are chained digests rooted in a namespace of weights, settings and
tenant (:mod:`engine.kv.block_keys`), so equal ids mean equal records, in any process.

The core makes and reads records; it decides what is loaded, and when. A store keeps bytes under ids, and may forget
any of them at any time. The plugins chosen are tiers in order: the first has its records in memory that the engine's
device copies from (:class:`MemoryStore`); what others have is brought there first, while a request waits.

All methods are called by the engine's loop, one call at a time, and none may block: it runs between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """What the records of a rank look like."""

    namespace: bytes
    """32 bytes: a digest of all that makes records of two engines the same, how ranks share them out included."""
    num_bytes: tuple[int, ...]
    """By KV group: of one record."""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What a store has."""

    records: int
    num_bytes: int
    """That they take."""
    most_bytes: int
    """That they may take."""
    evicted: int = 0
    """Records that made way for others, so far."""
    faults: int = 0
    """Records that were damaged, foreign or gone, and reads and writes that failed, so far."""


@runtime_checkable
class KVStore(Protocol):
    """What every store can do."""

    def open(self, layout: RecordLayout, wake: Callable[[], None]) -> None:
        """Called once, before anything else. ``wake`` may be called from any thread: the loop will then call
        :meth:`StagedStore.poll` soon, also when it sleeps."""
        ...

    def usage(self) -> StoreUsage:
        """At this moment, from what is known at once: it is asked after every step."""
        ...

    def clear(self) -> None:
        """Forget every record of this namespace; none may be found again, written or not."""
        ...

    def close(self, deadline_s: float) -> None:
        """Finish or give up what is being written within so many seconds."""
        ...


@runtime_checkable
class MemoryStore(KVStore, Protocol):
    """A store whose records are in memory of this machine, in slots of equal size for each group."""

    most_bytes: int
    """Of memory that records may take, known before it is opened: on a CPU it is counted beside weights and KV pool."""

    def memory(self, group: int) -> memoryview:
        """All slots of a group, one after the other: writable bytes whose length is a multiple of a record's."""
        ...

    def find(self, group: int, key: bytes) -> int | None:
        """The slot that holds a record now."""
        ...

    def use(self, group: int, slots: Sequence[int]) -> None:
        """These records were just of use, in the order of the text: the last is to be evicted first."""
        ...

    def hold(self, group: int, slots: Sequence[int]) -> None:
        """Evict none of these until :meth:`let_go` was called as often."""
        ...

    def let_go(self, group: int, slots: Sequence[int]) -> None:
        """End a hold on each of these."""
        ...

    def room(self, group: int, key: bytes) -> int | None:
        """A slot for a record that is not here, which the caller is about to write: nobody finds it before
        :meth:`publish`. ``None``: every slot is held or being written."""
        ...

    def publish(self, group: int, slot: int) -> None:
        """The record is whole: it may be found."""
        ...

    def abandon(self, group: int, slot: int) -> None:
        """It will not come: the slot is free again."""
        ...


@runtime_checkable
class RetainingStore(MemoryStore, Protocol):
    """A store in memory that can keep some records longer than others."""

    def retain(self, tenant: bytes, group: int, slots: Sequence[int], seconds: float) -> None:
        """Records of a tenant, in the order of a text, were just of use, and are to stay until they were not used for
        so many seconds, if they are not retained for longer; 0: they are as any. Among the records of their tenant they
        are evicted last, the last of a text first. It is a wish: there is room as without it, and what is evicted of
        other tenants is the same."""
        ...


@runtime_checkable
class StagedStore(KVStore, Protocol):
    """A store whose records take time to come: on a disk, on another machine."""

    def count(self, ids: Sequence[tuple[int, bytes]]) -> int:
        """How many of these records, by group and key, are here, up to the first that is not; from what is known at
        once."""
        ...

    def put(self, group: int, key: bytes, record: memoryview, done: Callable[[], None]) -> bool:
        """Write a record in the background; the bytes stay as they are until ``done`` was called, from any thread.
        ``False``: not wanted, or too much is being written; then ``done`` is never called."""
        ...

    def get(self, ids: Sequence[tuple[int, bytes]], into: Sequence[memoryview]) -> int:
        """Read records into these buffers in the background. Returns a number for :meth:`poll`."""
        ...

    def poll(self) -> Sequence[tuple[int, int]]:
        """Reads that have ended since the last call: their numbers, and how many records, from the first on, are in
        their buffers, each checked against its id, length and checksum. A missing record ends a read early; it is no
        error."""
        ...
