"""KV allocator ``mine``: blocks on demand from a free list of each group; no prefix is found again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.contracts.config import KVAllocatorConfig
from engine.contracts.kv_allocator import BlockUsage, KVGroup, Lease, Prefix
from engine.contracts.provider import BuildContext, Provider
from engine.hookspecs import hookimpl


@dataclass(frozen=True)
class MineAllocatorConfig(KVAllocatorConfig):
    """The keys ``kv_allocator.<field>``: add fields with a type, a default and a line on what they do."""


@hookimpl
def engine_kv_allocator() -> list[Provider]:
    return [
        Provider(
            "mine",
            "engine.cli.plugins.templates.kv_allocator.plugin:MineAllocator",
            config=MineAllocatorConfig,
            provides=("paged",),
            doc="Takes blocks as a request grows.",
        )
    ]


class MineAllocator:
    """Each KV group has blocks of its own; a lease has a list of ids for each."""

    caches_prefixes = False
    """True: the core computes keys of prompts, and :meth:`match_prefix` and :meth:`open` may find some."""

    def __init__(self, config: MineAllocatorConfig, context: BuildContext) -> None:
        self._block_size = config.block_size

    def start(self, groups: Sequence[KVGroup]) -> None:
        """Called once. Block 0 of a group is padding: it is never handed out."""
        self._groups = tuple(groups)
        self._free = [list(range(group.num_blocks - 1, 0, -1)) for group in groups]
        self._open: dict[int, Lease] = {}

    def match_prefix(self, prefix: Prefix) -> int:
        """How many of the first tokens are cached right now. Must change nothing."""
        return 0

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease | None:
        """A lease on what is cached; ``None``: no room now, for allocators that reserve ahead."""
        lease = Lease(request_id, tuple([] for _ in self._groups), num_cached=0, num_committed=0)
        self._open[id(lease)] = lease
        return lease

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> tuple[int, ...]:
        """What :meth:`reserve` would take of each group; ``None`` stands for a new lease with nothing cached."""
        total = -(-num_tokens // self._block_size)
        held = [0] * len(self._groups) if lease is None else [len(blocks) for blocks in lease.blocks]
        return tuple(max(0, total - count) for count in held)

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        """Make the lease cover ``num_tokens`` tokens. False: not enough blocks, and nothing has changed."""
        needed = self.blocks_needed(lease, num_tokens, num_tokens)
        if any(count > len(free) for count, free in zip(needed, self._free, strict=True)):
            return False
        for blocks, free, count in zip(lease.blocks, self._free, needed, strict=True):
            blocks.extend(free.pop() for _ in range(count))
        return True

    def commit(self, lease: Lease, prefix: Prefix) -> None:
        """These tokens are final: their blocks may be shared from now on, and those that a window has passed are given
        back."""
        before, lease.num_committed = lease.num_committed, prefix.num_tokens
        for group, free, blocks in zip(self._groups, self._free, lease.blocks, strict=True):
            ends = (group.num_passed(tokens, self._block_size) for tokens in (before, lease.num_committed))
            for at in range(*ends):
                free.append(blocks[at])
                blocks[at] = 0

    def release(self, lease: Lease) -> None:
        """End the lease; a second time does nothing. Committed blocks may stay cached, all others become free."""
        if self._open.pop(id(lease), None) is lease:
            for free, blocks in zip(self._free, lease.blocks, strict=True):
                free.extend(block for block in reversed(blocks) if block)
                blocks.clear()

    def usage(self) -> tuple[BlockUsage, ...]:
        """By group, ``free + cached + leased == total``, at every moment."""
        counts = [(group.num_blocks - 1, len(free)) for group, free in zip(self._groups, self._free, strict=True)]
        return tuple(BlockUsage(total, free, cached=0, leased=total - free) for total, free in counts)

    def reset_cache(self) -> None:
        """Forget every cached prefix that no lease holds."""
