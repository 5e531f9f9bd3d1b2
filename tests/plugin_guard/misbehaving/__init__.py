"""Plugins that break their contracts, one bug each: wrong types, dtypes and shapes, what raises, lies, leaks and waits.

Each class derives from a correct plugin. Its docstring says what is wrong with it, ``says`` what the engine must say of
it beside slot, name and distribution. :data:`PLUGINS` has them all.
"""

from __future__ import annotations

from typing import Any

from . import (
    architectures,
    attention_kernels,
    communicators,
    drafters,
    exporters,
    kv_allocators,
    kv_formats,
    parallelisms,
    quantizers,
    routers,
    schedulers,
)

_MODULES = {
    "architecture": architectures,
    "parallelism": parallelisms,
    "communicator": communicators,
    "quantizer": quantizers,
    "kv_format": kv_formats,
    "kv_allocator": kv_allocators,
    "attention_kernel": attention_kernels,
    "drafter": drafters,
    "scheduler": schedulers,
    "router": routers,
    "exporter": exporters,
}
PLUGINS: tuple[tuple[str, type[Any]], ...] = tuple(
    (slot, found)
    for slot, module in _MODULES.items()
    for found in vars(module).values()
    if isinstance(found, type) and found.__module__ == module.__name__ and "says" in vars(found)
)
