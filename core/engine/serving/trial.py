"""Would a plan start here? Everything short of loading weights, in this process."""

from __future__ import annotations

from engine.assembly.bind import bind_api
from engine.assembly.plan import EnginePlan
from engine.loop.memory.text import size


def try_plan(plan: EnginePlan) -> str:
    """Build every selected plugin and estimate the memory; what came of it, for people.

    Raises :class:`engine.assembly.errors.AssemblyError` with what stands against it.
    """
    from engine.loop.memory.trial import try_memory  # imports torch, as the engine's plugins do

    memory = try_memory(plan)
    bind_api(plan)
    needs, room = memory.needs, memory.room
    tokens = (needs.smallest_blocks - 1) * needs.block_size
    return (
        f"every selected plugin is built; weights take {size(needs.weights)}, with a KV pool of {tokens} tokens the "
        f"engine needs {size(needs.smallest)} of the {size(room.budget)} it may use"
    )
