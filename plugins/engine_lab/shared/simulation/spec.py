"""What is simulated: an engine's plugins, limits and costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from engine.assembly.plan import EnginePlan
from engine.contracts.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class Overheads:
    """Of the API process, around the engine process."""

    receive_ms: float = 0.0
    """Reading, parsing, routing, and the way to the engine process: per request."""
    tokenize_us: float = 0.0
    """Per prompt token."""
    deliver_ms: float = 0.0
    """From a step's end until its tokens are ready for the client."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """What stands for a drafter. How many drafts are asked for is up to the real policy."""

    placement: Literal["host", "device"]
    acceptance: float = 0.6
    """Chance that a draft is accepted, given that those before it were."""
    ms_per_draft: float = 0.0
    """What proposing takes, for each draft of the longest chain of a step."""


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


def slower(cost: StepCost, factor: float) -> StepCost:
    """Of a device that takes ``factor`` times as long over every step."""
    return replace(
        cost,
        base_ms=cost.base_ms * factor,
        per_token_ms=cost.per_token_ms * factor,
        per_row_ms=cost.per_row_ms * factor,
        per_decode_context_ms=cost.per_decode_context_ms * factor,
        per_prefill_context_ms=cost.per_prefill_context_ms * factor,
    )
