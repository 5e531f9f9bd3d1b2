"""KV groups: which caches share blocks, and how many blocks a group has. Torch-free.

Caches that are read alike are one group: a block id of it stands for a block in each of them. Groups lie in the
order in which their first cache is written; a drafter's own caches are further ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.contracts.drafter import DrafterKV
from engine.contracts.graph import EVERY_TOKEN, Cached, KVSpec, Reach, TokenShare
from engine.contracts.kv_allocator import KVGroup
from engine.models.placement import RankGraph


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The caches of an engine, those of the model first, and which KV group each is in."""

    caches: tuple[Cached, ...]
    group_of: tuple[int, ...]
    reaches: tuple[Reach, ...]
    """By group: which tokens its queries see."""

    @property
    def token_shares(self) -> tuple[TokenShare | None, ...]:
        """By group: which tokens of its blocks this rank caches; ``None``: all."""
        found: list[set[TokenShare | None]] = [set() for _ in self.reaches]
        for spec, group in zip(self.caches, self.group_of, strict=True):
            found[group].add(spec.tokens if isinstance(spec, KVSpec) else None)
        assert all(len(shares) < 2 for shares in found), "caches of a KV group hold the same tokens"
        return tuple(next(iter(shares), None) for shares in found)

    def block_sizes(self, block_size: int) -> tuple[int, ...]:
        """By group: tokens of a block that this rank caches, of ``block_size`` that an allocator hands out."""
        return tuple(block_size // (1 if share is None else share.ranks) for share in self.token_shares)

    @property
    def num_groups(self) -> int:
        return len(self.reaches)

    @property
    def full_share(self) -> float:
        """Of the numbers that a token leaves in caches with and without a window, the share of those without; 1.0 where
        no cache keeps every token."""
        numbers = [(spec.numbers, spec.reach.kind) for spec in self.caches if isinstance(spec, KVSpec)]
        full = sum(count for count, kind in numbers if kind == "full")
        return full / sum(count for count, _ in numbers) if full else 1.0

    def members(self, group: int) -> tuple[int, ...]:
        """The caches of a group."""
        return tuple(cache for cache, its in enumerate(self.group_of) if its == group)


def cache_groups(caches: Sequence[Cached], drafter: DrafterKV | None = None, dcp: int = 1) -> CacheGroups:
    """``caches``: the model's (:attr:`engine.contracts.graph.Graph.caches`); ``drafter``: what a drafter keeps beside
    them; ``dcp``: how many ranks share out the tokens of the model's caches that keep every token. A drafter keeps all
    on each, in a group of its own."""
    together = (*caches, *(() if drafter is None else drafter.caches))
    kinds = [(spec.reach, _is_shared(spec, number < len(caches), dcp)) for number, spec in enumerate(together)]
    distinct = tuple(dict.fromkeys(kinds))
    return CacheGroups(together, tuple(map(distinct.index, kinds)), tuple(reach for reach, _ in distinct))


def _is_shared(spec: Cached, of_model: bool, dcp: int) -> bool:
    if not isinstance(spec, KVSpec):
        return False
    return spec.tokens is not None or (of_model and dcp > 1 and spec.reach == EVERY_TOKEN)


def one_group(caches: Sequence[Cached], drafter: DrafterKV | None = None) -> CacheGroups:
    """All caches in one group that keeps every token, whatever queries see: for a pass over a text at hand."""
    together = cache_groups(caches, drafter).caches
    return CacheGroups(together, (0,) * len(together), (EVERY_TOKEN,))


def of_rank(whole: CacheGroups, own: RankGraph) -> CacheGroups:
    """The caches of one rank, in the groups of the whole model; a drafter's where the last layer is."""
    after = range(own.num_caches, len(whole.caches)) if own.is_last else ()
    caches = (*own.graph.caches, *(whole.caches[cache] for cache in after))
    return CacheGroups(caches, tuple(whole.group_of[cache] for cache in (*own.caches, *after)), whole.reaches)


STATE_BLOCKS = 4
"""Of a recurrent state, that a request holds between steps: the block of its last token and the one before, and what
steps in flight add."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """How large the pools of all groups are: each number follows from the blocks of a group that keeps every token.

    A group with a window or chunk needs fewer: for long requests a window for each, for requests shorter than that,
    and for cached prefixes of any length, as many as any other group. Which will come is not known, so the split is
    the one whose worst case is best. Let a token take ``f`` bytes in groups that keep every token and ``g`` in the
    others, let a window be the share ``u`` of ``max_len``, and let there be ``n`` blocks here and ``w`` there:
    requests of ``max_len`` can use ``n (f + u g)`` bytes of ``n f + w g``, short ones ``w (f + g)``. These are equal
    for ``w = n (f + u g) / (f + g)``, and then more than half of the pool.
    """

    reaches: tuple[Reach, ...]
    block_bytes: tuple[int, ...]
    """By group: of one block in all its caches."""
    block_size: int
    max_len: int
    """Most tokens of a request."""
    step_tokens: int
    """Most tokens of a request in one step."""
    max_requests: int
    """Rows of a step."""
    full_share: float
    """``f / (f + g)`` of the whole model, by which all ranks split alike: :attr:`CacheGroups.full_share`."""
    caches_prefixes: bool = True
    """The allocator does; for one that does not, windows of all rows are enough."""
    for_one: int = 0
    """Up to so many blocks the pool is for one request alone, with the fewest blocks that its window needs: so
    ``max_len`` fits where memory is short. From an eighth more on pools are split as above."""

    def most_blocks(self, group: int) -> int:
        """Blocks of a group that a request holds at once, at most, while no more than one step is in flight."""
        whole, reach = self._whole, self.reaches[group]
        if reach.kind == "full":
            return whole
        seen = self.block_size if reach.tokens is None else reach.tokens
        return min(whole, -(-(seen + self.step_tokens) // self.block_size) + 1)

    def kept_blocks(self, group: int) -> int:
        """Blocks of a group that a request of ``max_len`` holds between steps."""
        reach = self.reaches[group]
        if reach.kind == "state":
            return STATE_BLOCKS
        return self._whole if reach.tokens is None else min(self._whole, -(-reach.tokens // self.block_size) + 1)

    @property
    def _whole(self) -> int:
        return -(-self.max_len // self.block_size)

    @property
    def _step_blocks(self) -> int:
        return -(-self.step_tokens // self.block_size)

    def blocks(self, num_blocks: int) -> tuple[int, ...]:
        """Blocks of each group, the padding block included, in a pool whose groups of all tokens have ``num_blocks``,
        padding included."""
        return tuple(
            num_blocks if reach.kind == "full" else 1 + self._forgetful_blocks(group, num_blocks - 1)
            for group, reach in enumerate(self.reaches)
        )

    def _forgetful_blocks(self, group: int, count: int) -> int:
        """Of a group that forgets, beside ``count`` of one that keeps every token."""
        most = self.most_blocks(group)
        if self.reaches[group].kind == "state":  # what a request holds does not grow with its length
            return min(count, max(self.max_requests * STATE_BLOCKS + self._step_blocks, most))
        if count <= self.for_one:
            return min(count, most)
        further, rise = count - self.for_one, -(-self.for_one // 8)
        if further < rise:
            return most + further * (self._split(group, self.for_one + rise) - most) // rise
        return self._split(group, count)

    def _split(self, group: int, count: int) -> int:
        """Of a group with a window or chunk: see the class."""
        most = self.most_blocks(group)
        used = min(1.0, self.kept_blocks(group) / min(self._whole, max(1, count)))
        share = math.ceil(count * (self.full_share + (1 - self.full_share) * used)) + self._step_blocks
        return min(count, max(most, share if self.caches_prefixes else min(share, self.max_requests * most)))

    def requests(self, num_blocks: int, tokens: int, shared: int = 0) -> int:
        """How many requests of ``tokens`` tokens that pool holds at once, the first ``shared`` of which all have in
        common: whole blocks of these are stored once, in groups that keep every token."""
        alike = replace(self, max_len=max(1, tokens))
        counts = self.blocks(num_blocks)
        return max(0, min(alike._held(group, count - 1, shared) for group, count in enumerate(counts)))

    def _held(self, group: int, count: int, shared: int) -> int:
        """Requests of ``max_len`` that ``count`` blocks of a group are enough for."""
        kept = self.kept_blocks(group)
        if self.reaches[group].kind == "full":
            common = min(kept - 1, shared // self.block_size)
            return (count - common) // (kept - common)
        if self.reaches[group].kind == "state" or kept == self._whole:
            return count // kept
        return max(count // self.most_blocks(group), (count - self._step_blocks) // kept)

    def num_bytes(self, num_blocks: int) -> int:
        """Bytes of that pool."""
        return sum(count * size for count, size in zip(self.blocks(num_blocks), self.block_bytes, strict=True))

    def fitting(self, num_bytes: int, most: int) -> int:
        """The largest ``num_blocks`` up to ``most`` whose pool takes no more than ``num_bytes``; 0: not even padding
        blocks fit. A rank whose layers keep states alone has room for any number of the others' blocks."""
        fewest, most = 0, most + 1
        while most - fewest > 1:
            middle = (fewest + most) // 2
            fewest, most = (middle, most) if self.num_bytes(middle) <= num_bytes else (fewest, middle)
        return fewest

    def groups(self, found: CacheGroups, num_blocks: int) -> tuple[KVGroup, ...]:
        """What an allocator is told, of that pool."""
        counts = self.blocks(num_blocks)
        return tuple(
            KVGroup(
                group,
                found.members(group),
                reach.kind,
                self.block_bytes[group],
                counts[group],
                reach.tokens,
                self.most_blocks(group),
            )
            for group, reach in enumerate(self.reaches)
        )
