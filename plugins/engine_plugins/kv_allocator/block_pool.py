"""Bookkeeping that the block-granular allocators share: the free list and the table of open leases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from engine.contracts.kv_allocator import KVGroup, Lease


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


class FreeBlocks:
    """Free block ids ``1 .. num_blocks - 1`` as a stack.

    Last in, first out keeps recently used memory warm in caches, and hands out ascending runs both from a fresh
    pool and after a request gave its blocks back: kernels that read neighbouring blocks profit, at no cost here.
    """

    __slots__ = ("_stack",)

    def __init__(self, num_blocks: int) -> None:
        self._stack = list(range(num_blocks - 1, 0, -1))

    def __len__(self) -> int:
        return len(self._stack)

    def __iter__(self) -> Iterator[int]:
        return iter(self._stack)

    def take(self, count: int) -> list[int]:
        """Remove and return ``count`` ids; the caller has checked that there are as many."""
        assert count <= len(self._stack), f"{count} blocks asked for, {len(self._stack)} are free"
        if count == 0:
            return []
        taken = self._stack[: -count - 1 : -1]
        del self._stack[-count:]
        return taken

    def give(self, blocks: Sequence[int]) -> None:
        """Put ids back so that they come out again in the given order."""
        self._stack.extend(reversed(blocks))


class Leases:
    """The open leases, by identity: a request may hold a new one while steps in flight still use its old one."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: dict[int, Lease] = {}

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._open.values())

    def add(
        self,
        request_id: str,
        blocks: tuple[list[int], ...],
        num_cached: int = 0,
        copy_from: tuple[int, ...] | None = None,
    ) -> Lease:
        lease = Lease(request_id, blocks, num_cached, num_cached, copy_from)
        self._open[id(lease)] = lease
        return lease

    def remove(self, lease: Lease) -> tuple[list[int], ...] | None:
        """Forget the lease and take its block ids from it, by group, padding included; ``None`` if it was over
        already."""
        if self._open.get(id(lease)) is not lease:
            return None
        del self._open[id(lease)]
        blocks = tuple(list(ids) for ids in lease.blocks)
        for ids in lease.blocks:
            ids.clear()
        return blocks


def started(groups: Sequence[KVGroup]) -> tuple[KVGroup, ...]:
    """The groups, of which there is at least one."""
    if not groups:
        raise ValueError("no KV groups: a model has at least one")
    return tuple(groups)


def advance(lease: Lease, num_tokens: int, block_size: int) -> None:
    """Move the lease's commit mark; it never goes back, nor past the lease's blocks."""
    room = min(map(len, lease.blocks)) * block_size
    assert lease.num_committed <= num_tokens <= room, (
        f"request {lease.request_id!r}: commit of {num_tokens} tokens after {lease.num_committed}, with room for {room}"
    )
    lease.num_committed = num_tokens


def passed(group: KVGroup, before: int, now: int, block_size: int) -> range:
    """Blocks of a sequence that a group passes between two numbers of committed tokens."""
    return range(group.num_passed(before, block_size), group.num_passed(now, block_size))


def take_out(blocks: list[int], at: Iterable[int]) -> list[int]:
    """The ids at these places of a lease, which become 0."""
    taken = []
    for index in at:
        taken.append(blocks[index])
        blocks[index] = 0
    return taken


def held(blocks: Iterable[int]) -> list[int]:
    """A lease's ids less those of passed blocks."""
    return [block for block in blocks if block]


def check_partition(num_blocks: int, **states: Iterable[int]) -> None:
    """Assert that each of the blocks ``1 .. num_blocks - 1`` is in exactly one of the given states, once."""
    seen: dict[int, str] = {}
    for state, blocks in states.items():
        for block in blocks:
            assert 0 < block < num_blocks, f"block {block} in {state} is outside 1..{num_blocks - 1}"
            assert block not in seen, f"block {block} is in {seen.get(block)} and in {state}"
            seen[block] = state
    missing = set(range(1, num_blocks)) - seen.keys()
    assert not missing, f"blocks in no state: {sorted(missing)}"
