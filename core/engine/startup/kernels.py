"""The C++ of a plan, compiled at its start: once on a machine, all at once, while torch is imported."""

from __future__ import annotations

from engine.assembly.bind import plugin_sources
from engine.assembly.plan import EnginePlan
from engine.contracts.graph import Graph
from engine.kernels.cpu.sources import graph_sources
from engine.native import ahead
from engine.native.shared_library import THREAD_POOL
from engine.sampling.sources import MASK

PHASE = "compile kernels"


def begin_kernels(plan: EnginePlan, graph: Graph) -> str:
    """Begin to compile what this plan needs and earlier starts have not left; a process that has begun before goes on.
    ``graph``: the whole model. Returns what is going on in words, empty: nothing. Raises as
    :func:`engine.assembly.bind.bind` does."""
    sources = plugin_sources(plan)
    if plan.device.kind == "cpu" and plan.execution == "compile":
        sources += (*graph_sources(graph), MASK)
    ahead.begin((*sources, THREAD_POOL) if sources else ())
    count = ahead.unfinished()
    return f"compiling {count} kernel{'s' if count > 1 else ''} for this processor, once" if count else ""
