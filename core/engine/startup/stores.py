"""Opens the KV stores of a plan: what their records look like, and which of them is memory."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.assembly.bind import BoundEngine
from engine.assembly.plan import EnginePlan
from engine.checkpoint.files import CheckpointError
from engine.contracts.drafter import cached_by
from engine.contracts.kv_allocator import FillingAllocator
from engine.contracts.kv_store import MemoryStore, RecordLayout, SharedStore, StagedStore
from engine.kv.cache import KVCache
from engine.kv.groups import cache_groups, of_rank
from engine.kv.records import Records
from engine.loop.core import EngineCore
from engine.plugin_guard.calls import contract_error
from engine.ranks.steps import RankedDevice
from engine.startup.content_digest import FileState, file_states
from engine.startup.memory.budget import DoesNotFit
from engine.startup.namespace import SHIPPED, lasting_namespace
from engine.startup.placing import placed
from engine.startup.segments import Segments
from engine.step.runner import DeviceQueue, ModelRunner


def files_to_read(plan: EnginePlan, bound: BoundEngine) -> list[FileState]:
    """The state of all files that an engine's weights are in, before they are read."""
    folders = Path(plan.model.path), _drafter_folder(plan, bound)
    return [each for folder in folders if folder is not None for each in file_states(folder)]


def namespace_of(plan: EnginePlan, bound: BoundEngine, files: Sequence[FileState]) -> str:
    """Of block keys: one that lasts where records may; empty where none does. ``files``: those of
    :func:`files_to_read`. Raises as :func:`lasting_namespace`, and :class:`CheckpointError` where they have changed
    since: the weights that were read are not those that would be named."""
    if not bound.kv_stores or plan.layout.size > 1:
        return ""
    namespace = lasting_namespace(plan, _drafter_folder(plan, bound))
    if files_to_read(plan, bound) != files:
        raise CheckpointError(f"{plan.model.path} was changed while its weights were read; start the engine again")
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
    if further and plan.layout.size > 1:
        raise DoesNotFit(
            f"{chosen}: an engine of {plan.layout.size} ranks keeps records in memory alone; use "
            f"kv_store=[{names[0]}], or fleet.replicas instead of parallelism"
        )
    if not isinstance(bound.kv_allocator, FillingAllocator):
        raise DoesNotFit(
            f"{chosen} needs an allocator whose blocks can be filled from elsewhere (FillingAllocator), as those of "
            f"kv_allocator={plan.choice('kv_allocator').name} cannot; use kv_store=[]"
        )


def share_memory(bound: BoundEngine, segments: Segments | None) -> None:
    """Have stores keep their records where they outlive this engine. ``segments``: what the server has made."""
    for store in bound.kv_stores[:1]:
        if segments is not None and isinstance(store, SharedStore):
            store.share(segments.files, segments.own)


def open_stores(
    plan: EnginePlan, bound: BoundEngine, runner: ModelRunner, device: DeviceQueue | RankedDevice, core: EngineCore
) -> None:
    """Have the core keep records in the plan's stores, which :func:`check_stores` has seen. Raises :class:`DoesNotFit`
    for memory that does not hold a record, and for a store that cannot be opened as it is configured.

    With several ranks the stores are those of rank 0: their slots are every rank's, and a record is a slot's content on
    all of them.
    """
    records = Records(runner.kv)
    sizes = tuple([max(1, size) for size in records.num_bytes])  # slots have numbers, also where nothing is in them
    layout = RecordLayout(_digest(core.namespace, plan, runner), sizes, _on_all_ranks(plan, bound))
    memory, names = bound.kv_stores[0], [choice.name for choice in plan.slots["kv_store"]]
    for name, store in zip(names, bound.kv_stores, strict=True):
        try:
            store.open(layout, lambda: core.wake())
            if isinstance(store, SharedStore) and (others := store.others()) is not None:
                others.open(layout, lambda: core.wake())
        except ValueError as error:
            raise DoesNotFit(f"kv_store={name}: {error}") from error
    assert isinstance(memory, MemoryStore)
    own = [memory.memory(group) for group in range(runner.kv.num_groups)]
    for group, size in enumerate(sizes):
        if own[group].readonly or len(own[group]) % size:
            raise contract_error(memory, "memory", f"returned {len(own[group])} bytes, expected slots of {size}")
        if not len(own[group]):
            raise DoesNotFit(
                f"kv_store=[{','.join(names)}]: {names[0]} has no room for a record of {sum(layout.counted)} bytes; "
                f"give it more, as with a larger kv_store.{names[0]}.max_bytes"
            )
    records.attach(own)
    runner.records = records
    if isinstance(device, RankedDevice):
        device.keep_records([len(part) // size for part, size in zip(own, sizes, strict=True)])
    core.keep_records(names, bound.kv_stores, sizes, device.store)


def _on_all_ranks(plan: EnginePlan, bound: BoundEngine) -> tuple[int, ...]:
    """By KV group: bytes of a record on all ranks; empty where there is one."""
    if plan.layout.size == 1:
        return ()
    found = cache_groups(bound.graph.caches, cached_by(bound.drafter), plan.layout.dcp)
    sizes = [
        KVCache.block_bytes(of_rank(found, own), bound.kv_format, plan.block_size, plan.dtype)
        for own in placed(plan, bound)
    ]
    return tuple(map(sum, zip(*sizes, strict=True)))


def _digest(namespace: str, plan: EnginePlan, runner: ModelRunner) -> bytes:
    """Of the namespace and of how records lie in memory. With several ranks it is this run's alone: what the others
    have of a record ends with it."""
    groups, run = runner.kv.groups, secrets.token_hex(16) if plan.layout.size > 1 else ""
    cached = repr(groups.caches), groups.group_of
    parts = (namespace, plan.layout, plan.block_size, *cached, str(runner.kv.block_size), run)
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).digest()
