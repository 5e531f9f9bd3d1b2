"""What is simulated: an engine's plugins, limits and costs."""

from __future__ import annotations

from dataclasses import dataclass

from engine.assembly.plan import EnginePlan
from engine.contracts.scheduler import StepCost


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
class EngineSpec:
    """One engine."""

    plan: EnginePlan
    """Resolved. Its scheduler, KV allocator and limits are the real ones; its drafter's drafts are accepted by
    chance."""
    num_blocks: int
    """KV blocks of the groups that keep every token, as the engine reports them (the padding block included)."""
    step_cost: StepCost
    """What a step takes on the device of the plan."""
    overheads: Overheads = Overheads()
    acceptance: float = 0.6
    """Chance that a draft is accepted, given that those before it were."""
    draft_ms: float = 0.0
    """What a drafter adds to a step, for each draft of a request."""
