from engine.cli.plugins.templates.kv_allocator.plugin import MineAllocator, MineAllocatorConfig
from engine.testing.context import build_context
from engine.testing.kv_allocator import KVAllocatorConformance


class TestMineAllocator(KVAllocatorConformance):
    """What the core relies on. An allocator that caches prefixes inherits ``PrefixCachingConformance`` instead, and one
    that looks inside of blocks ``PartialBlockConformance``."""

    def make(self, block_size: int) -> MineAllocator:
        return MineAllocator(MineAllocatorConfig(block_size=block_size), build_context(block_size))
