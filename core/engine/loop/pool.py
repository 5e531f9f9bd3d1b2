"""Rows and blocks: the one place where sequences take and give back slots and KV leases."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from engine.contracts.kv_allocator import KVAllocator, Lease
from engine.loop.ledger import Ledger
from engine.loop.sequence import Sequence


class Pool:
    """Slots of the device tables and KV leases.

    A slot and its blocks are given back only after the last plan that used them has retired.
    """

    def __init__(
        self,
        allocator: KVAllocator,
        num_slots: int,
        block_size: int,
        ledger: Ledger,
        on_slot_free: Callable[[int], None],
        gives_up_last_block: bool,
    ) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.num_slots = num_slots
        self._free_slots = list(range(num_slots))
        self._ledger = ledger
        self._on_slot_free = on_slot_free
        self._gives_up_last_block = gives_up_last_block
        self._gaps: set[int] = set()
        """Blocks of group 0 that lack keys of a drafter, which did not follow whoever wrote them."""
        self.blocks_coming = 0
        """Upper bound of blocks that become available when steps in flight retire."""

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def prefix_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys that a prefix hit may use: at least the last token must be computed, so it is left out."""
        if sequence.keys is None:
            return []
        sequence.keys.extend(sequence.tokens)
        keys = sequence.keys.shareable(len(sequence.tokens))
        return keys[:-1] if self._gives_up_last_block else keys

    def hit(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that are cached right now."""
        return self.allocator.match_prefix(self.prefix_keys(sequence)) * self.block_size

    def admit(self, sequence: Sequence) -> bool:
        """Give the sequence a slot and a lease, prefix hit included. False: no room."""
        if not self._free_slots:
            return False
        lease = self.allocator.open(sequence.request_id, self.prefix_keys(sequence), sequence.max_total)
        if lease is None:
            return False
        sequence.lease = lease
        sequence.slot = heapq.heappop(self._free_slots)
        sequence.blocks_sent = 0
        sequence.scheduled = sequence.computed = lease.num_cached
        hit = lease.num_cached // self.block_size
        sequence.drafter_follows = self._gaps.isdisjoint(lease.blocks[0][:hit])
        self._mark_gaps(sequence, hit)
        return True

    def withdraw(self, sequence: Sequence) -> None:
        """Undo :meth:`admit` before any plan used it."""
        assert sequence.lease is not None
        self._give_back(sequence.slot, sequence.lease)
        sequence.slot, sequence.lease, sequence.scheduled, sequence.computed = -1, None, 0, 0

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the lease cover ``num_tokens`` tokens in all."""
        assert sequence.lease is not None
        held = len(sequence.lease.blocks[0])
        if not self.allocator.reserve(sequence.lease, num_tokens):
            return False
        self._mark_gaps(sequence, held)
        return True

    def unfollow(self, sequence: Sequence) -> None:
        """No drafter is told any more what this sequence computes from here on."""
        sequence.drafter_follows = False
        self._mark_gaps(sequence, sequence.scheduled // self.block_size)

    def _mark_gaps(self, sequence: Sequence, begin: int) -> None:
        """The sequence writes its blocks from index ``begin`` on: with the drafter's keys, or without."""
        assert sequence.lease is not None
        if not sequence.drafter_follows:
            self._gaps.update(sequence.lease.blocks[0][begin:])
        elif self._gaps:
            self._gaps.difference_update(sequence.lease.blocks[0][begin:])

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that :meth:`grow` lacks even when everything that is coming has come; <= 0: none."""
        needed = self.allocator.blocks_needed(sequence.lease, num_tokens, sequence.max_total)
        return needed - self.allocator.usage().available - self.blocks_coming

    def commit(self, sequence: Sequence) -> None:
        """The first ``computed`` tokens are final and may be shared."""
        assert sequence.lease is not None
        keys = [] if sequence.keys is None else sequence.keys.extend(sequence.tokens)
        self.allocator.commit(sequence.lease, sequence.computed, keys)

    def release(self, sequence: Sequence) -> None:
        """Give back slot and lease once the last plan that used them has retired."""
        lease, slot = sequence.lease, sequence.slot
        sequence.lease, sequence.slot = None, -1
        if lease is None:
            return
        size = len(lease.blocks[0])
        self.blocks_coming += size

        def give_back() -> None:
            self.blocks_coming -= size
            self._give_back(slot, lease)

        self._ledger.after(sequence.last_plan, give_back)

    def _give_back(self, slot: int, lease: Lease) -> None:
        self.allocator.release(lease)
        heapq.heappush(self._free_slots, slot)
        self._on_slot_free(slot)
