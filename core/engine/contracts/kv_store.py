"""Slot ``kv_store``: where else may keys and values live?

A **record** is one block of one KV group as bytes: what all caches of the group hold of its tokens, on one rank after
the other, or on one rank alone where ranks keep their parts of it apart (:attr:`RecordLayout.all_ranks`). Its id
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

RecordId = tuple[int, bytes]
"""Number of the KV group, key of the block."""
SHARED = "shared_records"
"""Capability of stores in which one engine finds what another one has just computed, wherever it runs."""
SHARED_HERE = "shared_memory"
"""The same, of engines that a server starts on its own machine (:class:`SharedStore`)."""


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """What records look like."""

    namespace: bytes
    """32 bytes: a digest of all that makes records of two engines the same, how ranks share them out included."""
    num_bytes: tuple[int, ...]
    """By KV group: of one record."""
    all_ranks: tuple[int, ...] = ()
    """The same on all ranks together, where they keep their parts apart; see :attr:`counted`."""

    @property
    def counted(self) -> tuple[int, ...]:
        """By KV group: what one record counts against a bound on bytes. Further ranks may keep their parts of a record
        in memory of their own, in the slot that it has here."""
        return self.all_ranks or self.num_bytes


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
        :meth:`StagedStore.poll` soon, also when it sleeps. Raises ``ValueError`` saying which setting does not do."""
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
    """Of memory that records of this engine may take, known before it is opened: on a CPU it is counted beside weights
    and KV pool."""

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

    def has(self, group: int, key: bytes) -> bool:
        """Whether a record is here, from what is known at once."""
        ...

    def put(self, group: int, key: bytes, record: memoryview, done: Callable[[], None]) -> bool:
        """Write a record in the background; the bytes stay as they are until ``done`` was called, from any thread.
        ``False``: not wanted, or too much is being written; then ``done`` is never called. A record is offered when it
        is new, and if it was not wanted then, once more when a later request begins with it."""
        ...

    def get(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> int:
        """Read records into these buffers in the background. Returns a number for :meth:`poll`."""
        ...

    def poll(self) -> Sequence[tuple[int, int]]:
        """Reads that have ended since the last call: their numbers, and how many records, from the first on, are in
        their buffers, each checked against its id, length and checksum. A missing record ends a read early; it is no
        error."""
        ...


@runtime_checkable
class RetainingStagedStore(StagedStore, Protocol):
    """A store that can keep some records longer than others, as a :class:`RetainingStore`."""

    def retain(self, tenant: bytes, group: int, keys: Sequence[bytes], seconds: float) -> None:
        """As :meth:`RetainingStore.retain`, of those of these records that are here or are being written. With 0
        seconds it says whose they are, and no more."""
        ...


@runtime_checkable
class OtherEngines(StagedStore, Protocol):
    """Records in the memory of other engines, which are copied to that of this one: whole, as they were written, or
    missed. It wants none of this one's (:meth:`StagedStore.put`)."""

    def forgot(self) -> bool:
        """Whether, since the last call, an engine has cleared its records of which some were read here: what was
        computed from them may be wrong, too, so the core clears everything."""
        ...


@runtime_checkable
class SharedStore(MemoryStore, Protocol):
    """A store whose memory outlives its engine, and whose records the other engines of a server read, too."""

    def share(self, files: Sequence[int], own: int) -> None:
        """Called before :meth:`KVStore.open` where there is such memory. ``files``: descriptors of files in memory, one
        for each engine of the server on this machine, empty at first; none ever gets smaller. ``own``: the number of
        the one that this engine alone writes to. What an earlier engine has left there in the same namespace is found
        again."""
        ...

    def slot_offsets(self) -> Sequence[int]:
        """By KV group: where in that file its first slot begins, in bytes. Further ranks of the engine map it, too, and
        read and write their parts of slots. Called after :meth:`KVStore.open`."""
        ...

    def others(self) -> OtherEngines | None:
        """What the other engines have; ``None``: there are none. Called after :meth:`KVStore.open`, and gives the same
        object each time. The core opens it, and stores nothing here that is there."""
        ...


@dataclass(frozen=True, slots=True)
class Loan:
    """A record of memory, for a store that gives it to somebody else."""

    record: memoryview
    """Its bytes, not to be written to. They stay as they are until they were given back."""
    give_back: Callable[[], None]
    """To be called once."""


class Lender(Protocol):
    """The records that are in memory. Not to be called but within a call of the store's own methods."""

    def has(self, group: int, key: bytes) -> bool:
        """Whether a record is there now."""
        ...

    def lend(self, group: int, key: bytes) -> Loan | None:
        """``None``: it is not there, or too much is lent."""
        ...


@runtime_checkable
class LendingStore(StagedStore, Protocol):
    """A store that gives records of this engine's memory to other engines, and gets those of theirs. What memory has
    it is told by :meth:`StagedStore.put`; what made way there it finds out when it is asked for it."""

    def serve(self, lender: Lender) -> None:
        """Called once, after :meth:`KVStore.open`. It gives no record to anybody before."""
        ...
