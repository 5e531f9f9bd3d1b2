"""Router ``response_cache``: answers a deterministic request that was answered before from memory.

Deterministic are greedy requests (``temperature`` 0) and requests with a ``seed``, whose samples depend on
seed and position only. A stored answer comes back only if everything that shapes the answer is equal, the plan of the
engines included; requests with different ``cache_salt`` never share answers, so tenants can be kept apart. Improves
TTFT and end-to-end time of repeated requests; costs one SHA-256 of the prompt otherwise. Other requests go where
router ``prefix`` sends them.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from engine.contracts.config import at_least
from engine.contracts.provider import BuildContext
from engine.contracts.router import Answer, AnswerTally, ApiRequest, EngineView, Route
from engine_plugins.router.prefix import PrefixConfig, PrefixRouter

ENTRY_BYTES = 512
"""What an entry costs besides its answer: key, table slot, bookkeeping."""


SHAPES_NOTHING = frozenset({
    "request_id", "stream", "stream_options", "return_progress", "priority", "user", "store", "previous_response_id",
    "question", "cache_control", "prompt_cache_retention", "prompt_cache_options",
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
    ttl_s: float = 0.0
    """How long an answer is kept; 0: as long as there is room."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("router.max_entries", self.max_entries, 1)
        at_least("router.max_bytes", self.max_bytes, 1)
        at_least("router.ttl_s", self.ttl_s, 0)


@dataclass(frozen=True, slots=True)
class Entry:
    answer: Answer
    size: int
    """Bytes."""
    stored_s: float


class ResponseCacheRouter:
    """The plugin: least recently used entries go first, bounded by number and by bytes. One that is given again is used
    once that answer is finished."""

    def __init__(
        self, config: ResponseCacheConfig, context: BuildContext, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_entries = config.max_entries
        self._max_bytes = config.max_bytes
        self._ttl_s = config.ttl_s
        self._clock = clock
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._bytes = 0
        self._hits = self._misses = 0
        self._elsewhere = PrefixRouter(config, context)

    def place(self, request: ApiRequest, fleet: tuple[EngineView, ...]) -> Route:
        if is_deterministic(request) and (entry := self.find(cache_key(request))) is not None:
            return replace(entry.answer, reason="stored answer to an equal request")
        return self._elsewhere.place(request, fleet)

    def begun(self, request: ApiRequest, engine_id: str) -> None:
        self._elsewhere.begun(request, engine_id)

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        if is_deterministic(request):
            self.store(cache_key(request), request, answer)

    def tally(self) -> AnswerTally:
        return AnswerTally(hits=self._hits, misses=self._misses, entries=len(self._entries), bytes=self._bytes)

    def find(self, key: bytes) -> Entry | None:
        """What is stored, and not too old."""
        entry = self._entries.get(key)
        return None if entry is None or self._is_old(entry) else entry

    def use(self, key: bytes) -> None:
        """What is stored was given: others go first."""
        self._entries.move_to_end(key)

    def store(self, key: bytes, request: ApiRequest, answer: Answer) -> None:
        """Keep an answer that is complete; one that is stored already keeps its age."""
        entry = self.find(key)
        if entry is not None and gives(answer, entry.answer):
            self._hits += 1
            self.use(key)
            return
        self._misses += 1
        size = ENTRY_BYTES + deep_size(answer.choices)
        if not is_complete(request, answer) or size > self._max_bytes:
            return
        self._drop(key)
        self._entries[key] = Entry(answer, size, self._clock())
        self._bytes += size
        while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def _is_old(self, entry: Entry) -> bool:
        return 0 < self._ttl_s < self._clock() - entry.stored_s

    def _drop(self, key: bytes) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._bytes -= entry.size


def gives(answer: Answer, stored: Answer) -> bool:
    """Whether it is the stored answer, or another one of the same tokens."""
    return [choice["tokens"] for choice in answer.choices] == [choice["tokens"] for choice in stored.choices]


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
