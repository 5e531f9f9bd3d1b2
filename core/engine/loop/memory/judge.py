"""Would a plan, or a variation of it, fit?"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engine.assembly.bind import BoundEngine, build_context, build_slots
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.execution.checkpoint import Checkpoint
from engine.loop.memory.needs import Needs, estimate, size_weights
from engine.loop.memory.room import Room
from engine.loop.memory.weights import WeightSizes

DECIDES_WEIGHTS = ("quantizer", "kv_format")
"""Slots whose plugins are asked anew when a variation changes them or the dtype."""


@dataclass(slots=True)
class Judge:
    """Knows a bound plan and how much memory is free; estimates variations of the plan."""

    bound: BoundEngine
    checkpoint: Checkpoint
    free: int
    """Bytes free on the device before anything is loaded."""
    _known: dict[str, tuple[BoundEngine, WeightSizes] | None] = field(default_factory=dict)

    def needs(self, plan: EnginePlan) -> Needs | None:
        """``None`` when a plugin of the variation cannot be built for it, or cannot compute in its dtype."""
        parts = self._parts(plan)
        if parts is None:
            return None
        bound, weights = parts
        return estimate(plan, weights, bound)

    def room(self, plan: EnginePlan) -> Room:
        return Room(self.free, plan.settings.memory.fraction)

    def fits(self, plan: EnginePlan) -> bool:
        needs = self.needs(plan)
        return needs is not None and needs.smallest <= self.room(plan).budget

    def _parts(self, plan: EnginePlan) -> tuple[BoundEngine, WeightSizes] | None:
        key = repr((plan.dtype, *((c.origin, c.name, c.config) for s in DECIDES_WEIGHTS for c in plan.slots[s])))
        if key not in self._known:
            self._known[key] = self._build(plan)
        return self._known[key]

    def _build(self, plan: EnginePlan) -> tuple[BoundEngine, WeightSizes] | None:
        bound = self.bound
        if plan.dtype not in bound.attention_kernel.capabilities.dtypes:
            return None
        if _decides(plan) != _decides(bound.plan):
            try:
                built = build_slots(plan, DECIDES_WEIGHTS, build_context(plan))
            except AssemblyError:
                return None  # not a way out, then
            bound = replace(bound, plan=plan, **{slot: part for slot, (part,) in built.items()})
        return bound, size_weights(plan, bound, self.checkpoint)


def _decides(plan: EnginePlan) -> tuple[object, ...]:
    return (plan.dtype, *(plan.choice(slot) for slot in DECIDES_WEIGHTS))
