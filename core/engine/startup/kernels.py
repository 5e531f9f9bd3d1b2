"""The C++ of a plan, compiled at its start: once on a machine, all at once, while torch is imported."""

from __future__ import annotations

from engine.assembly.bind import build_context, build_slots, plugin_sources
from engine.assembly.plan import EnginePlan
from engine.kernels.cpu.sources import graph_sources
from engine.models.record import recorded
from engine.native import ahead
from engine.native.loader import THREAD_POOL

PHASE = "compile kernels"


def begin_kernels(plan: EnginePlan) -> str:
    """Begin to compile what this plan needs and earlier starts have not left; a process that has begun before goes on.
    Returns what is going on in words, empty: nothing. Raises as :func:`engine.assembly.bind.bind` does."""
    sources = plugin_sources(plan)
    if plan.device.kind == "cpu" and plan.execution == "compile":
        (architecture,) = build_slots(plan, ("architecture",), build_context(plan))["architecture"]
        sources += graph_sources(recorded(architecture, plan.model))
    ahead.begin((*sources, THREAD_POOL) if sources else ())
    count = ahead.unfinished()
    return f"compiling {count} kernel{'s' if count > 1 else ''} for this processor, once" if count else ""
