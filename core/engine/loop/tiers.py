"""Keys and values beyond the device: which records are found, and loaded. What a store does with them, the plugins of
slot ``kv_store`` say.

A record is stored when its block is committed (:mod:`engine.loop.storing`), and is filled into a block by the plan that
first needs it. In between it is bytes in memory of this machine; what a further tier has is brought there while its
request waits (:mod:`engine.loop.staging`), with no row and no block held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from engine.contracts.kv_allocator import KVGroup, Lease, Prefix
from engine.contracts.kv_store import KVStore, LendingStore, MemoryStore, OtherEngines, SharedStore, StagedStore
from engine.contracts.request import StagedTokens
from engine.contracts.step_cost import NO_WORK, StepCost, StepWork
from engine.kv.checked_allocator import CheckedAllocator
from engine.kv.checked_memory import CheckedMemory
from engine.loop.filling import Fill, LoadBound
from engine.loop.lending import Lending
from engine.loop.messages import StoreState
from engine.loop.staging import Read, Staging, Tally
from engine.loop.storing import StoreMoves, Storing
from engine.plugin_guard.calls import name_of, named
from engine.step.plan import RecordMove

FEWEST_TOKENS = 32
"""Less than this is computed, not read from a further store."""
UNKNOWN_S = 1.0
"""What it takes to compute tokens before any prompt was measured."""
MEASURED_TOKENS = 256
"""Of a step: smaller ones say little of what a prompt takes."""


def prompt_ms(cost: StepCost, work: StepWork) -> float:
    """What computing prompts takes, as far as measured: contexts longer than those of measured steps count as these.
    0: not known."""
    seen = cost.largest
    if not seen.prefill_context or seen.num_tokens < min(work.num_tokens, MEASURED_TOKENS):
        return 0.0
    most = work.num_tokens * seen.prefill_context // seen.num_tokens
    return cost.ms(replace(work, prefill_context=min(work.prefill_context, most)))


class Tiers:
    """Finds records for prefixes, and has them loaded; :attr:`storing` has new ones stored."""

    def __init__(
        self,
        names: Sequence[str],
        stores: Sequence[KVStore],
        num_bytes: Sequence[int],
        allocator: CheckedAllocator,
        groups: Sequence[KVGroup],
        block_size: int,
        store: StoreMoves,
        clock: Callable[[], float],
        first_cost: StepCost,
    ) -> None:
        """``stores``: open, the first of them a :class:`MemoryStore`; ``num_bytes``: of a record, by group;
        ``first_cost``: of steps, which counts until it is known better."""
        memory, *further = stores
        assert isinstance(memory, MemoryStore)
        self._memory = CheckedMemory(memory, num_bytes)
        self._others: OtherEngines | None = None
        if isinstance(memory, SharedStore) and (others := memory.others()) is not None:
            self._others = named(others, name_of(memory), (OtherEngines,))
        staged = [each for each in (self._others, *further) if isinstance(each, StagedStore)]
        for each in staged:
            if isinstance(each, LendingStore):
                each.serve(Lending(self._memory, num_bytes))
        self._staging = Staging(self._memory, staged, num_bytes, clock)
        self._allocator = allocator
        self._groups = tuple(groups)
        self._block_size = block_size
        self._first_cost = first_cost
        self.load_bound = LoadBound(num_bytes)
        self._own = Tally(names[0])
        """Of memory."""
        further_names = names[1:] if self._others is None else (f"{names[0]} of others", *names[1:])
        for tally, name in zip(self._staging.tallies, further_names, strict=True):
            tally.name = name
        self.storing = Storing(self._memory, self._staging, groups, block_size, store, self._others, self._own)

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

    def stage(self, prefix: Prefix, cost: StepCost, ahead_ms: Sequence[float]) -> tuple[float, Read | None]:
        """Begin to bring what the further store that reaches furthest has of a prefix, where that is sooner than to
        compute it. ``ahead_ms``: what computing each of those takes that come before it. Returns what computing it
        takes, as far as that is measured, and what to wait for, if anything."""
        if not self._staging.stores:
            return 0.0, None
        reach = self.reach(prefix)
        read = self._stage(prefix, reach, cost, ahead_ms) if prefix.keys else None
        return prompt_ms(cost, StepWork.chunk(prefix.num_tokens + 1 - reach, reach)), read

    def _stage(self, prefix: Prefix, reach: int, cost: StepCost, ahead_ms: Sequence[float]) -> Read | None:
        size = self._block_size
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
        work = StepWork.chunk(end - reach, reach)
        compute_ms = prompt_ms(cost, work)
        compute_s = (compute_ms or prompt_ms(self._first_cost, work)) / 1e3 or UNKNOWN_S
        # Steps are shared out, so a short prompt does not wait until a long one is computed.
        ahead_s = sum([min(each / 1e3, compute_s) for each in ahead_ms])
        read = self._staging.read(number, ids, compute_s, ahead_s)
        if read is not None:
            read.first, read.compute_ms = reach, compute_ms
        return read

    def has_last_block(self, prefix: Prefix) -> bool:
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
        tally.unpriced_s += max(0.0, waited_ms / 1e3 - read.ahead_s)
        if tokens:
            tally.unpriced += StepWork.chunk(tokens, read.first)
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
        if own := loaded.get(self._own.name, 0):
            self._own.unpriced += StepWork.chunk(own, found)

    def offer_again(self, keys: Sequence[bytes]) -> None:
        """A request begins with these blocks."""
        for group in self._groups:
            self._staging.offer_again(group.group_id, keys)

    def fill(self, lease: Lease, prefix: Prefix) -> Fill:
        """What is to be copied into the blocks of a lease. Every record of it was found just now."""
        moves = []
        for group, indexes in enumerate(lease.to_fill):
            if not indexes:
                continue
            slots = [self._memory.found(group, prefix.keys[at + 1]) for at in indexes]
            self._memory.hold(group, slots)
            self._memory.touch(prefix.keys[0], group, slots)
            moves.append(RecordMove(group, tuple([lease.blocks[group][at] for at in indexes]), tuple(slots)))
            self._own.loaded_bytes += len(slots) * self._staging.num_bytes[group]

        return Fill(moves, self._staging.num_bytes, self._let_go)

    def _let_go(self, moves: Sequence[RecordMove]) -> None:
        for move in moves:
            self._memory.let_go(move.group, move.slots)

    # All of it ------------------------------------------------------------------------------------------------------

    def rest(self) -> None:
        """The loop sleeps until a store wakes it."""
        self._staging.rest()

    def poll(self) -> None:
        """Take in what other threads have done."""
        self._staging.poll()
        self.storing.poll()

    def others_forgot(self) -> bool:
        """See :meth:`OtherEngines.forgot`."""
        return self._others is not None and self._others.forgot()

    def clear(self) -> None:
        """No record may be found again."""
        for store in (self._memory.store, *self._staging.stores):
            store.clear()

    def states(self, cost: StepCost) -> tuple[StoreState, ...]:
        """Tier by tier. ``cost``: of steps, which says what loads have saved."""
        found = []
        stores, tallies = (self._memory.store, *self._staging.stores), (self._own, *self._staging.tallies)
        for store, tally in zip(stores, tallies, strict=True):
            usage = store.usage()
            compute_ms = prompt_ms(cost, tally.unpriced) if tally.unpriced.num_tokens else 0.0
            if compute_ms or not tally.unpriced.num_tokens:
                tally.saved_s += compute_ms / 1e3 - tally.unpriced_s
                tally.unpriced, tally.unpriced_s = NO_WORK, 0.0
            counts = usage.records, usage.num_bytes, usage.most_bytes, usage.evicted, usage.faults
            became = tally.loads, tally.loaded_tokens, tally.loaded_bytes, tally.stored_bytes
            times = round(tally.load_s, 6), round(tally.saved_s, 6)
            skipped = dict(tally.skipped)
            found.append(StoreState(tally.name, *counts, *became, *times, skipped, tally.unpriced.num_tokens))
        return tuple(found)

    def close(self, deadline_s: float) -> None:
        for store in (*self._staging.stores, self._memory.store):
            store.close(deadline_s)
