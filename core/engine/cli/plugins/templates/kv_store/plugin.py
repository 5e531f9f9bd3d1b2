"""KV store ``mine``: copies of records in a dictionary, made and read by a thread of its own.

It stands for whatever takes time: another machine, an object store. ``kv_store=[host,mine]`` puts it behind memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue

from engine.contracts.config import SlotConfig, at_least
from engine.contracts.kv_store import RecordId, RecordLayout, StoreUsage
from engine.contracts.provider import BuildContext, Provider
from engine.hookspecs import hookimpl


@dataclass(frozen=True)
class MineStoreConfig(SlotConfig):
    """The keys ``kv_store.mine.<field>``."""

    max_bytes: int = 256 * 1024**2
    """Most bytes of records."""

    def __post_init__(self) -> None:
        at_least("kv_store.mine.max_bytes", self.max_bytes, 1 << 20)


@hookimpl
def engine_kv_store() -> list[Provider]:
    return [
        Provider(
            "mine",
            "engine.cli.plugins.templates.kv_store.plugin:MineStore",
            config=MineStoreConfig,
            requires={"kv_allocator": ("prefix_cache",)},
            doc="Copies of records in a dictionary.",
        )
    ]


class MineStore:
    """Lives in the engine process. Its methods are called between two steps, so the work is its thread's."""

    def __init__(self, config: MineStoreConfig, context: BuildContext) -> None:
        self._most_bytes = config.max_bytes
        self._records: dict[RecordId, bytes] = {}
        self._taken = self._evicted = self._generation = 0
        self._lock = threading.Lock()
        self._jobs = count()
        self._ended: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mine")

    def open(self, layout: RecordLayout, wake: Callable[[], None]) -> None:
        """Records of another namespace are another's: a store that lasts keeps them apart by ``layout.namespace``."""
        self._wake = wake

    def usage(self) -> StoreUsage:
        with self._lock:
            return StoreUsage(len(self._records), self._taken, self._most_bytes, self._evicted)

    def has(self, group: int, key: bytes) -> bool:
        return (group, key) in self._records

    def put(self, group: int, key: bytes, record: memoryview, done: Callable[[], None]) -> bool:
        if (group, key) in self._records:
            return False
        self._thread.submit(self._keep, (group, key), record, done, self._generation)
        return True

    def _keep(self, each: RecordId, record: memoryview, done: Callable[[], None], generation: int) -> None:
        with self._lock:
            if generation == self._generation:
                self._records[each] = bytes(record)
                self._taken += len(record)
            while self._taken > self._most_bytes:
                oldest = next(iter(self._records))
                self._taken -= len(self._records.pop(oldest))
                self._evicted += 1
        done()

    def get(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> int:
        job = next(self._jobs)
        self._thread.submit(self._read, job, ids, into)
        return job

    def _read(self, job: int, ids: Sequence[RecordId], into: Sequence[memoryview]) -> None:
        """A store that is not memory checks what it read here: length, id and checksum."""
        good = 0
        with self._lock:
            for each, buffer in zip(ids, into, strict=True):
                if each not in self._records:
                    break
                buffer[:] = self._records[each]
                good += 1
        self._ended.put((job, good))
        self._wake()

    def poll(self) -> Sequence[tuple[int, int]]:
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def clear(self) -> None:
        with self._lock:
            self._generation += 1
            self._records.clear()
            self._taken = 0

    def close(self, deadline_s: float) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
