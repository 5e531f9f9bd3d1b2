"""Rows and blocks: the one module where sequences take and give back rows of the device tables and KV leases."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from engine.contracts.kv_allocator import KVAllocator, Lease, Prefix
from engine.kv.checked_allocator import CheckedAllocator
from engine.loop.ledger import Ledger
from engine.loop.sequence import Sequence
from engine.step.plan import BlockCopy


class Pool:
    """Rows of the device tables and KV leases.

    A row and its blocks are given back only after the last plan that used them has retired.
    """

    def __init__(
        self,
        allocator: KVAllocator,
        num_rows: int,
        block_size: int,
        ledger: Ledger,
        on_row_free: Callable[[int], None],
        kv_lookahead: int,
    ) -> None:
        self.allocator = CheckedAllocator(allocator, block_size)
        self.block_size = block_size
        self.num_rows = num_rows
        self._free_rows = list(range(num_rows))
        self._ledger = ledger
        self._on_row_free = on_row_free
        self._kv_lookahead = kv_lookahead
        self.blocks_coming = 0
        """Upper bound of blocks that become available when steps in flight retire."""

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def hit(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that are cached right now."""
        return self.allocator.match_prefix(self._reusable(sequence))

    def admit(self, sequence: Sequence) -> bool:
        """Give the sequence a row and a lease, prefix hit included. False: no free row or blocks."""
        if not self._free_rows:
            return False
        lease = self.allocator.open(sequence.request_id, self._reusable(sequence), sequence.max_total)
        if lease is None:
            return False
        sequence.admit(heapq.heappop(self._free_rows), lease, self._copies(lease))
        return True

    def _reusable(self, sequence: Sequence) -> Prefix:
        """What a prefix hit may cover: at least the last token must be computed."""
        known = len(sequence.tokens)
        if not self._kv_lookahead:
            return self._prefix(sequence, known - 1)
        # Keys of a drafter that looks ahead were computed from the tokens behind theirs, which must be the same, too.
        same = self.allocator.match_prefix(self._prefix(sequence, known))
        return self._prefix(sequence, max(0, min(known - 1, same - self._kv_lookahead)))

    def _prefix(self, sequence: Sequence, num_tokens: int) -> Prefix:
        keys = () if sequence.keys is None else sequence.keys.extend(sequence.tokens)
        return Prefix(keys, sequence.tokens, num_tokens)

    def _copies(self, lease: Lease) -> tuple[BlockCopy, ...]:
        """What the device must copy before the lease's first step, by KV group."""
        if lease.copy_from is None:
            return ()
        at = lease.num_cached // self.block_size
        return tuple(BlockCopy(source, ids[at]) for source, ids in zip(lease.copy_from, lease.blocks, strict=True))

    def withdraw(self, sequence: Sequence) -> None:
        """Undo :meth:`admit` before any plan used it."""
        row_id, lease = sequence.leave()
        assert lease is not None
        self._give_back(row_id, lease)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the lease cover ``num_tokens`` tokens in all. What drafts that are rejected were given stays with the
        lease: the next step needs it again."""
        assert sequence.lease is not None
        return self.allocator.reserve(sequence.lease, num_tokens)

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that :meth:`grow` lacks even when everything that is coming has come; <= 0: none."""
        needed = self.allocator.blocks_needed(sequence.lease, num_tokens, sequence.max_total)
        return needed - self.allocator.usage().available - self.blocks_coming

    def commit(self, sequence: Sequence) -> None:
        """The first ``computed`` tokens are final and may be shared."""
        assert sequence.lease is not None
        self.allocator.commit(sequence.lease, self._prefix(sequence, sequence.computed))

    def release(self, sequence: Sequence, spoiled: bool = False) -> None:
        """Give back row and lease once the last plan that used them has retired. ``spoiled``: nobody may find its
        blocks by what they should hold."""
        row_id, lease = sequence.leave()
        if lease is None:
            return
        size = len(lease.blocks[0])
        self.blocks_coming += size

        def give_back() -> None:
            self.blocks_coming -= size
            self._give_back(row_id, lease)
            if spoiled:
                # Its prefix may be shared, and was wrong before anybody noticed: all prefixes are computed again.
                self.allocator.reset_cache()

        self._ledger.after(sequence.last_plan, give_back)

    def _give_back(self, row_id: int, lease: Lease) -> None:
        self.allocator.release(lease)
        heapq.heappush(self._free_rows, row_id)
        self._on_row_free(row_id)
