"""Where keys and values live."""

from __future__ import annotations

from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl


@hookimpl
def engine_kv_allocator() -> list[Provider]:
    return [
        Provider(
            "contiguous",
            "engine_plugins.kv_allocator.contiguous:ContiguousAllocator",
            doc="Reserves a request's full length when it starts.",
        ),
        Provider(
            "paged",
            "engine_plugins.kv_allocator.paged:PagedAllocator",
            provides=("paged",),
            doc="Takes blocks as a request grows.",
        ),
        Provider(
            "prefix_cache",
            "engine_plugins.kv_allocator.prefix_cache:PrefixCacheAllocator",
            provides=("paged", "prefix_cache"),
            doc="Paged, and finished blocks stay reusable by later prompts with the same beginning (LRU).",
        ),
    ]
