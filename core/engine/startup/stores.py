"""Opens the KV stores of a plan: what their records look like, and which of them is memory."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from engine.assembly.bind import BoundEngine
from engine.assembly.plan import EnginePlan
from engine.contracts.kv_allocator import FillingAllocator
from engine.contracts.kv_store import MemoryStore, RecordLayout, StagedStore
from engine.kv.records import Records
from engine.loop.core import EngineCore
from engine.plugin_guard.calls import contract_error
from engine.startup.memory.budget import DoesNotFit
from engine.startup.namespace import SHIPPED, lasting_namespace
from engine.step.runner import DeviceQueue, ModelRunner


def namespace_of(plan: EnginePlan, bound: BoundEngine) -> str:
    """Of block keys: one that lasts where there are stores. Raises as :func:`lasting_namespace`; empty without any."""
    if not bound.kv_stores:
        return ""
    path = plan.drafter.path
    return lasting_namespace(plan, None if path in ("", SHIPPED) else Path(bound.context.find_model(path)))


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
    if plan.layout.size > 1:
        raise DoesNotFit(
            f"{chosen} needs an engine of one rank, and this one has {plan.layout.size}; use kv_store=[], or "
            "fleet.replicas instead of parallelism"
        )
    if not isinstance(bound.kv_allocator, FillingAllocator):
        raise DoesNotFit(
            f"{chosen} needs an allocator whose blocks can be filled from elsewhere (FillingAllocator), as those of "
            f"kv_allocator={plan.choice('kv_allocator').name} cannot; use kv_store=[]"
        )


def open_stores(
    plan: EnginePlan, bound: BoundEngine, runner: ModelRunner, device: DeviceQueue, core: EngineCore
) -> None:
    """Have the core keep records in the plan's stores, which :func:`check_stores` has seen. Raises :class:`DoesNotFit`
    for memory that does not hold a record, and for a store that cannot be opened as it is configured."""
    records = Records(runner.kv)
    layout = RecordLayout(_digest(core.namespace, plan, runner), records.num_bytes)
    memory, names = bound.kv_stores[0], [choice.name for choice in plan.slots["kv_store"]]
    for name, store in zip(names, bound.kv_stores, strict=True):
        try:
            store.open(layout, lambda: core.wake())
        except ValueError as error:
            raise DoesNotFit(f"kv_store={name}: {error}") from error
    assert isinstance(memory, MemoryStore)
    own = [memory.memory(group) for group in range(runner.kv.num_groups)]
    for group, size in enumerate(records.num_bytes):
        if own[group].readonly or len(own[group]) % size:
            raise contract_error(memory, "memory", f"returned {len(own[group])} bytes, expected slots of {size}")
        if not len(own[group]):
            raise DoesNotFit(
                f"kv_store=[{','.join(names)}]: {names[0]} has no room for a record of {sum(records.num_bytes)} bytes; "
                f"give it more, as with a larger kv_store.{names[0]}.max_bytes"
            )
    records.attach(own)
    runner.records = records
    core.keep_records(names, bound.kv_stores, records.num_bytes, device.store)


def _digest(namespace: str, plan: EnginePlan, runner: ModelRunner) -> bytes:
    """Of the namespace and of how records lie in memory."""
    groups = runner.kv.groups
    parts = (namespace, plan.layout, plan.block_size, repr(groups.caches), groups.group_of, str(runner.kv.block_size))
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).digest()
