"""KV stores of a simulated engine. Memory is the plugin itself, whose records nobody writes or reads; a store that is
read while a request waits is replaced by one that takes time and keeps no bytes."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf

from engine.assembly.bind import build_choices, build_slots
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan, SlotChoice
from engine.contracts.drafter import cached_by
from engine.contracts.kv_store import KVStore, MemoryStore, RecordLayout, StoreUsage
from engine.contracts.provider import BuildContext
from engine.kv.groups import CacheGroups, cache_groups
from engine_lab.shared.simulation.clock import VirtualClock
from engine_lab.shared.simulation.spec import EngineSpec

PAGE, HEADER = 4096, 64
"""Bytes: a record and what stands before it take whole pages of a file."""
MOST_QUEUED = 256 * 1024**2
"""Bytes that wait to be written, at most: what comes then is dropped."""
BOUND = "max_bytes"
"""The setting of a store that says how many bytes it may take; without it there is no bound."""

RecordId = tuple[int, bytes]
"""Group and key."""


class SimulatedStore:
    """Stands for a :class:`~engine.contracts.kv_store.StagedStore`: what was put there and not evicted (LRU) is found.
    Reads queue for each other, as do writes."""

    def __init__(self, name: str, most_bytes: float, rate: float, clock: VirtualClock) -> None:
        """``rate``: bytes a second, in either direction."""
        self.name = name
        self._most_bytes = most_bytes
        self._rate = rate
        self._clock = clock
        self._sizes: OrderedDict[RecordId, int] = OrderedDict()  # next victim first
        self._taken = self._evicted = self._queued = 0
        self._numbers = count()
        self._reads: deque[tuple[float, int, int]] = deque()
        """When each ends, its number, and how many records it finds."""
        self._writes: deque[tuple[float, RecordId, int, bool, Callable[[], None]]] = deque()
        """When each ends, of what, its bytes, whether it is still wanted, and whom to tell."""
        self._read_until_s = self._written_until_s = 0.0

    def open(self, layout: RecordLayout, wake: Callable[[], None]) -> None:
        self._num_bytes = layout.num_bytes

    @property
    def next_s(self) -> float:
        """When the next read ends; infinite: none has begun."""
        return self._reads[0][0] if self._reads else inf

    def usage(self) -> StoreUsage:
        most = self._taken if self._most_bytes == inf else int(self._most_bytes)
        return StoreUsage(len(self._sizes), self._taken, most, self._evicted)

    def has(self, group: int, key: bytes) -> bool:
        self._end_writes()
        return (group, key) in self._sizes

    def put(self, group: int, key: bytes, record: memoryview, done: Callable[[], None]) -> bool:
        size = len(record)
        if self.has(group, key):
            self._sizes.move_to_end((group, key))
            return False
        if self._queued + size > MOST_QUEUED:
            return False
        self._queued += size
        self._written_until_s = max(self._written_until_s, self._clock.now) + size / self._rate
        self._writes.append((self._written_until_s, (group, key), size, True, done))
        return True

    def get(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> int:
        good = next((at for at, each in enumerate(ids) if not self.has(*each)), len(ids))
        number = next(self._numbers)
        for each in ids[:good]:
            self._sizes.move_to_end(each)
        num_bytes = sum([self._num_bytes[group] for group, _ in ids[:good]])
        self._read_until_s = max(self._read_until_s, self._clock.now) + num_bytes / self._rate
        self._reads.append((self._read_until_s, number, good))
        return number

    def poll(self) -> Sequence[tuple[int, int]]:
        self._end_writes()
        found = []
        while self.next_s <= self._clock.now:
            _, number, good = self._reads.popleft()
            found.append((number, good))
        return found

    def clear(self) -> None:
        self._sizes.clear()
        self._taken = 0
        self._writes = deque([(at_s, each, size, False, done) for at_s, each, size, _, done in self._writes])

    def close(self, deadline_s: float) -> None:
        """There is nothing to end."""

    def _end_writes(self) -> None:
        while self._writes and self._writes[0][0] <= self._clock.now:
            _, each, size, wanted, done = self._writes.popleft()
            self._queued -= size
            if wanted:
                in_file = -(-(size + HEADER) // PAGE) * PAGE
                self._taken += in_file - self._sizes.get(each, 0)
                self._sizes[each] = in_file
                self._make_room()
            done()

    def _make_room(self) -> None:
        while self._taken > self._most_bytes:
            _, size = self._sizes.popitem(last=False)
            self._taken -= size
            self._evicted += 1


@dataclass(frozen=True, slots=True)
class Stores:
    """Of an engine, opened."""

    names: tuple[str, ...]
    all: tuple[KVStore, ...]
    staged: tuple[SimulatedStore, ...]
    """All but the first."""
    num_bytes: tuple[int, ...]
    """By KV group: of a record, on all ranks together."""


def open_stores(spec: EngineSpec, context: BuildContext, caches: CacheGroups, clock: VirtualClock) -> Stores | None:
    """The stores of a plan; ``None``: it has none. ``caches``: of the model. Raises
    :class:`~engine.assembly.errors.AssemblyError` for stores that ``engine serve`` refuses, and for memory that this
    machine cannot even reserve."""
    plan = spec.plan
    choices = plan.slots.get("kv_store", ())
    if not choices:
        return None
    names = tuple([choice.name for choice in choices])
    chosen = f"kv_store=[{','.join(names)}]"
    (memory,) = build_choices(choices[:1], context)
    if not isinstance(memory, MemoryStore):
        raise AssemblyError([
            f"{chosen}: {names[0]} has no memory that the device copies from; put a store first that has, as in "
            f"kv_store=[STORE,{','.join(names)}]"
        ])  # fmt: skip
    num_bytes = record_bytes(plan, context, caches)
    layout = RecordLayout(bytes(32), num_bytes)
    staged = tuple([SimulatedStore(each.name, bound_of(each), spec.rate(each.name), clock) for each in choices[1:]])
    stores: tuple[KVStore, ...] = (memory, *staged)
    try:
        for store in stores:
            store.open(layout, lambda: None)
    except OSError as error:
        why = f"cannot reserve its memory here ({error.strerror}); give it less"
        raise AssemblyError([f"{chosen}: {names[0]} {why}"]) from error
    if not all(len(memory.memory(group)) for group in range(len(num_bytes))):
        raise AssemblyError([f"{chosen}: {names[0]} has no room for a record of {sum(num_bytes)} bytes"])
    return Stores(names, stores, staged, num_bytes)


def bound_of(choice: SlotChoice) -> float:
    """Bytes that a store may take; infinite: its configuration has no bound."""
    found = choice.config.get(BOUND)
    return float(found) if isinstance(found, int | float) else inf


def record_bytes(plan: EnginePlan, context: BuildContext, caches: CacheGroups) -> tuple[int, ...]:
    """By KV group: bytes of a block in all its caches, on all ranks together. What a drafter keeps in groups of its own
    counts to the first."""
    from engine.kv.cache import KVCache  # imports torch, which engines without stores need not

    parts = build_slots(plan, ("kv_format", "drafter"), context)
    (kv_format,), (drafter,) = parts["kv_format"], parts["drafter"]
    both = cache_groups(caches.caches, cached_by(drafter))
    first, *others = KVCache.block_bytes(both, kv_format, plan.block_size, plan.dtype)
    return (first + sum(others[caches.num_groups - 1 :]), *others[: caches.num_groups - 1])
