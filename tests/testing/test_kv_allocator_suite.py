"""The suite of ``kv_allocator`` holds the contract, which leaves the order of eviction to the plugin."""

from __future__ import annotations

import random

from engine.contracts.config import KVAllocatorConfig
from engine.contracts.provider import BuildContext
from engine.testing.context import build_context
from engine.testing.kv_allocator import PartialBlockConformance
from engine_plugins.kv_allocator.prefix_cache import PrefixCacheAllocator


class EvictsAsItSays(PrefixCacheAllocator):
    """Idle blocks go in the order that :meth:`victims` states."""

    def victims(self, idle: list[int]) -> list[int]:
        raise NotImplementedError

    def _evict(self, count: int) -> None:
        self._cached = type(self._cached).fromkeys(self.victims(list(self._cached)))
        super()._evict(count)


class FirstInFirstOut(EvictsAsItSays):
    """What was committed first goes first, however often it was used since."""

    def victims(self, idle: list[int]) -> list[int]:
        found = {block: at for at, block in enumerate(self._index._content_of)}
        return sorted(idle, key=found.__getitem__)


class AtRandom(EvictsAsItSays):
    """Any idle block may go, also one in the middle of a chain."""

    def __init__(self, config: KVAllocatorConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self._random = random.Random(0)

    def victims(self, idle: list[int]) -> list[int]:
        return self._random.sample(idle, len(idle))


class LargestIdFirst(EvictsAsItSays):
    """The end of memory goes first: heads of chains before their tails, and tails before heads."""

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
