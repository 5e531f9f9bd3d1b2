"""Which new blocks become records, and how long those are to stay.

A record is stored once the step that computed its block is committed: in memory, and from there in what further stores
want.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from engine.contracts.kv_allocator import KVGroup, Lease, Prefix
from engine.contracts.kv_store import OtherEngines
from engine.contracts.request import Retained
from engine.kv.checked_memory import CheckedMemory
from engine.loop.staging import Staging, Tally
from engine.step.plan import RecordMove

StoreMoves = Callable[[Sequence[RecordMove], Callable[[bool], None]], None]
"""Copies blocks to slots behind the steps that were launched, then calls the function, from any thread: whether all
went well."""


@dataclass(frozen=True, slots=True)
class NewRecords:
    """Blocks of a group that are being stored, with the keys of their records."""

    move: RecordMove
    keys: tuple[bytes, ...]
    prefix: Prefix
    retain: Sequence[Retained] = ()
    """Of the prefix."""


class Storing:
    """Has new blocks stored."""

    def __init__(
        self,
        memory: CheckedMemory,
        staging: Staging,
        groups: Sequence[KVGroup],
        block_size: int,
        store: StoreMoves,
        others: OtherEngines | None,
        tally: Tally,
    ) -> None:
        """``others``: what they have is not stored; ``tally``: of memory."""
        self._memory = memory
        self._staging = staging
        self._groups = tuple(groups)
        self._block_size = block_size
        self._store = store
        self._others = others
        self._tally = tally
        self._copied: SimpleQueue[tuple[Sequence[NewRecords], bool]] = SimpleQueue()
        self._num_begun = self._num_stored = 0
        """Calls of :meth:`store`, and those of them that are done."""
        self._after: deque[tuple[int, Callable[[], None]]] = deque()
        """What is to be called when so many are."""

    def begin(self, lease: Lease, prefix: Prefix, retain: Sequence[Retained] = ()) -> list[NewRecords]:
        """Room for the blocks that become full when the prefix is committed, and have no record. ``retain``: see
        :meth:`retain`."""
        first, full = lease.num_committed // self._block_size, prefix.num_tokens // self._block_size
        before = self._before(prefix, first) if prefix.keys and full > first + 1 else []  # of a prompt
        for group, slots in enumerate(before):
            self._memory.touch(prefix.keys[0], group, slots)
            self._memory.hold(group, slots)
        found = self._rooms(lease, prefix, first, full, retain)
        for group, slots in enumerate(before):
            self._memory.let_go(group, slots)
        return found

    def _before(self, prefix: Prefix, first: int) -> list[list[int]]:
        """By group: slots with the records of a prefix that are there. Those after them are of no use without them, so
        they do not make way for them."""
        keys = prefix.keys[1 : first + 1]
        found = [[self._memory.find(group.group_id, key) for key in keys] for group in self._groups]
        return [[slot for slot in slots if slot is not None] for slots in found]

    def _rooms(
        self, lease: Lease, prefix: Prefix, first: int, full: int, retain: Sequence[Retained]
    ) -> list[NewRecords]:
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
                found.append(NewRecords(RecordMove(group, tuple(own), tuple(slots)), tuple(keys), prefix, retain))
        return found

    def _others_have(self, group: int, key: bytes) -> bool:
        return self._others is not None and self._staging.has(self._others, group, key)

    def store(self, new: Sequence[NewRecords]) -> None:
        """Copy blocks that :meth:`begin` has found room for, and that are committed now. They can be found when
        :meth:`poll` has seen that it is done."""
        self._num_begun += 1
        self._store([records.move for records in new], lambda well: self._copied.put((new, well)))

    def when_stored(self, call: Callable[[], None]) -> None:
        """Call it once everything that is being stored now can be found."""
        self._after.append((self._num_begun, call))
        self._call_after()

    def _call_after(self) -> None:
        while self._after and self._after[0][0] <= self._num_stored:
            self._after.popleft()[1]()

    def poll(self) -> None:
        """Take in what was copied."""
        while True:
            try:
                new, well = self._copied.get_nowait()
            except Empty:
                return
            for records in new:
                self._publish(records, well)
            self._num_stored += 1
            self._call_after()

    def _publish(self, records: NewRecords, well: bool) -> None:
        group, new, keys = records.move.group, [], []
        for slot, key in zip(records.move.slots, records.keys, strict=True):
            if not well:
                self._memory.abandon(group, slot)
                continue
            self._memory.publish(group, slot)
            if self._memory.find(group, key) == slot:
                self._tally.stored_bytes += self._staging.num_bytes[group]
                new.append(slot)
                keys.append(key)
                self._staging.write(group, key, slot)
        if new:
            self._memory.touch(records.prefix.keys[0], group, new)
            self._staging.retain(records.prefix.keys[0], group, keys, 0.0)
        if records.retain:
            self._retain(group, records.prefix, records.retain)

    def retain(self, prefix: Prefix, retain: Sequence[Retained]) -> None:
        """The records of a prefix were just of use. ``retain``: which beginnings of it are to stay, and how long."""
        for group in self._groups:
            self._retain(group.group_id, prefix, retain)

    def _retain(self, group: int, prefix: Prefix, retain: Sequence[Retained]) -> None:
        size = self._block_size
        found = [self._memory.find(group, key) for key in prefix.keys[1 : prefix.num_tokens // size + 1]]
        for num_tokens, seconds in ((prefix.num_tokens, 0.0), *retain):
            slots = [slot for slot in found[: num_tokens // size] if slot is not None]
            if slots:
                self._memory.touch(prefix.keys[0], group, slots, seconds)
        if retain:  # stores that want only what is used again want these at once
            most = max(num_tokens for num_tokens, _ in retain)
            self._staging.offer_again(group, prefix.keys[1 : most // size + 1])
        for num_tokens, seconds in retain:
            self._staging.retain(prefix.keys[0], group, prefix.keys[1 : num_tokens // size + 1], seconds)
