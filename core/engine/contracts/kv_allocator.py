"""Slot ``kv_allocator``: where do these tokens' keys and values live, and what is already there?

Pure bookkeeping on block ids; no tensors. The core owns the memory, the block tables and the hashing.

Caches that forget alike are one KV group, with a pool of blocks of its own: a block id of a group stands for a block
in each of its caches, and says nothing about another group. Block 0 of every group is never handed out: it takes the
writes of padding rows.

Invariant, at every moment and for each group: ``free + cached + leased == total``, where a block held by several leases
counts once. Called from the engine's loop, one call at a time. The core looks at every answer: a block that does not
exist, or that another lease holds, ends the engine with the plugin's name.
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
    """Caches that live in the same blocks.

    ``kind``: ``full`` keeps every token; of ``window``, a query sees its own token and the ``window - 1`` before it; of
    ``chunked``, those from the last multiple of ``window`` on; of ``state``, what a recurrent layer keeps of the
    tokens of its block and the block before it, after which lies the sum of all earlier ones. ``latent`` (compressed
    keys and values) keeps every token; the core counts them among ``full``.
    """

    group_id: int
    caches: tuple[int, ...]
    """Of the engine: those of the model in the order in which they are written, then a drafter's own."""
    kind: Literal["full", "window", "chunked", "latent", "state"]
    block_bytes: int
    """Bytes of one block over all caches of the group, keys and values together."""
    num_blocks: int
    """Blocks ``1 .. num_blocks - 1`` are the allocator's; block 0 is padding."""
    window: int | None = None
    """Tokens."""
    most_blocks: int | None = None
    """Blocks that one request holds at once, at most, while one step of it is in flight; ``None``: as many as its
    tokens take. A plugin that reserves ahead needs no more for a request."""

    @property
    def name(self) -> str:
        """In statistics and metrics: ``full``, ``window_4096``."""
        return self.kind if self.window is None else f"{self.kind}_{self.window}"

    @property
    def forgets(self) -> bool:
        """Tokens are passed: at some length nothing reads them any more."""
        return self.kind in ("window", "chunked", "state")

    def num_passed(self, num_tokens: int, block_size: int) -> int:
        """Blocks at the beginning of a sequence that no query at position ``num_tokens`` or after it reads."""
        if self.kind == "state":
            return max(0, num_tokens // block_size - 1)
        if self.window is None:
            return 0
        first = num_tokens - self.window + 1 if self.kind == "window" else num_tokens - num_tokens % self.window
        return max(0, first) // block_size


class Prefix(msgspec.Struct, frozen=True):
    """The first ``num_tokens`` tokens of a request, and names for what their blocks hold.

    ``tokens`` and ``keys`` may be longer, and grow while the request runs; what they have never changes. So an
    allocator may keep this value, and must not change it.
    """

    keys: Sequence[bytes] = ()
    """``keys[i]`` names the first ``i`` blocks, by a chained SHA-256 of their tokens: equal keys mean equal content.
    ``keys[0]`` names what must be equal before any token is; the block after the first ``i`` has the parent
    ``keys[i]``. There is a key for every full block of ``num_tokens``, or none at all: then nothing may be shared."""
    tokens: Sequence[int] = ()
    num_tokens: int = 0


@dataclass(slots=True)
class Lease:
    """One request's hold on blocks. The allocator mutates it; everybody else reads. Until it is released ids are only
    added to it, for the device has a copy of them; of a group that forgets, an id becomes 0 when all tokens of its
    block are passed: the block may then be another's, and nothing reads what is in the device's copy.

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
    The core copies each to this lease's block ``num_cached // block_size``, which no other lease holds, before the
    first step of this lease and in the order of :meth:`KVAllocator.open`. So the allocator may evict it and hand it
    out as soon as ``open`` has returned. A lease may end before its copies were made: nobody may find tokens in them
    before the first :meth:`KVAllocator.commit` of the lease. ``None`` where a hit ends at a block's border."""
    to_fill: tuple[tuple[int, ...], ...] = ()
    """Of a lease opened by :meth:`FillingAllocator.open_filling`: by group, the places in :attr:`blocks` whose content
    the core brings from elsewhere before the first step of this lease. Nobody may find it before the first
    :meth:`KVAllocator.commit`."""


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """Blocks of a group by state; ``free + cached + leased == total``."""

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

    def start(self, groups: Sequence[KVGroup]) -> None:
        """Take charge of the blocks of every group."""
        ...

    def match_prefix(self, prefix: Prefix) -> int:
        """How many leading tokens of ``prefix`` are cached right now in all groups, at most ``prefix.num_tokens``:
        whole blocks, and after them the first tokens of one more, if the plugin looks inside of blocks. Of a group
        that forgets, blocks that are passed at that length need not be there. Changes nothing."""
        ...

    def open(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease | None:
        """Start a lease, taking over the longest cached beginning of ``prefix`` (less of it where no block is left for
        a copy); ids of blocks that are passed at its end are 0. ``max_tokens`` is the most the request can ever need.
        ``None``: no room now (possible only if the plugin reserves ahead). A request that starts again may open a lease
        before its old one is released: steps in flight can still use the old one.
        """
        ...

    def blocks_needed(self, lease: Lease | None, num_tokens: int, max_tokens: int) -> tuple[int, ...]:
        """By group: blocks to take from the available ones so that the lease (``None``: a new one with nothing cached)
        covers ``num_tokens`` tokens in all, with no commit meanwhile."""
        ...

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        """Make the lease cover ``num_tokens`` tokens in all, in every group, evicting cached blocks if need be.
        False: not enough blocks in some group, and nothing changed. A plugin that reserves ahead refuses more than
        ``max_tokens``, rounded up to a block, and in a group that forgets more than ``most_blocks`` at once."""
        ...

    def commit(self, lease: Lease, prefix: Prefix) -> None:
        """The tokens of ``prefix`` are final, and may now be shared as far as it has keys. Rejected drafts are simply
        never committed. The lease gives back the blocks that are passed at this length: they stay cached where a
        request may find them, or become free."""
        ...

    def release(self, lease: Lease) -> None:
        """End the lease. Committed blocks may stay cached, also one that is not full; the rest become free.
        Idempotent."""
        ...

    def usage(self) -> tuple[BlockUsage, ...]:
        """By group: blocks by state, in O(1)."""
        ...

    def reset_cache(self) -> None:
        """Forget every cached prefix that no lease holds."""
        ...


@runtime_checkable
class FillingAllocator(KVAllocator, Protocol):
    """An allocator whose blocks may be filled from elsewhere: from records of slot ``kv_store``."""

    def has_block(self, group: int, key: bytes) -> bool:
        """Whether a block of a group can be found by its key right now."""
        ...

    def open_filling(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease | None:
        """As :meth:`KVAllocator.open`, for a prefix of whole blocks, all of which will be there: blocks that are found
        are taken over, further ones are reserved and are in :attr:`Lease.to_fill`, those that are passed at its end
        are 0. ``num_cached`` is all of it, ``num_committed`` 0 until the first :meth:`KVAllocator.commit`. ``None``:
        no room, and nothing changed."""
        ...


@runtime_checkable
class RetainingAllocator(KVAllocator, Protocol):
    """An allocator that can keep some prefixes longer than others."""

    def retain(self, prefix: Prefix, seconds: float) -> None:
        """The whole blocks of a prefix, which has keys and was committed, are to stay cached until they were not used
        for so long, if they are not retained for longer: among the blocks of their tenant, whose prefixes have the same
        ``keys[0]``, they are evicted last. It is a wish: no request waits for a block because of it, and the blocks of
        other tenants are evicted as if there were none."""
        ...
