"""KV groups: which caches share blocks, and how many blocks a group has. Torch-free.

Caches that are read alike are one group: a block id of it stands for a block in each of them. Groups lie in the
order in which their first cache is written; a drafter's own caches are further ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    behind = range(own.num_caches, len(whole.caches)) if own.is_last else ()
    caches = (*own.graph.caches, *(whole.caches[cache] for cache in behind))
    return CacheGroups(caches, tuple(whole.group_of[cache] for cache in (*own.caches, *behind)), whole.reaches)


STATE_BLOCKS = 4
"""Of a recurrent state, that a request holds between steps: the block of its last token and the one before, and what
steps in flight add."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """How large the pools of all groups are, in proportion: each number follows from how many tokens the pool is for.

    The unit is the block of a group that keeps every token. Of a group that forgets a request holds no more blocks
    than its window or chunk and the tokens of one step take, so its pool is smaller.
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

    def most_blocks(self, group: int) -> int:
        """Blocks of a group that a request holds at once, at most, while no more than one step is in flight."""
        whole, reach = -(-self.max_len // self.block_size), self.reaches[group]
        if reach.kind == "full":
            return whole
        seen = self.block_size if reach.tokens is None else reach.tokens
        return min(whole, -(-(seen + self.step_tokens) // self.block_size) + 1)

    def blocks(self, num_blocks: int) -> tuple[int, ...]:
        """Blocks of each group, the padding block included, in a pool whose groups of all tokens have ``num_blocks``,
        padding included."""
        requests, rest = divmod(num_blocks - 1, -(-self.max_len // self.block_size))
        counts = []
        for group, reach in enumerate(self.reaches):
            most = self.most_blocks(group)
            if reach.kind == "full":
                counts.append(num_blocks)
            elif reach.kind == "state":  # what a request holds does not grow with its length
                rows = self.max_requests * STATE_BLOCKS + -(-self.step_tokens // self.block_size)
                counts.append(min(num_blocks, 1 + max(rows, most)))
            else:
                counts.append(1 + requests * most + min(rest, most))
        return tuple(counts)

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
