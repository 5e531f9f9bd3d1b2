"""The KV allocator as the loop calls it: every answer is looked at once, when it comes.

A block that two requests own, or that does not exist, would not fail: one request would read another's keys and values,
or kernels would write outside of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.contracts.kv_allocator import (
    BlockUsage,
    FillingAllocator,
    KVAllocator,
    KVGroup,
    Lease,
    Prefix,
    RetainingAllocator,
)
from engine.plugin_guard.calls import PluginError, contract_error, quote


class CheckedAllocator:
    """Fulfils :class:`~engine.contracts.kv_allocator.KVAllocator` but for ``start``: the allocator is started already;
    and :class:`~engine.contracts.kv_allocator.FillingAllocator` and
    :class:`~engine.contracts.kv_allocator.RetainingAllocator` where the allocator does.

    Raises :class:`~engine.plugin_guard.calls.PluginError` for an answer that its contract rules out."""

    def __init__(self, allocator: KVAllocator, groups: Sequence[KVGroup], block_size: int) -> None:
        """``groups``: as the allocator was started with."""
        self._allocator = allocator
        self._filling = allocator if isinstance(allocator, FillingAllocator) else None
        self._retaining = allocator if isinstance(allocator, RetainingAllocator) else None
        self._groups = tuple(groups)
        self._block_size = block_size
        self._holders = [[0] * group.num_blocks for group in groups]
        """By group and block: how many leases hold it."""
        self._open: dict[int, list[list[int]]] = {}
        """By identity of a lease: of each group that forgets, the ids that it has had."""
        self._forgetful = tuple(at for at, group in enumerate(groups) if group.forgets)
        self.reset_cache = allocator.reset_cache  # answers nothing

    def match_prefix(self, prefix: Prefix) -> int:
        found = self._allocator.match_prefix(prefix)
        if type(found) is not int or not 0 <= found <= prefix.num_tokens:
            raise self._broken("match_prefix", f"returned {quote(found)}, expected 0 to {prefix.num_tokens} tokens")
        return found

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease | None:
        lease = self._allocator.open(request_id, prefix, max_tokens)
        if lease is None:
            return None
        if not isinstance(lease, Lease) or type(lease.num_cached) is not int:
            raise self._broken("open", f"returned {quote(lease)}, expected a Lease")
        if len(lease.blocks) != len(self._groups) or not all(type(ids) is list for ids in lease.blocks):
            raise self._broken(
                "open", f"returned {quote(lease)}, expected a list of ids for each of {len(self._groups)} groups"
            )
        cached, held = lease.num_cached, min(map(len, lease.blocks))
        most = prefix.num_tokens if prefix.keys else 0
        if not 0 <= cached <= min(most, held * self._block_size):
            raise self._broken(
                "open", f"says num_cached={cached} of {most} tokens that may be shared, with {held} blocks of "
                f"{self._block_size} tokens",
            )  # fmt: skip
        for at, group in enumerate(self._groups):
            passed, shared = group.num_passed(cached, self._block_size), cached // self._block_size
            self._take("open", at, lease.blocks[at], passed=passed, shared=shared)
        self._check_copy(lease)
        self._open[id(lease)] = [list(lease.blocks[at]) for at in self._forgetful]
        return lease

    def has_block(self, group: int, key: bytes) -> bool:
        assert self._filling is not None  # asked for each block of a prompt
        return self._filling.has_block(group, key)

    def open_filling(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease | None:
        assert self._filling is not None
        lease = self._filling.open_filling(request_id, prefix, max_tokens)
        if lease is None:
            return None
        full = prefix.num_tokens // self._block_size
        for at, group in enumerate(self._groups):
            first, ids = group.num_passed(prefix.num_tokens, self._block_size), lease.blocks[at]
            fills = lease.to_fill[at]
            if len(ids) != full or lease.num_cached != prefix.num_tokens or not {*fills} <= {*range(first, full)}:
                raise self._broken(
                    "open_filling", f"returned {quote(lease)}, expected {full} blocks in group {at}, of which those "
                    f"from {first} on may be filled",
                )  # fmt: skip
            for place in fills:
                if self._holders[at][ids[place]]:
                    raise self._broken("open_filling", f"fills block {ids[place]}, which another lease holds")
            self._take("open_filling", at, ids, passed=first, shared=full)
        self._open[id(lease)] = [list(lease.blocks[at]) for at in self._forgetful]
        return lease

    @property
    def retains(self) -> bool:
        return self._retaining is not None

    def retain(self, prefix: Prefix, seconds: float) -> None:
        assert self._retaining is not None
        self._retaining.retain(prefix, seconds)

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> tuple[int, ...]:
        needed = self._allocator.blocks_needed(lease, num_tokens, max_tokens)
        if type(needed) is not tuple or len(needed) != len(self._groups):
            raise self._broken(
                "blocks_needed", f"returned {quote(needed)}, expected a number of blocks for each of "
                f"{len(self._groups)} groups",
            )  # fmt: skip
        for count in needed:
            if type(count) is not int or count < 0:
                raise self._broken("blocks_needed", f"returned {quote(needed)}, expected numbers of blocks")
        return needed

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        before = [len(ids) for ids in lease.blocks]
        reserved = self._allocator.reserve(lease, num_tokens)
        if type(reserved) is not bool:
            raise self._broken("reserve", f"returned {quote(reserved)}, expected True or False")
        for at, ids in enumerate(lease.blocks):
            if len(ids) != before[at]:
                if len(ids) < before[at] or not reserved:
                    raise self._broken("reserve", f"returned {reserved} and made {len(ids)} blocks of {before[at]}")
                self._added("reserve", lease, at, before[at])
            if reserved and len(ids) * self._block_size < num_tokens:
                raise self._broken("reserve", f"returned True for {num_tokens} tokens and {len(ids)} blocks")
        return reserved

    def commit(self, lease: Lease, prefix: Prefix) -> None:
        before = lease.num_committed
        self._allocator.commit(lease, prefix)
        for index, at in enumerate(self._forgetful):
            self._check_passed(lease, at, self._open[id(lease)][index], before)

    def release(self, lease: Lease) -> None:
        if id(lease) in self._open:  # the first time
            del self._open[id(lease)]
            for ids, holders in zip(lease.blocks, self._holders, strict=True):
                for block in ids:
                    holders[block] -= 1  # of padding, too: nobody asks
        self._allocator.release(lease)

    def usage(self) -> tuple[BlockUsage, ...]:
        usage = self._allocator.usage()
        if type(usage) is not tuple or [type(own) for own in usage] != [BlockUsage] * len(self._groups):
            raise self._broken(
                "usage", f"returned {quote(usage)}, expected a BlockUsage for each of {len(self._groups)} groups"
            )
        return usage

    def check_idle(self) -> None:
        """Nobody runs: all blocks must be back."""
        for usage in self.usage():
            if usage.leased or usage.free + usage.cached != usage.total:
                raise self._broken("release", f"left {quote(usage)} when every request had ended")

    def _check_copy(self, lease: Lease) -> None:
        """A hit that ends inside of a block says which block of each group to copy; any other says none."""
        sources, (own, part) = lease.copy_from, divmod(lease.num_cached, self._block_size)
        if not part and sources is None:
            return
        if not part or type(sources) is not tuple or len(sources) != len(lease.blocks):
            wanted = f"a block for each of {len(lease.blocks)} groups" if part else "None"
            raise self._broken(
                "open", f"says copy_from={quote(sources)} with num_cached={lease.num_cached}, expected {wanted}"
            )
        for group, source, ids in zip(self._groups, sources, lease.blocks, strict=True):
            if type(source) is not int or not 0 < source < group.num_blocks or source == ids[own]:
                raise self._broken(
                    "open", f"copies block {quote(source)} to block {ids[own]}, expected another of 1 to "
                    f"{group.num_blocks - 1}",
                )  # fmt: skip

    def _check_passed(self, lease: Lease, at: int, had: list[int], before: int) -> None:
        """The blocks that were passed by a commit, and no others, are given back."""
        ids, size, group = lease.blocks[at], self._block_size, self._groups[at]
        first, end = (group.num_passed(tokens, size) for tokens in (before, lease.num_committed))
        for index in range(first, end):
            if ids[index]:
                raise self._broken("commit", f"kept block {ids[index]}, which a window of {group.window} has passed")
            self._holders[at][had[index]] -= 1
            had[index] = 0
        if len(ids) > end and ids[end] != had[end]:
            raise self._broken("commit", f"changed block {had[end]} to {ids[end]}, which is read")
        if len(ids) > len(had):
            self._added("commit", lease, at, len(had))

    def _added(self, call: str, lease: Lease, at: int, first: int) -> None:
        """Blocks from ``first`` on are new in a lease."""
        new = lease.blocks[at][first:]
        self._take(call, at, new)
        if at in self._forgetful:
            self._open[id(lease)][self._forgetful.index(at)].extend(new)

    def _take(self, call: str, at: int, blocks: Sequence[int], passed: int = 0, shared: int = 0) -> None:
        """Blocks of a group that are new in a lease. Those of a cached prefix, the first ``shared``, others may hold as
        well; the first ``passed`` are none."""
        holders, most = self._holders[at], self._groups[at].num_blocks - 1
        for index, block in enumerate(blocks):
            if index < passed and block == 0:
                continue
            if index < passed or type(block) is not int or not 0 < block <= most:
                wanted = "0: it is passed" if index < passed else f"1 to {most}"
                raise self._broken(call, f"handed out block {quote(block)}, expected {wanted}")
            if holders[block] and index >= shared:
                raise self._broken(call, f"handed out block {block}, which another lease holds")
            holders[block] += 1

    def _broken(self, call: str, problem: str) -> PluginError:
        return contract_error(self._allocator, call, problem)
