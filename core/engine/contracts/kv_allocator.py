"""Slot ``kv_allocator``: where do these tokens' keys and values live, and what is already there?

Pure bookkeeping on block ids; no tensors. The core owns the memory, the block tables and the hashing.

Block 0 of every group is never handed out: it takes the writes of padding rows.

Invariant, at every moment: ``free + cached + leased == total``, where a block held by several leases counts once.

A block id stands for one block in every group: a lease holds the same number of ids in each, and :class:`BlockUsage`
counts ids, not blocks times groups. Called from the engine's loop, one call at a time. The core looks at every answer:
a block that does not exist, or that another lease holds, ends the engine with the plugin's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import msgspec

FEWEST_BLOCKS = 3
"""Of a KV pool: the padding block, and two that a request can use."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose cache lives in the same blocks.

    ``kind``: ``full`` keeps every token; ``window`` needs only the last ``window`` tokens; ``latent`` and
    ``state`` are for compressed attention and recurrent layers.
    """

    group_id: int
    layers: tuple[int, ...]
    kind: Literal["full", "window", "latent", "state"]
    block_bytes: int
    """Bytes of one block over all layers of the group, keys and values together."""
    window: int | None = None


class Prefix(msgspec.Struct, frozen=True):
    """The first ``num_tokens`` tokens of a request, and names for what their blocks hold.

    ``tokens`` and ``keys`` may be longer, and grow while the request runs; what they have never changes. So an
    allocator may keep this value, and must not change it.
    """

    keys: Sequence[bytes] = ()
    """``keys[i]`` names the first ``i`` blocks, by a chained SHA-256 of their tokens: equal keys mean equal content.
    ``keys[0]`` names what must be equal before any token is; the block behind the first ``i`` has the parent
    ``keys[i]``. There is a key for every full block of ``num_tokens``, or none at all: then nothing may be shared."""
    tokens: Sequence[int] = ()
    num_tokens: int = 0


@dataclass(slots=True)
class Lease:
    """One request's hold on blocks. The allocator mutates it; everybody else reads. Ids are only added to it, until it
    is released: the device has a copy of them.

    ``blocks[g]`` are the ids in group ``g``, in token order: token ``t`` lives in
    ``blocks[g][t // block_size]`` at offset ``t % block_size``.
    """

    request_id: str
    blocks: tuple[list[int], ...]
    num_cached: int
    """Leading tokens that were found in the prefix cache when the lease was opened."""
    num_committed: int
    """Leading tokens whose keys and values are final."""
    copy_from: tuple[int, ...] | None = None
    """Where ``num_cached`` is no multiple of block_size: the block of each group that holds the last of these tokens.
    The core copies it to this lease's block ``num_cached // block_size``, which no other lease holds, before the first
    step of this lease and in the order of :meth:`KVAllocator.open`. So the allocator may evict it and hand it out as
    soon as ``open`` has returned. A lease may end before its copy was made: nobody may find tokens in the copy before
    the first :meth:`KVAllocator.commit` of the lease. ``None`` where a hit ends at a block's border."""


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """Blocks by state; ``free + cached + leased == total``."""

    total: int
    free: int
    cached: int
    """Not leased, but still holding a reusable prefix; evicted when needed."""
    leased: int

    @property
    def available(self) -> int:
        return self.free + self.cached


@runtime_checkable
class KVAllocator(Protocol):
    """The plugin, built by ``factory(config, context)``; then :meth:`start` is called once with the memory's size."""

    caches_prefixes: bool
    """False: :meth:`match_prefix` is always 0 and the core does not compute block keys."""

    def start(self, groups: Sequence[KVGroup], num_blocks: int) -> None:
        """Take charge of blocks ``1 .. num_blocks - 1`` of every group (block 0 is padding)."""
        ...

    def match_prefix(self, prefix: Prefix) -> int:
        """How many leading tokens of ``prefix`` are cached right now, at most ``prefix.num_tokens``: whole blocks, and
        behind them the first tokens of one more, if the plugin looks inside of blocks. Changes nothing."""
        ...

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease | None:
        """Start a lease, taking over the longest cached beginning of ``prefix`` (less of it where no block is left for
        a copy). ``max_tokens`` is the most the request can ever need. ``None``: no room now (possible only if the
        plugin reserves ahead). A request that starts again may open a lease before its old one is released: steps in
        flight can still use the old one.
        """
        ...

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> int:
        """Blocks to take from the available ones so that the lease (``None``: a new one with nothing cached)
        covers ``num_tokens`` tokens in all."""
        ...

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        """Make the lease cover ``num_tokens`` tokens in all, evicting cached blocks if need be.
        False: not enough blocks, and nothing changed. A plugin that reserves ahead refuses more than ``max_tokens``,
        rounded up to a block."""
        ...

    def commit(self, lease: Lease, prefix: Prefix) -> None:
        """The tokens of ``prefix`` are final, and may now be shared as far as it has keys. Rejected drafts are simply
        never committed."""
        ...

    def release(self, lease: Lease) -> None:
        """End the lease. Committed blocks may stay cached, also one that is not full; the rest become free.
        Idempotent."""
        ...

    def usage(self) -> BlockUsage:
        """Blocks by state, in O(1)."""
        ...

    def reset_cache(self) -> None:
        """Forget every cached prefix that no lease holds."""
        ...
