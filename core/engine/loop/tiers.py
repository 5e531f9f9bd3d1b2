"""Keys and values beyond the device: which records are kept, found and loaded. What a store does with them, the plugins
of slot ``kv_store`` say.

A record is stored once the step that computed its block is committed, and is filled into a block by the plan that first
needs it. In between it is bytes in memory of this machine; what a further tier has is brought there while its request
waits, with no row and no block held.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from engine.contracts.kv_allocator import KVGroup, Lease, Prefix
from engine.contracts.kv_store import OtherEngines, StagedStore
from engine.contracts.request import StagedTokens
from engine.contracts.step_cost import StepCost, StepWork
from engine.kv.checked_allocator import CheckedAllocator
from engine.kv.checked_memory import CheckedMemory
from engine.loop.messages import StoreState
from engine.loop.staging import Read, Staging, Tally
from engine.step.plan import RecordMove

Words = tuple[tuple[int, float], ...]
"""Leading tokens that are to stay, and for how many seconds after their last use."""
StoreMoves = Callable[[Sequence[RecordMove], Callable[[bool], None]], None]
"""Copies blocks to slots behind the steps that were launched, then calls the function, from any thread: whether all
went well."""


FEWEST_TOKENS = 32
"""Less than this is computed, not read from a further store."""
UNKNOWN_S = 5.0
"""What it takes to compute tokens before any step was measured."""


class Fill:
    """The records that a lease waits for, which are held until they were copied."""

    def __init__(
        self, moves: Sequence[RecordMove], num_bytes: Sequence[int], let_go: Callable[[Sequence[RecordMove]], None]
    ) -> None:
        """``num_bytes``: of a record, by group; ``let_go`` ends the holds on the records of moves."""
        self.moves = tuple(moves)
        """Those that no plan has yet."""
        self._num_bytes = tuple(num_bytes)
        self._let_go = let_go

    @property
    def num_bytes(self) -> int:
        """That no plan copies yet."""
        return sum([len(move.slots) * self._num_bytes[move.group] for move in self.moves])

    def take(self, most_bytes: float = math.inf) -> tuple[tuple[RecordMove, ...], Callable[[], None]]:
        """Records for a plan to copy, at most of so many bytes or one, and what is to be called when it has."""
        taken, left = list[RecordMove](), list[RecordMove]()
        for move in self.moves:
            size = self._num_bytes[move.group]
            count = int(min(len(move.slots), max(most_bytes // size, not taken))) if not left else 0
            most_bytes -= count * size
            if count:
                taken.append(RecordMove(move.group, move.blocks[:count], move.slots[:count]))
            if count < len(move.slots):
                left.append(RecordMove(move.group, move.blocks[count:], move.slots[count:]))
        self.moves = tuple(left)
        return tuple(taken), partial(self._let_go, taken)

    def give_up(self) -> None:
        """No plan copies the rest."""
        self._let_go(self.moves)
        self.moves = ()


@dataclass(frozen=True, slots=True)
class Kept:
    """Blocks that are being stored, with the keys of their records."""

    move: RecordMove
    keys: tuple[bytes, ...]
    prefix: Prefix
    words: Words = ()
    """What is to stay of the prefix."""


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
        others: OtherEngines | None = None,
    ) -> None:
        """``others``: of the stores of ``staging`` the first, if it is what other engines have in memory."""
        self.others = others
        self._memory = memory
        self._staging = staging
        self._allocator = allocator
        self._groups = tuple(groups)
        self._block_size = block_size
        self._store = store
        self._stored: SimpleQueue[tuple[Sequence[Kept], bool]] = SimpleQueue()
        self._own = Tally(names[0])
        """Of memory."""
        further = names[1:] if others is None else (f"{names[0]} of others", *names[1:])
        for tally, name in zip(staging.tallies, further, strict=True):
            tally.name = name
        self._cost: StepCost | None = None
        """As it was when a request was looked at last."""
        self._num_kept = self._num_stored = 0
        """Calls of :meth:`keep`, and those of them that are done."""
        self._after: deque[tuple[int, Callable[[], None]]] = deque()
        """What is to be called when so many are."""

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
        """Begin to bring what the further store that reaches furthest has of a prefix, where that is sooner than to
        compute it. ``None``: nothing to wait for."""
        self._cost = cost
        if not self._staging.stores or not prefix.keys:
            return None
        reach, size = self.reach(prefix), self._block_size
        reaches = [self._reach(prefix, partial(self._has_with, store)) for store in self._staging.stores]
        full = max(reaches)
        end, number = full * size, reaches.index(full)
        if end - reach < FEWEST_TOKENS:
            self._staging.tallies[number].skipped["few_tokens"] += end > reach
            return None
        ids = [
            (group.group_id, prefix.keys[at + 1])
            for at in range(full)
            for group in self._groups
            if at >= group.num_passed(end, size) and not self._has(group.group_id, prefix.keys[at + 1])
        ]
        compute_ms = cost.ms(StepWork.chunk(end - reach, reach)) if cost.num_samples else 0.0
        read = self._staging.read(number, ids, compute_ms / 1e3 or UNKNOWN_S)
        if read is not None:
            read.first, read.compute_ms = reach, compute_ms
        return read

    def knows(self, prefix: Prefix) -> bool:
        """Whether its last whole block, which is stored after the others, is found in all groups; ``True`` where there
        is no further store that could hear of it."""
        full, stores = prefix.num_tokens // self._block_size, self._staging.stores
        if not full or not stores or not prefix.keys:
            return True
        key = prefix.keys[full]
        return all(any(self._has_with(each, group.group_id, key) for each in stores) for group in self._groups)

    def _has_with(self, store: StagedStore, group: int, key: bytes) -> bool:
        return self._has(group, key) or self._staging.has(store, group, key)

    def give_up(self, read: Read, loaded: Mapping[str, int]) -> StagedTokens:
        """Nobody waits for it any more. ``loaded``: tokens that its request has from records, by store."""
        self._staging.give_up(read)
        tally = self._staging.tallies[read.store]
        tokens, waited_ms = loaded.get(tally.name, 0), read.waited_ms
        tally.load_s += waited_ms / 1e3
        tally.saved_s += ((read.compute_ms if tokens else 0.0) - waited_ms) / 1e3
        return StagedTokens(tally.name, tokens, waited_ms, read.compute_ms)

    def sources(self, read: Read | None, found: int, upto: int) -> dict[str, int]:
        """By store: the tokens between these two that a request has from records, ``read`` among them."""
        first = upto if read is None or not read.done else min(max(found, read.first), upto)
        parts = {self._own.name: first - found}
        if read is not None and upto > first:
            parts[self._staging.tallies[read.store].name] = upto - first
        return {name: tokens for name, tokens in parts.items() if tokens}

    def count(self, loaded: Mapping[str, int], found: int) -> None:
        """A request was admitted with these tokens from records, by store, after ``found`` others."""
        for tally in (self._own, *self._staging.tallies):
            tally.loads += tally.name in loaded
            tally.loaded_tokens += loaded.get(tally.name, 0)
        own = loaded.get(self._own.name, 0)
        if own and self._cost is not None and self._cost.num_samples:
            self._own.saved_s += self._cost.ms(StepWork.chunk(own, found)) / 1e3

    def used(self, keys: Sequence[bytes]) -> None:
        """A request begins with these blocks."""
        for group in self._groups:
            self._staging.use(group.group_id, keys)

    def fill(self, lease: Lease, prefix: Prefix) -> Fill:
        """What is to be copied into the blocks of a lease. Every record of it was found just now."""
        moves = []
        for group, places in enumerate(lease.to_fill):
            if not places:
                continue
            slots = [self._memory.found(group, prefix.keys[at + 1]) for at in places]
            self._memory.hold(group, slots)
            self._memory.retain(prefix.keys[0], group, slots, 0.0)
            moves.append(RecordMove(group, tuple([lease.blocks[group][at] for at in places]), tuple(slots)))
            self._own.loaded_bytes += len(slots) * self._staging.num_bytes[group]

        return Fill(moves, self._staging.num_bytes, self._let_go)

    def _let_go(self, moves: Sequence[RecordMove]) -> None:
        for move in moves:
            self._memory.let_go(move.group, move.slots)

    # What is stored ----------------------------------------------------------------------------------------------

    def unkept(self, lease: Lease, prefix: Prefix, words: Words = ()) -> list[Kept]:
        """Room for the blocks that become full when the prefix is committed, and have no record. ``words``: see
        :meth:`touch`."""
        first, full = lease.num_committed // self._block_size, prefix.num_tokens // self._block_size
        before = self._before(prefix, first) if prefix.keys and full > first + 1 else []  # of a prompt
        for group, slots in enumerate(before):
            self._memory.use(group, slots)
            self._memory.hold(group, slots)
        found = self._rooms(lease, prefix, first, full, words)
        for group, slots in enumerate(before):
            self._memory.let_go(group, slots)
        return found

    def _before(self, prefix: Prefix, first: int) -> list[list[int]]:
        """By group: slots with the records of a prefix that are there. Those after them are of no use without them, so
        they do not make way for them."""
        keys = prefix.keys[1 : first + 1]
        found = [[self._memory.find(group.group_id, key) for key in keys] for group in self._groups]
        return [[slot for slot in slots if slot is not None] for slots in found]

    def _rooms(self, lease: Lease, prefix: Prefix, first: int, full: int, words: Words) -> list[Kept]:
        found = []
        for group, blocks in enumerate(lease.blocks if first < full and prefix.keys else ()):
            own, slots, keys = [], [], []
            for at in range(first, full):
                key = prefix.keys[at + 1]
                if not blocks[at] or self._memory.find(group, key) is not None or self._others_have(group, key):
                    continue
                slot = self._memory.room(group, key)
                if slot is None:
                    break  # without this record those after it are of no use
                own.append(blocks[at])
                slots.append(slot)
                keys.append(key)
            if own:
                found.append(Kept(RecordMove(group, tuple(own), tuple(slots)), tuple(keys), prefix, words))
        return found

    def _others_have(self, group: int, key: bytes) -> bool:
        return self.others is not None and self._staging.has(self.others, group, key)

    def keep(self, new: Sequence[Kept]) -> None:
        """Store committed blocks. They can be found when :meth:`poll` has seen that it is done."""
        self._num_kept += 1
        self._store([kept.move for kept in new], lambda well: self._stored.put((new, well)))

    def when_stored(self, call: Callable[[], None]) -> None:
        """Call it once everything that was kept until now can be found."""
        self._after.append((self._num_kept, call))
        self._call_after()

    def _call_after(self) -> None:
        while self._after and self._after[0][0] <= self._num_stored:
            self._after.popleft()[1]()

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
            self._num_stored += 1
            self._call_after()

    def _publish(self, kept: Kept, well: bool) -> None:
        group, new = kept.move.group, []
        for slot, key in zip(kept.move.slots, kept.keys, strict=True):
            if not well:
                self._memory.abandon(group, slot)
                continue
            self._memory.publish(group, slot)
            if self._memory.find(group, key) == slot:
                self._own.stored_bytes += self._staging.num_bytes[group]
                new.append(slot)
                self._staging.write(group, key, slot)
        if new:
            self._memory.retain(kept.prefix.keys[0], group, new, 0.0)
        if kept.words:
            self._touch(group, kept.prefix, kept.words)

    def touch(self, prefix: Prefix, words: Words) -> None:
        """The records of a prefix were just of use. ``words``: which beginnings of it are to stay."""
        for group in self._groups:
            self._touch(group.group_id, prefix, words)

    def _touch(self, group: int, prefix: Prefix, words: Words) -> None:
        size = self._block_size
        places = [self._memory.find(group, key) for key in prefix.keys[1 : prefix.num_tokens // size + 1]]
        for num_tokens, seconds in ((prefix.num_tokens, 0.0), *words):
            slots = [slot for slot in places[: num_tokens // size] if slot is not None]
            if slots:
                self._memory.retain(prefix.keys[0], group, slots, seconds)
        if words:  # stores that want only what is used again want these at once
            most = max(num_tokens for num_tokens, _ in words)
            self._staging.use(group, prefix.keys[1 : most // size + 1])

    def clear(self) -> None:
        """No record may be found again."""
        for store in (self._memory.store, *self._staging.stores):
            store.clear()

    def states(self) -> tuple[StoreState, ...]:
        """Tier by tier."""
        found = []
        stores, tallies = (self._memory.store, *self._staging.stores), (self._own, *self._staging.tallies)
        for store, tally in zip(stores, tallies, strict=True):
            usage = store.usage()
            counts = usage.records, usage.num_bytes, usage.most_bytes, usage.evicted, usage.faults
            became = tally.loads, tally.loaded_tokens, tally.loaded_bytes, tally.stored_bytes
            times = round(tally.load_s, 6), round(tally.saved_s, 6)
            found.append(StoreState(tally.name, *counts, *became, *times, dict(tally.skipped)))
        return tuple(found)

    def close(self, deadline_s: float) -> None:
        for store in (*self._staging.stores, self._memory.store):
            store.close(deadline_s)
