"""Rows and blocks: the one module where sequences take and give back rows of the device tables and KV leases. What
becomes of a block that is given back, the plugin of slot ``kv_allocator`` says."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from operator import add, sub

from engine.contracts.kv_allocator import KVAllocator, KVGroup, Lease, Prefix
from engine.contracts.scheduler import Blocks
from engine.contracts.step_cost import StepCost
from engine.kv.checked_allocator import CheckedAllocator
from engine.loop.ledger import Ledger
from engine.loop.sequence import NOTHING, Sequence
from engine.loop.staging import Read
from engine.loop.tiers import Tiers
from engine.step.plan import BlockCopy, RecordMove

HEARD_S = 0.05
"""How long stores may take to hear of what another engine has computed."""


class Pool:
    """Rows of the device tables and KV leases.

    A row and its blocks are given back only after the last plan that used them has retired.
    """

    def __init__(
        self,
        allocator: KVAllocator,
        groups: SequenceOf[KVGroup],
        num_rows: int,
        block_size: int,
        step_tokens: int,
        ledger: Ledger,
        on_row_free: Callable[[int], None],
        kv_lookahead: int,
    ) -> None:
        """``groups``: as the allocator was started with; ``step_tokens``: most tokens of a step."""
        self.allocator = CheckedAllocator(allocator, groups, block_size)
        self.groups = tuple(groups)
        self.block_size = block_size
        self._step_tokens = step_tokens
        self._forgetful = tuple((at, group) for at, group in enumerate(groups) if group.forgets)
        self.num_rows = num_rows
        self._free_rows = list(range(num_rows))
        self._ledger = ledger
        self._on_row_free = on_row_free
        self._kv_lookahead = kv_lookahead
        self.tiers: Tiers | None = None
        """Keys and values beyond the device, once the engine has started."""
        self._num_resets = 0
        """Calls of :meth:`reset_cache`."""
        self.blocks_coming = [0] * len(self.groups)
        """By group: upper bound of blocks that become available when steps in flight retire."""

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def hit(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that are cached right now, in blocks or in records."""
        return self._match(self._reusable(sequence))

    def stages(self, sequence: Sequence, cost: StepCost, now_s: float, ahead_ms: SequenceOf[float]) -> bool:
        """Whether a waiting sequence is to wait on, for records that are on their way. ``ahead_ms``: what computing
        each of those takes that come before it."""
        if self.tiers is None:
            return False
        if not sequence.looked:
            prefix, known_s = self._reusable(sequence, staged=True), sequence.submitted_s + HEARD_S
            if sequence.request.prefilled and now_s < known_s and not self.tiers.has_last_block(prefix):
                sequence.read = Read.without_records(now_s, known_s)
            else:
                sequence.looked = True
                sequence.compute_ms, sequence.read = self.tiers.stage(prefix, cost, ahead_ms)
        return sequence.read is not None and sequence.read.waits(now_s)

    def when_stored(self, call: Callable[[], None]) -> None:
        """Call it once the records of all that was committed can be found; at once where none are kept."""
        if self.tiers is None:
            call()
        else:
            self.tiers.storing.when_stored(call)

    def forget_read(self, sequence: Sequence, loaded: Mapping[str, int] = NOTHING) -> None:
        """It waits for no records any more. ``loaded``: tokens that it has from records, by store."""
        if sequence.read is not None and sequence.read.ids and self.tiers is not None:
            staged = self.tiers.give_up(sequence.read, loaded)
            sequence.staged = sequence.staged or staged
        sequence.read = None

    def _match(self, prefix: Prefix) -> int:
        found = self.allocator.match_prefix(prefix)
        return found if self.tiers is None else max(found, self.tiers.reach(prefix))

    def admit(self, sequence: Sequence) -> bool:
        """Give the sequence a row and a lease, prefix hit included. False: no free row or blocks."""
        if not self._free_rows:
            return False
        sequence.num_resets = self._num_resets
        prefix = self._reusable(sequence)
        if self.tiers is not None:
            found, reach = self.allocator.match_prefix(prefix), self.tiers.reach(prefix)
            if reach > found:
                return self._admit_filling(self.tiers, sequence, Prefix(prefix.keys, prefix.tokens, reach), found)
        lease = self.allocator.open(sequence.request_id, prefix, sequence.max_total)
        if lease is None:
            return False
        self.forget_read(sequence)
        sequence.admit(heapq.heappop(self._free_rows), lease, self._copies(lease))
        return True

    def _admit_filling(self, tiers: Tiers, sequence: Sequence, prefix: Prefix, found: int) -> bool:
        """With a lease of which some blocks are filled with records; ``found``: tokens that are there without them."""
        lease = self.allocator.open_filling(sequence.request_id, prefix, sequence.max_total)
        if lease is None:
            return False
        fill = tiers.fill(lease, prefix)
        loaded = tiers.sources(sequence.read, found, prefix.num_tokens)
        self.forget_read(sequence, loaded)
        sequence.admit(heapq.heappop(self._free_rows), lease, fill=fill, loaded=loaded)
        return True

    def count_hit(self, sequence: Sequence) -> None:
        """It is admitted: say so to the stores that its prefix is in."""
        if self.tiers is not None and sequence.keys is not None:
            self.tiers.count(sequence.loaded, sequence.computed - sum(sequence.loaded.values()))
            self.tiers.offer_again(sequence.keys.extend(sequence.tokens)[1 : sequence.computed // self.block_size + 1])

    def loads(self, sequence: Sequence, plan_id: int, most_bytes: float = math.inf) -> tuple[RecordMove, ...]:
        """Records that a plan is to fill into the blocks of a sequence, at most of so many bytes. They are held until
        it has retired."""
        if sequence.fill is None:
            return ()
        moves, let_go = sequence.fill.take(most_bytes)
        sequence.last_plan = plan_id
        self._ledger.after(plan_id, let_go)
        if not sequence.fill.moves:
            sequence.fill = None
        return moves

    def _reusable(self, sequence: Sequence, staged: bool = False) -> Prefix:
        """What a prefix hit may cover: at least the last token must be computed. ``staged``: wherever keys and values
        are."""
        known = len(sequence.tokens)
        if staged or not self._kv_lookahead:
            return self._prefix(sequence, known - 1)
        # Keys of a drafter that looks ahead were computed from the tokens after theirs, which must be the same, too.
        same = self._match(self._prefix(sequence, known))
        return self._prefix(sequence, max(0, min(known - 1, same - self._kv_lookahead)))

    def _prefix(self, sequence: Sequence, num_tokens: int) -> Prefix:
        keys = () if sequence.keys is None else sequence.keys.extend(sequence.tokens)
        return Prefix(keys, sequence.tokens, num_tokens)

    def _copies(self, lease: Lease) -> tuple[BlockCopy, ...]:
        """What the device must copy before the lease's first step."""
        if lease.copy_from is None:
            return ()
        at = lease.num_cached // self.block_size
        copies = zip(lease.copy_from, lease.blocks, strict=True)
        return tuple(BlockCopy(group, source, ids[at]) for group, (source, ids) in enumerate(copies))

    def withdraw(self, sequence: Sequence) -> None:
        """Undo :meth:`admit` before any plan used it."""
        self._forget_fill(sequence)
        row_id, lease = sequence.leave()
        assert lease is not None
        self._give_back(row_id, lease)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the lease cover ``num_tokens`` tokens in all. What drafts that are rejected were given stays with the
        lease: the next step needs it again."""
        assert sequence.lease is not None
        return self.allocator.reserve(sequence.lease, num_tokens)

    def missing(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether :meth:`grow` lacks blocks even when everything that is coming has come."""
        needed = self.allocator.blocks_needed(sequence.lease, num_tokens, sequence.max_total)
        passing = self._passing(sequence)
        usage = zip(needed, self.allocator.usage(), self.blocks_coming, passing, strict=True)
        return any(count > own.available + coming + soon for count, own, coming, soon in usage)

    def _passing(self, sequence: Sequence) -> list[int]:
        """By group: upper bound of the blocks that the sequence gives back when its steps in flight retire."""
        passing = [0] * len(self.groups)
        for at, group in self._forgetful:
            before, after = (group.num_passed(end, self.block_size) for end in (sequence.computed, sequence.scheduled))
            passing[at] = after - before
        return passing

    def needed(self, sequence: Sequence, hit: int, num_tokens: int) -> Blocks:
        """By group: further blocks if ``num_tokens`` more of its tokens are computed; of a sequence without a lease
        after ``hit`` cached ones, which count as available until they are taken over."""
        lease = sequence.lease
        before = sequence.scheduled if lease else hit
        needed = self.allocator.blocks_needed(lease, before + num_tokens, sequence.max_total)
        if not self._forgetful:
            return needed
        bounded = list(needed)
        for at, group in self._forgetful:
            if lease is None:
                bounded[at] -= group.num_passed(before, self.block_size)
            if num_tokens > self._step_tokens and group.most_blocks is not None:  # in several steps
                held = 0 if lease is None else num_held(lease.blocks[at])
                bounded[at] = min(bounded[at], group.most_blocks - held)
            bounded[at] = max(0, bounded[at])
        return tuple(bounded)

    def held(self, sequence: Sequence) -> Blocks:
        """By group: blocks of its lease."""
        return held_by(sequence.lease) if sequence.lease else (0,) * len(self.groups)

    def available(self) -> Blocks:
        """By group: blocks that are free or could be evicted."""
        return tuple([usage.available for usage in self.allocator.usage()])

    def commit(self, sequence: Sequence) -> None:
        """The first ``computed`` tokens are final and may be shared; blocks that a window has passed are given back."""
        assert sequence.lease is not None
        prefix = self._prefix(sequence, sequence.computed)
        is_last_of_prompt = sequence.lease.num_committed < sequence.prompt_len <= sequence.computed
        retain = sequence.request.retain if is_last_of_prompt and self.allocator.retains else ()
        storing = None if self.tiers is None or sequence.num_resets < self._num_resets else self.tiers.storing
        new = () if storing is None else storing.begin(sequence.lease, prefix, retain)
        self.allocator.commit(sequence.lease, prefix)
        if new and storing is not None:
            storing.store(new)  # before a later plan can write to them
        if retain and prefix.keys:
            self._retain(sequence, prefix)

    def _retain(self, sequence: Sequence, prefix: Prefix) -> None:
        """What its request wants to stay cached, now that its prompt is."""
        if self.tiers is not None:
            self.tiers.storing.retain(prefix, sequence.request.retain)
        for num_tokens, seconds in sequence.request.retain:
            if num_tokens >= self.block_size:
                self.allocator.retain(self._prefix(sequence, num_tokens), seconds)
                sequence.num_retained = max(sequence.num_retained, num_tokens)

    def release(self, sequence: Sequence, spoiled: bool = False) -> None:
        """Give back row and lease once the last plan that used them has retired. ``spoiled``: nobody may find its
        blocks by what they should hold."""
        self._forget_fill(sequence)
        self.forget_read(sequence)
        row_id, lease = sequence.leave()
        if lease is None:
            return
        sizes = held_by(lease)
        self.blocks_coming = list(map(add, self.blocks_coming, sizes))

        def give_back() -> None:
            self.blocks_coming = list(map(sub, self.blocks_coming, sizes))
            self._give_back(row_id, lease)
            if spoiled:
                # Its prefix may be shared, and was wrong before anybody noticed: all prefixes are computed again.
                self.reset_cache()

        self._ledger.after(sequence.last_plan, give_back)

    def reset_cache(self) -> None:
        """Nobody finds what was computed up to now, but in blocks that a lease holds; what goes on from there is not
        stored."""
        self._num_resets += 1
        self.allocator.reset_cache()
        if self.tiers is not None:
            self.tiers.clear()

    def _forget_fill(self, sequence: Sequence) -> None:
        if sequence.fill is not None:
            sequence.fill.give_up()
            sequence.fill = None

    def _give_back(self, row_id: int, lease: Lease) -> None:
        self.allocator.release(lease)
        heapq.heappush(self._free_rows, row_id)
        self._on_row_free(row_id)


def held_by(lease: Lease) -> Blocks:
    """By group: blocks that a lease holds."""
    return tuple([num_held(blocks) for blocks in lease.blocks])


def num_held(blocks: SequenceOf[int]) -> int:
    """Of a lease's ids in a group: those of blocks that no window has passed."""
    return len(blocks) - blocks.count(0)
