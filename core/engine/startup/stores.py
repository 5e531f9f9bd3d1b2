"""Opens the KV stores of a plan: what their records look like, and which of them is memory."""

from __future__ import annotations

import hashlib
import secrets
import warnings
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate
from pathlib import Path

import msgspec

from engine.assembly.bind import BoundEngine
from engine.assembly.plan import EnginePlan
from engine.checkpoint.files import CheckpointError
from engine.contracts.drafter import cached_by
from engine.contracts.kv_allocator import FillingAllocator
from engine.contracts.kv_store import MemoryStore, RecordLayout, SharedStore, StagedStore
from engine.kv.cache import KVCache
from engine.kv.groups import CacheGroups, cache_groups, of_rank
from engine.kv.records import Part, Records
from engine.loop.core import EngineCore
from engine.plugin_guard.calls import contract_error
from engine.ranks.messages import KeepRecords
from engine.ranks.steps import RankedDevice
from engine.startup.content_digest import FileState, file_states
from engine.startup.memory.budget import DoesNotFit
from engine.startup.namespace import SHIPPED, lasting_namespace
from engine.startup.placing import placed
from engine.startup.segments import Segments, ServerMemory, of_all_ranks
from engine.step.runner import DeviceQueue, ModelRunner

EARLIER_S = 10.0
"""How long ranks of an engine that was killed may take to be gone."""


def files_to_read(plan: EnginePlan, bound: BoundEngine) -> list[FileState]:
    """The state of the files that an engine's model is in, and its drafter where keys last, before they are read."""
    folders = Path(plan.model.path), _drafter_folder(plan, bound)
    return [each for folder in folders if folder is not None for each in file_states(folder)]


def namespace_of(plan: EnginePlan, bound: BoundEngine, files: Sequence[FileState]) -> str:
    """Of block keys: one that lasts where records may; empty where none does. ``files``: those of
    :func:`files_to_read`. Raises as :func:`lasting_namespace`, and :class:`CheckpointError` where they have changed
    since: the weights that were read are not those that would be named."""
    if not bound.kv_stores or plan.parallelism.nodes > 1:
        return ""
    namespace = lasting_namespace(plan, _drafter_folder(plan, bound))
    if files_to_read(plan, bound) != files:
        raise CheckpointError(
            f"the files of {plan.model.path}, or of its drafter, were changed while they were read; "
            "start the engine again"
        )
    return namespace


def _drafter_folder(plan: EnginePlan, bound: BoundEngine) -> Path | None:
    """Where the weights of a drafter are whose keys outlive this process, if not in the model's folder."""
    path = plan.drafter.path
    return None if not bound.kv_stores or path in ("", SHIPPED) else Path(bound.context.find_model(path))


def check_stores(plan: EnginePlan, bound: BoundEngine) -> None:
    """Raise :class:`DoesNotFit` for stores that do not go together, or with this plan."""
    if not bound.kv_stores:
        return
    names = [choice.name for choice in plan.slots["kv_store"]]
    chosen = f"kv_store=[{','.join(names)}]"
    first, *further = bound.kv_stores
    if not isinstance(first, MemoryStore):
        raise DoesNotFit(
            f"{chosen}: {names[0]} has no memory that the device copies from; put a store first that has, as in "
            f"kv_store=[STORE,{','.join(names)}]"
        )
    if not all(isinstance(store, StagedStore) for store in further):
        raise DoesNotFit(f"{chosen}: only the first may be memory; use kv_store=[{names[0]}]")
    if further and plan.parallelism.nodes > 1:
        raise DoesNotFit(_memory_alone(plan, f"ranks on {plan.parallelism.nodes} machines (parallelism.nodes)"))
    if not isinstance(bound.kv_allocator, FillingAllocator):
        raise DoesNotFit(
            f"{chosen} needs an allocator whose blocks can be filled from elsewhere (FillingAllocator), as those of "
            f"kv_allocator={plan.choice('kv_allocator').name} cannot; use kv_store=[]"
        )


def _memory_alone(plan: EnginePlan, whose: str) -> str:
    names = [choice.name for choice in plan.slots["kv_store"]]
    return (
        f"kv_store=[{','.join(names)}]: {whose} keep records in memory alone, each its part; use "
        f"kv_store=[{names[0]}], or ranks on one machine"
    )


@dataclass(frozen=True, slots=True)
class _Rank:
    """How a rank caches."""

    groups: CacheGroups
    sizes: tuple[int, ...]
    """By KV group: bytes of its part of a record."""


