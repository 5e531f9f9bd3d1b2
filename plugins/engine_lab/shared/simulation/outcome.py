"""What a simulation found. All figures are simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.loop.messages import StoreState


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request as its client saw it. ``api + dispatch + queue + prefill + deliver == ttft``, ``ttft + decode ==
    e2e``."""

    arrival_s: float
    """When it was sent, since the start of the trace."""
    engine: int
    """Index of the engine that served or refused it; -1: none did."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    loaded: Mapping[str, int] = field(default_factory=dict)
    """Of these: from KV stores, by name. The others were in the KV pool."""
    ttft_ms: float = 0.0
    e2e_ms: float = 0.0
    itl_ms: float = 0.0
    """Mean time between its output tokens; 0 with one token."""
    api_ms: float = 0.0
    """Receiving and tokenizing."""
    dispatch_ms: float = 0.0
    """Until the engine process read the message: it does so between steps."""
    queue_ms: float = 0.0
    """Until its first step was planned."""
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    """From the first output token to the last."""
    deliver_ms: float = 0.0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    error: str = ""
    """Why the engine or the router refused it, or that its engine died; all times are 0 then."""
    service_class: str = ""
    """As the trace has it."""
    slo_class: str = ""
    """Its class of ``slo.classes``; empty: there are none."""
    ttft_target_ms: float = 0.0
    expected_ttft_ms: float | None = None
    """What was predicted when it was sent; ``None``: nothing was."""


@dataclass(slots=True)
class SimulatedSteps:
    """All steps of one engine."""

    num_steps: int = 0
    busy_ms: float = 0.0
    """In steps, drafting included."""
    gap_ms: float = 0.0
    """Between steps while requests were running."""
    prefill_tokens: int = 0
    decode_tokens: int = 0
    """Drafts included."""
    most_running: int = 0
    most_waiting: int = 0
    most_kv_used: float = 0.0
    """Leased blocks / all blocks, 0..1."""
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    requests: tuple[SimulatedRequest, ...]
    """In the order of the trace."""
    steps: tuple[SimulatedSteps, ...]
    """By engine."""
    duration_s: float
    """From the start of the trace to the last token."""
    itl_us: tuple[tuple[int, int], ...]
    """Gaps between consecutive output tokens of a request as (microseconds, how many), ascending."""
    stores: tuple[tuple[StoreState, ...], ...] = ()
    """By engine: its KV stores at the end, tier by tier."""
