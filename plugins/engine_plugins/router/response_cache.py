"""Router ``response_cache``: answers a deterministic request that was answered before from memory.

Deterministic are greedy requests (``temperature`` 0) and requests with a ``seed``, whose samples depend on
seed and position only. A stored answer comes back only if everything that shapes the answer is equal;
requests with different ``cache_salt`` never share answers, so tenants can be kept apart. Improves TTFT and
end-to-end time of repeated requests; costs one SHA-256 of the prompt otherwise. Other requests go where router
``prefix`` sends them.
"""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from engine.contracts.config import at_least
from engine.contracts.provider import BuildContext
from engine.contracts.router import Answer, ApiRequest, EngineView, Route
from engine_plugins.router.prefix import PrefixConfig, PrefixRouter

ENTRY_BYTES = 512
"""What an entry costs besides its answer: key, table slot, bookkeeping."""


SHAPES_NOTHING = frozenset({
    "request_id", "stream", "stream_options", "return_progress", "priority", "user", "store", "previous_response_id",
})  # fmt: skip
"""What may differ between requests with one answer: who asks, how and when it is sent, and where the prompt came from.
Text is made anew of stored tokens."""
_encode = msgspec.msgpack.Encoder(order="deterministic").encode


@dataclass(frozen=True)
class ResponseCacheConfig(PrefixConfig):
    """Stored answers of deterministic requests."""

    max_entries: int = 1024
    """Most answers kept."""
    max_bytes: int = 64 * 1024 * 1024
    """Most bytes of answers kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("router.max_entries", self.max_entries, 1)
        at_least("router.max_bytes", self.max_bytes, 1)


class ResponseCacheRouter:
    """The plugin: least recently used entries go first, bounded by number and by bytes. One that is given again is used
    once that answer is finished, which makes it an entry anew."""

    def __init__(self, config: ResponseCacheConfig, context: BuildContext) -> None:
        self._max_entries = config.max_entries
        self._max_bytes = config.max_bytes
        self._entries: OrderedDict[bytes, tuple[Answer, int]] = OrderedDict()
        self._bytes = 0
        self._elsewhere = PrefixRouter(config, context)

    def place(self, request: ApiRequest, fleet: tuple[EngineView, ...]) -> Route:
        if is_deterministic(request) and (entry := self._entries.get(cache_key(request))) is not None:
            return entry[0]
        return self._elsewhere.place(request, fleet)

    def begun(self, request: ApiRequest, engine_id: str) -> None:
        self._elsewhere.begun(request, engine_id)

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        if not is_deterministic(request) or not is_complete(request, answer):
            return
        size = ENTRY_BYTES + deep_size(answer.choices)
        if size > self._max_bytes:
            return
        key = cache_key(request)
        if (old := self._entries.pop(key, None)) is not None:
            self._bytes -= old[1]
        self._entries[key] = (answer, size)
        self._bytes += size
        while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self._bytes -= freed


def is_deterministic(request: ApiRequest) -> bool:
    return request.sampling.temperature == 0.0 or request.sampling.seed is not None


def is_complete(request: ApiRequest, answer: Answer) -> bool:
    """Every choice is there and ended by itself."""
    if len(answer.choices) != len(request.prompts) * request.n:
        return False
    return all(choice.get("finish_reason") in ("stop", "length") for choice in answer.choices)


def cache_key(request: ApiRequest) -> bytes:
    """SHA-256 over the whole request but :data:`SHAPES_NOTHING`: what a later version adds is part of it by default."""
    shaping = {f.name: getattr(request, f.name) for f in fields(request) if f.name not in SHAPES_NOTHING}
    shaping["sampling"] = msgspec.to_builtins(request.sampling, str_keys=True)
    shaping["fields"] = {name: value for name, value in request.fields.items() if name not in SHAPES_NOTHING}
    return hashlib.sha256(_encode(shaping)).digest()


def deep_size(value: Any) -> int:
    """Bytes of a tree of containers, structs and scalars. Shared small objects are counted each time they
    occur."""
    if isinstance(value, msgspec.Struct):
        return sys.getsizeof(value) + sum(deep_size(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, Mapping):
        return sys.getsizeof(value) + sum(deep_size(k) + deep_size(v) for k, v in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return sys.getsizeof(value) + sum(map(deep_size, value))
    return sys.getsizeof(value)
