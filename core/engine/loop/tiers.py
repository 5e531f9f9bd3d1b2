"""Keys and values beyond the device: which records are kept, found and loaded. What a store does with them, the plugins
of slot ``kv_store`` say.

A record is stored once the step that computed its block is committed, and is filled into a block by the plan that first
needs it. In between it is bytes in memory of this machine; what a further tier has is brought there while its request
waits, with no row and no block held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from engine.contracts.kv_allocator import KVGroup, Lease, Prefix
from engine.contracts.kv_store import StagedStore
from engine.contracts.step_cost import StepCost, StepWork
from engine.kv.checked_allocator import CheckedAllocator
from engine.kv.checked_memory import CheckedMemory
from engine.loop.messages import StoreState
from engine.loop.staging import Read, Staging
from engine.step.plan import RecordMove

StoreMoves = Callable[[Sequence[RecordMove], Callable[[bool], None]], None]
"""Copies blocks to slots behind the steps that were launched, then calls the function, from any thread: whether all
went well."""


FEWEST_TOKENS = 32
"""Less than this is computed, not read from a further store."""
UNKNOWN_S = 5.0
"""What it takes to compute tokens before any step was measured."""


@dataclass(frozen=True, slots=True)
class Fill:
    """The records that a lease waits for, which are held until they were copied."""

    moves: tuple[RecordMove, ...]
    let_go: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Kept:
    """Blocks that are being stored, with the keys of their records."""

    move: RecordMove
    keys: tuple[bytes, ...]


class Tiers:
    """Finds records for prefixes, and has new blocks stored."""

    def __init__(
        self,
        names: Sequence[str],
        memory: CheckedMemory,
        staging: Staging,
        allocator: CheckedAllocator,
        groups: Sequence[KVGroup],
        block_size: int,
        store: StoreMoves,
    ) -> None:
        self._names = tuple(names)
        self._memory = memory
        self._staging = staging
        self._allocator = allocator
        self._groups = tuple(groups)
        self._block_size = block_size
        self._store = store
        self._stored: SimpleQueue[tuple[Sequence[Kept], bool]] = SimpleQueue()

    # What is found -----------------------------------------------------------------------------------------------

    def reach(self, prefix: Prefix) -> int:
        """How many leading tokens, whole blocks, are there in blocks or in memory."""
        return self._reach(prefix, self._has) * self._block_size

    def _reach(self, prefix: Prefix, has: Callable[[int, bytes], bool]) -> int:
        """The most leading blocks of which each group has what a query after them reads."""
        size, keys = self._block_size, prefix.keys
        most = prefix.num_tokens // size if keys else 0
        for group in (group for group in self._groups if not group.forgets):
            most = next((at for at in range(most) if not has(group.group_id, keys[at + 1])), most)
        while (gap := self._gap(prefix, most, has)) is not None:
            most = gap  # any end after it, up to here, needs this block
        return most

    def _gap(self, prefix: Prefix, full: int, has: Callable[[int, bytes], bool]) -> int | None:
        size = self._block_size
        for group in (group for group in self._groups if group.forgets):
            for at in range(full - 1, group.num_passed(full * size, size) - 1, -1):
                if not has(group.group_id, prefix.keys[at + 1]):
                    return at
        return None

    def _has(self, group: int, key: bytes) -> bool:
        return self._allocator.has_block(group, key) or self._memory.find(group, key) is not None

    # What further stores have ------------------------------------------------------------------------------------

    def stage(self, prefix: Prefix, cost: StepCost) -> Read | None:
        """Begin to bring what a further store has of a prefix, where that is sooner than to compute it. ``None``:
        nothing to wait for."""
        if not self._staging.stores or not prefix.keys:
            return None
        reach, size = self.reach(prefix), self._block_size
        for number, store in enumerate(self._staging.stores):
            full = self._reach(prefix, partial(self._has_with, store))
            end = full * size
            if end - reach < FEWEST_TOKENS:
                continue
            ids = [
                (group.group_id, prefix.keys[at + 1])
                for at in range(full)
                for group in self._groups
                if at >= group.num_passed(end, size) and not self._has(group.group_id, prefix.keys[at + 1])
            ]
            compute_s = cost.ms(StepWork.chunk(end - reach, reach)) / 1e3 if cost.num_samples else UNKNOWN_S
            return self._staging.read(number, ids, compute_s)
        return None

    def _has_with(self, store: StagedStore, group: int, key: bytes) -> bool:
        return self._has(group, key) or self._staging.count(store, [(group, key)]) == 1

    def give_up(self, read: Read) -> None:
        """Nobody waits for it any more."""
        self._staging.give_up(read)

    def fill(self, lease: Lease, prefix: Prefix) -> Fill:
        """What is to be copied into the blocks of a lease. Every record of it was found just now."""
        moves = []
        for group, places in enumerate(lease.to_fill):
            if not places:
                continue
            slots = [self._memory.found(group, prefix.keys[at + 1]) for at in places]
            self._memory.hold(group, slots)
            self._memory.use(group, slots)
            moves.append(RecordMove(group, tuple([lease.blocks[group][at] for at in places]), tuple(slots)))

        def let_go() -> None:
            for move in moves:
                self._memory.let_go(move.group, move.slots)

        return Fill(tuple(moves), let_go)

    # What is stored ----------------------------------------------------------------------------------------------

    def unkept(self, lease: Lease, prefix: Prefix) -> list[Kept]:
        """Room for the blocks that become full when the prefix is committed, and have no record."""
        first, full = lease.num_committed // self._block_size, prefix.num_tokens // self._block_size
        before = self._before(prefix, first) if prefix.keys and full > first + 1 else []  # of a prompt
        for group, slots in enumerate(before):
            self._memory.use(group, slots)
            self._memory.hold(group, slots)
        found = self._rooms(lease, prefix, first, full)
        for group, slots in enumerate(before):
            self._memory.let_go(group, slots)
        return found

    def _before(self, prefix: Prefix, first: int) -> list[list[int]]:
        """By group: slots with the records of a prefix that are there. Those after them are of no use without them, so
        they do not make way for them."""
        keys = prefix.keys[1 : first + 1]
        found = [[self._memory.find(group.group_id, key) for key in keys] for group in self._groups]
        return [[slot for slot in slots if slot is not None] for slots in found]

    def _rooms(self, lease: Lease, prefix: Prefix, first: int, full: int) -> list[Kept]:
        found = []
        for group, blocks in enumerate(lease.blocks if first < full and prefix.keys else ()):
            own, slots, keys = [], [], []
            for at in range(first, full):
                key = prefix.keys[at + 1]
                if not blocks[at] or self._memory.find(group, key) is not None:
                    continue
                slot = self._memory.room(group, key)
                if slot is None:
                    break  # without this record those after it are of no use
                own.append(blocks[at])
                slots.append(slot)
                keys.append(key)
            if own:
                found.append(Kept(RecordMove(group, tuple(own), tuple(slots)), tuple(keys)))
        return found

    def keep(self, new: Sequence[Kept]) -> None:
        """Store committed blocks. They can be found when :meth:`poll` has seen that it is done."""
        self._store([kept.move for kept in new], lambda well: self._stored.put((new, well)))

    def rest(self) -> None:
        """The loop sleeps until a store wakes it."""
        self._staging.rest()

    def poll(self) -> None:
        """Take in what other threads have done."""
        self._staging.poll()
        while True:
            try:
                new, well = self._stored.get_nowait()
            except Empty:
                return
            for kept in new:
                self._publish(kept, well)

    def _publish(self, kept: Kept, well: bool) -> None:
        group = kept.move.group
        for slot, key in zip(kept.move.slots, kept.keys, strict=True):
            if not well:
                self._memory.abandon(group, slot)
                continue
            self._memory.publish(group, slot)
            if self._memory.find(group, key) == slot:
                self._staging.write(group, key, slot)

    def clear(self) -> None:
        """No record may be found again."""
        for store in (self._memory.store, *self._staging.stores):
            store.clear()

    def states(self) -> tuple[StoreState, ...]:
        """Tier by tier."""
        found = []
        for name, store in zip(self._names, (self._memory.store, *self._staging.stores), strict=True):
            usage = store.usage()
            counts = usage.records, usage.num_bytes, usage.most_bytes, usage.evicted, usage.faults
            found.append(StoreState(name, *counts))
        return tuple(found)

    def close(self, deadline_s: float) -> None:
        for store in (*self._staging.stores, self._memory.store):
            store.close(deadline_s)
