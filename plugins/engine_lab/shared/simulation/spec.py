"""What is simulated: an engine's plugins, limits and costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from engine.assembly.plan import EnginePlan
from engine.contracts.step_cost import DraftCost, StepCost


@dataclass(frozen=True, slots=True)
class Overheads:
    """Of the API process, around the engine process."""

    receive_ms: float = 0.0
    """Reading, parsing, routing, and the way to the engine process: per request."""
    tokenize_us: float = 0.0
    """Per prompt token."""
    deliver_ms: float = 0.0
    """From a step's end until its tokens are ready for the client."""


ASSUMED_ACCEPTANCE = 0.6
"""Where nothing was measured."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """What stands for a drafter. How many drafts are asked for is up to the real policy."""

    placement: Literal["host", "device"]
    cost: DraftCost = field(default_factory=DraftCost)
    """What drafting takes, for how many requests there are drafts, and how many of these are accepted."""
    per_request: Mapping[int, float] = field(default_factory=dict)
    """Chance that a draft is accepted, given that those before it were, of requests by their place in the trace;
    others: as ``cost`` has it."""

    def acceptance(self, request: int, position: int) -> float:
        """Of the draft at a position of a chain."""
        known = self.cost.acceptance
        usual = known[min(position, len(known) - 1)] if known else ASSUMED_ACCEPTANCE
        return self.per_request.get(request, usual)


COPY_RATES = {"cpu": 5e9}
"""Bytes a second between KV pool and memory that are assumed, by kind of device; see :meth:`EngineSpec.rate`."""
COPY_RATE = 20e9
"""Of any other device: page-locked memory behind PCIe 4."""
READ_RATE = 1e9
"""Bytes a second, from and to any other store, that are assumed."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine."""

    plan: EnginePlan
    """Resolved. Its scheduler, KV allocator and limits are the real ones."""
    num_blocks: int
    """KV blocks of the groups that keep every token, as the engine reports them (the padding block included)."""
    step_cost: StepCost
    """What a step takes on the device of the plan."""
    overheads: Overheads = Overheads()
    drafts: Drafts | None = None
    """``None``: the plan's drafter proposes nothing."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Bytes a second of KV stores, by name: of the first between KV pool and memory, of others from and to them."""

    def rate(self, store: str) -> float:
        """That of a store of the plan; one that is not known is assumed."""
        names = [choice.name for choice in self.plan.slots["kv_store"]]
        assumed = READ_RATE if names.index(store) else COPY_RATES.get(self.plan.device.kind, COPY_RATE)
        return self.rates.get(store, assumed)


def slower(cost: StepCost, factor: float) -> StepCost:
    """Of a device that takes ``factor`` times as long over every step."""
    return replace(
        cost,
        base_ms=cost.base_ms * factor,
        per_token_ms=cost.per_token_ms * factor,
        per_row_ms=cost.per_row_ms * factor,
        per_decode_context_ms=cost.per_decode_context_ms * factor,
        per_prefill_context_ms=cost.per_prefill_context_ms * factor,
        per_draft_ms=cost.per_draft_ms * factor,
    )
