"""KV allocator ``mine``: blocks on demand from one free list; no prefix is found again."""

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
    """One id names a block in every KV group at once, so all groups of a lease share one list of ids."""

    caches_prefixes = False
    """True: the core computes keys of prompts, and :meth:`match_prefix` and :meth:`open` may find some."""

    def __init__(self, config: MineAllocatorConfig, context: BuildContext) -> None:
        self._block_size = config.block_size

    def start(self, groups: Sequence[KVGroup], num_blocks: int) -> None:
        """Called once. Block 0 is padding: it is never handed out."""
        self._num_groups = len(groups)
        self._total = num_blocks - 1
        self._free = list(range(num_blocks - 1, 0, -1))
        self._open: dict[int, Lease] = {}

    def match_prefix(self, prefix: Prefix) -> int:
        """How many of the first tokens are cached right now. Must change nothing."""
        return 0

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease | None:
        """A lease on what is cached; ``None``: no room now, for allocators that reserve ahead."""
        lease = Lease(request_id, ([],) * self._num_groups, num_cached=0, num_committed=0)
        self._open[id(lease)] = lease
        return lease

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> int:
        """What :meth:`reserve` would take; ``None`` stands for a new lease with nothing cached."""
        held = 0 if lease is None else len(lease.blocks[0])
        return max(0, -(-num_tokens // self._block_size) - held)

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        """Make the lease cover ``num_tokens`` tokens. False: not enough blocks, and nothing has changed."""
        needed = self.blocks_needed(lease, num_tokens, num_tokens)
        if needed > len(self._free):
            return False
        lease.blocks[0].extend(self._free.pop() for _ in range(needed))
        return True

    def commit(self, lease: Lease, prefix: Prefix) -> None:
        """These tokens are final: their blocks may be shared from now on."""
        lease.num_committed = prefix.num_tokens

    def release(self, lease: Lease) -> None:
        """End the lease; a second time does nothing. Committed blocks may stay cached, all others become free."""
        if self._open.pop(id(lease), None) is lease:
            self._free.extend(reversed(lease.blocks[0]))
            lease.blocks[0].clear()

    def usage(self) -> BlockUsage:
        """``free + cached + leased == total``, at every moment."""
        return BlockUsage(self._total, len(self._free), cached=0, leased=self._total - len(self._free))

    def reset_cache(self) -> None:
        """Forget every cached prefix that no lease holds."""
