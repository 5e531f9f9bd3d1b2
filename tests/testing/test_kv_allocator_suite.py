"""The suite of ``kv_allocator`` holds the contract, which leaves the order of eviction to the plugin."""

from __future__ import annotations

import random
from collections.abc import Sequence

from engine.contracts.config import KVAllocatorConfig
from engine.contracts.kv_allocator import KVGroup
from engine.testing.context import build_context
from engine.testing.kv_allocator import PartialBlockConformance
from engine_plugins.kv_allocator.prefix_cache import CachedBlocks, PrefixCacheAllocator


class Blocks(CachedBlocks):
    """Idle blocks go in the order that :meth:`victims` states."""

    __slots__ = ()

    def victims(self, idle: list[int]) -> list[int]:
        raise NotImplementedError

    def evict(self, count: int) -> None:
        for block in self.victims(list(self._cached)):
            self._cached.add(block, self._cached.owner_of(block))
        super().evict(count)


class EvictsAsItSays(PrefixCacheAllocator):
    """``Blocks``: what the blocks of a group are kept by."""

    Blocks = Blocks

    def start(self, groups: Sequence[KVGroup]) -> None:
        super().start(groups)
        for pool in self._pools:
            pool.__class__ = self.Blocks


class FirstInFirstOut(EvictsAsItSays):
    """What was committed first goes first, however often it was used since."""

    class Blocks(Blocks):
        __slots__ = ()

        def victims(self, idle: list[int]) -> list[int]:
            found = {block: at for at, block in enumerate(self.index._content_of)}
            return sorted(idle, key=found.__getitem__)


class AtRandom(EvictsAsItSays):
    """Any idle block may go, also one in the middle of a chain."""

    class Blocks(Blocks):
        __slots__ = ()

        def victims(self, idle: list[int]) -> list[int]:
            return random.Random(sum(idle)).sample(idle, len(idle))


class LargestIdFirst(EvictsAsItSays):
    """The end of memory goes first: heads of chains before their tails, and tails before heads."""

    class Blocks(Blocks):
        __slots__ = ()

        def victims(self, idle: list[int]) -> list[int]:
            return sorted(idle, reverse=True)


class TestFirstInFirstOut(PartialBlockConformance):
    plugin: type[EvictsAsItSays] = FirstInFirstOut

    def make(self, block_size: int) -> EvictsAsItSays:
        return self.plugin(KVAllocatorConfig(block_size=block_size), build_context(block_size))


class TestAtRandom(TestFirstInFirstOut):
    plugin = AtRandom


class TestLargestIdFirst(TestFirstInFirstOut):
    plugin = LargestIdFirst
