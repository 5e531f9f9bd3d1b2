"""Estimate and measurement side by side, once the engine is up."""

from __future__ import annotations

from collections.abc import Sequence

from engine.loop.messages import MemoryLedger, MemoryLine, Phase
from engine.startup.memory.estimate import MemoryPlan
from engine.startup.memory.fit import KVPoolSize

LOADING, CAPTURING, WARMING = "load weights", "capture graphs", "warm up"
"""Phases of start-up whose peaks say something about a line of the ledger."""


def make_ledger(
    memory: MemoryPlan,
    pool: KVPoolSize,
    *,
    weights: int,
    kv: int,
    tables: int,
    programs: int,
    phases: Sequence[Phase],
) -> MemoryLedger:
    """``weights``, ``kv``, ``tables``: bytes of the tensors that were made; ``programs``: of native calls, so far.
    ``phases`` with their memory."""
    estimate, budget = memory.estimate, memory.budget
    on_cpu = memory.plan.device.kind == "cpu"
    lines = (
        MemoryLine("weights", estimate.weights, weights),
        MemoryLine("loading peak", estimate.loading, _beside(phases, weights) if on_cpu else None),
        MemoryLine("KV pool", estimate.pool.num_bytes(pool.blocks), kv),
        MemoryLine("tables", estimate.tables, tables),
        MemoryLine("programs", estimate.programs, programs),
        # On a CPU the heap hides what steps take: they use what loading left.
        MemoryLine("workspace", estimate.workspace, None if on_cpu else _growth(phases, WARMING)),
        MemoryLine("process overhead", estimate.process_overhead),
        *([MemoryLine("KV stores", estimate.stores)] if estimate.stores else []),
        MemoryLine("graphs", estimate.graphs, None if on_cpu else _growth(phases, CAPTURING)),
    )
    return MemoryLedger(
        device=memory.plan.device.kind,
        device_bytes=memory.plan.device.memory_bytes,
        free_bytes=budget.free,
        fraction=budget.fraction,
        lines=lines,
        total_bytes=estimate.total(pool.blocks),
        headroom_bytes=budget.free - estimate.total(pool.blocks),
        peak_so_far_bytes=max((phase.peak_bytes for phase in phases), default=0),
    )


def _beside(phases: Sequence[Phase], weights: int) -> int | None:
    """What loading took beside the weights, at its peak."""
    growth = _growth(phases, LOADING)
    return None if growth is None else max(0, growth - weights)


def _growth(phases: Sequence[Phase], name: str) -> int | None:
    """The peak of a phase above what was held when it began; ``None`` if there was no such phase."""
    before = 0
    for phase in phases:
        if phase.name == name:
            return phase.peak_bytes - before
        before = phase.held_bytes
    return None