def open_stores(
    plan: EnginePlan,
    bound: BoundEngine,
    runner: ModelRunner,
    device: DeviceQueue | RankedDevice,
    core: EngineCore,
    segments: Segments | None,
) -> None:
    """Have the core keep records in the plan's stores, which :func:`check_stores` has seen. ``segments``: memory that
    the server has made. Raises :class:`DoesNotFit` for memory that does not hold a record, for a store that cannot be
    opened as it is configured, and for one that needs all ranks on one machine where they are not.

    With several ranks the stores are those of rank 0. All ranks copy to its memory and from it, where they can: a
    record is then what all of them have of a block. Else each has memory of its own, with as many slots.
    """
    memory, names = bound.kv_stores[0], [choice.name for choice in plan.slots["kv_store"]]
    assert isinstance(memory, MemoryStore)
    records = Records(runner.kv)
    ranks, is_whole = [_Rank(runner.kv.groups, records.num_bytes)], True
    if isinstance(device, RankedDevice):
        segments = _opened_by_all(plan, memory, device, segments, alone=len(names) == 1)
        ranks, is_whole = _ranks(plan, bound), segments is not None
    # Slots have numbers, also where nothing is in them.
    own = tuple([max(1, size) for size in records.num_bytes])
    whole = tuple([max(1, sum(each)) for each in zip(*[rank.sizes for rank in ranks], strict=True)])
    sizes = whole if is_whole else own
    digest = _digest(core.namespace, plan, ranks, "" if is_whole else secrets.token_hex(16))
    layout = RecordLayout(digest, sizes, () if is_whole else whole)
    if segments is not None and isinstance(memory, SharedStore):
        memory.share(segments.files, segments.own)
    for name, store in zip(names, bound.kv_stores, strict=True):
        try:
            store.open(layout, lambda: core.wake())
            if isinstance(store, SharedStore) and (others := store.others()) is not None:
                others.open(layout, lambda: core.wake())
        except ValueError as error:
            raise DoesNotFit(f"kv_store={name}: {error}") from error
    slots = [memory.memory(group) for group in range(runner.kv.num_groups)]
    for group, size in enumerate(sizes):
        if slots[group].readonly or len(slots[group]) % size:
            raise contract_error(memory, "memory", f"returned {len(slots[group])} bytes, expected slots of {size}")
        if not len(slots[group]):
            raise DoesNotFit(
                f"kv_store=[{','.join(names)}]: {names[0]} has no room for a record of {sum(layout.counted)} bytes; "
                f"give it more, as with a larger kv_store.{names[0]}.max_bytes"
            )
    num_slots = tuple([len(part) // size for part, size in zip(slots, sizes, strict=True)])
    parts = _parts(ranks, sizes) if is_whole else []
    records.attach(slots, parts[0] if parts else None)
    runner.records = records
    if isinstance(device, RankedDevice):
        offsets = tuple(memory.slot_offsets()) if is_whole and isinstance(memory, SharedStore) else ()
        told = [KeepRecords(num_slots, offsets, tuple(map(astuple, each))) for each in parts]
        device.keep_records(told or [KeepRecords(num_slots)] * len(ranks))
    core.keep_records(names, bound.kv_stores, sizes, device.store)


def _opened_by_all(
    plan: EnginePlan, memory: MemoryStore, device: RankedDevice, segments: Segments | None, alone: bool
) -> Segments | None:
    """Memory that all ranks have opened; ``None``: each keeps its part. ``alone``: there is no further store. Warns
    where that is not the memory that was meant."""
    name = plan.slots["kv_store"][0].name
    problems = {0: f"{name} has no memory that ranks share"}
    if isinstance(memory, SharedStore) and plan.parallelism.nodes == 1:
        opening = None if segments is None else of_all_ranks(segments.files[segments.own], EARLIER_S)
        if opening is None:  # a server has made none, or ranks that nobody sees have not ended
            if segments is not None:
                warnings.warn(
                    f"kv_store={name}: ranks of an earlier engine still have its memory open after {EARLIER_S:g} s; "
                    "this engine begins without its records, and shares none with other engines of the server",
                    stacklevel=2,
                )
            made = ServerMemory(replace(plan, launcher=None)).of(0)
            assert made is not None
            segments = replace(made, files=made.files[:1])
            opening = of_all_ranks(segments.files[0], 0.0)
        assert opening is not None
        problems = device.open_memory(opening)
        if not problems:
            return segments
    rank, problem = next(iter(problems.items()))
    if alone:
        if rank:
            warnings.warn(
                f"kv_store={name}: rank {rank}: {problem}; each rank keeps its part of records in memory of its own, "
                "which ends with this engine",
                stacklevel=2,
            )
        return None
    raise DoesNotFit(_memory_alone(plan, f"the ranks of this engine (rank {rank}: {problem})"))


def _ranks(plan: EnginePlan, bound: BoundEngine) -> list[_Rank]:
    found = cache_groups(bound.graph.caches, cached_by(bound.drafter), plan.layout.dcp)
    groups = [of_rank(found, own) for own in placed(plan, bound)]
    return [_Rank(own, KVCache.block_bytes(own, bound.kv_format, plan.block_size, plan.dtype)) for own in groups]


def _parts(ranks: list[_Rank], sizes: tuple[int, ...]) -> list[list[Part]]:
    """By rank and KV group, of records that have the parts of all ranks, one after the other."""
    begins = [[0, *accumulate([rank.sizes[group] for rank in ranks])] for group in range(len(sizes))]
    return [
        [Part(begins[group][number], rank.sizes[group], size) for group, size in enumerate(sizes)]
        for number, rank in enumerate(ranks)
    ]


def _digest(namespace: str, plan: EnginePlan, ranks: list[_Rank], run: str) -> bytes:
    """Of the namespace and of what lies where in a record. ``run``: of this engine alone, where other ranks have parts
    of records that end with it."""
    cached = [(repr(rank.groups.caches), rank.groups.group_of, rank.sizes) for rank in ranks]
    parts = (namespace, plan.layout, plan.block_size, cached, run)
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).digest()
