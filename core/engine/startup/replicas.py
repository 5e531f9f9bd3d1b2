"""What each of several engines of one plan gets of a machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from engine.assembly.plan import EnginePlan
from engine.contracts.events import DEFAULT_ENGINE

VISIBLE = "CUDA_VISIBLE_DEVICES"


def with_memory(plan: EnginePlan) -> EnginePlan:
    """The plan with the memory of each rank, before the first engine starts here, if others or their records will be
    there when it starts again: it finds what they have left, and takes what it had."""
    alone = plan.settings.fleet.replicas == 1 and not plan.slots.get("kv_store")
    if alone or plan.device.kind != "cpu" or plan.launcher is not None:
        return plan
    from engine.startup.memory.budget import free_memory

    return replace(plan, memory_bytes=free_memory(plan.device) // plan.ranks_per_device)


def engine_id(plan: EnginePlan, replica: int) -> str:
    """Of the engine with this number, from 0 on."""
    return DEFAULT_ENGINE if plan.settings.fleet.replicas == 1 else f"replica-{replica}"


def devices_of(plan: EnginePlan, replica: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment in which an engine here sees the GPUs of its ranks alone; ``replica``: its number, from 0 on."""
    if plan.settings.fleet.replicas == 1 or plan.launcher is not None:
        return {}
    return _seeing(plan, range(replica * plan.ranks_per_node, (replica + 1) * plan.ranks_per_node), environment)


def device_of(plan: EnginePlan, index: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment in which the ``index``-th rank of an engine sees its own GPU alone, as its first."""
    return _seeing(plan, range(index, index + 1), environment)


def _seeing(plan: EnginePlan, indices: range, environment: Mapping[str, str]) -> dict[str, str]:
    if plan.device.kind != "cuda":
        return {}
    listed = [name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip()]
    visible = listed or [str(i) for i in range(plan.device.count)]
    return {VISIBLE: ",".join(dict.fromkeys(visible[index % len(visible)] for index in indices))}
