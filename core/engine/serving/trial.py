"""Would a plan start here? Everything short of loading weights, in this process."""

from __future__ import annotations

from engine.assembly.bind import bind_api
from engine.assembly.plan import EnginePlan
from engine.startup.memory.report import size


def try_plan(plan: EnginePlan) -> str:
    """Build every selected plugin and estimate the memory; what came of it, for people.

    Raises :class:`engine.assembly.errors.AssemblyError` with what stands against it.
    """
    from engine.startup.memory.fit import check_memory  # imports torch, as the engine's plugins do

    memory = check_memory(plan)
    bind_api(plan)
    estimate = memory.estimate
    tokens = (estimate.smallest_blocks - 1) * estimate.block_size
    return (
        f"every selected plugin is built; weights take {size(estimate.weights)}, with a KV pool of {tokens} tokens the "
        f"engine needs {size(estimate.smallest)} of the {size(memory.budget.usable)} it may use"
    )
