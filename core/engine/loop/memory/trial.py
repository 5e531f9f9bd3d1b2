"""Would a plan start here? Everything short of loading weights."""

from __future__ import annotations

from engine.assembly.bind import bind
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.execution.checkpoint import CheckpointError
from engine.loop.memory.fit import MemoryPlan, plan_memory


def try_memory(plan: EnginePlan) -> MemoryPlan:
    """Build the engine's plugins, read the checkpoint's headers and estimate the memory.

    Raises :class:`AssemblyError` with what stands against it.
    """
    try:
        return plan_memory(plan, bind(plan))
    except CheckpointError as error:
        raise AssemblyError([str(error)]) from error
