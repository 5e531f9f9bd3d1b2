"""What a simulation found. All figures are simulated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request as its client saw it. ``api + queue + prefill == ttft``, ``ttft + decode == e2e``."""

    arrival_s: float
    engine: int
    """Index of the engine that served it."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    ttft_ms: float
    e2e_ms: float
    itl_ms: float
    """Mean time between its output tokens; 0 with one token."""
    api_ms: float
    """In the API process, before the first token."""
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    preemptions: int
    drafted: int
    accepted: int
    error: str = ""
    """Why the engine refused it; all times are 0 then."""
    service_class: str = ""


@dataclass(frozen=True, slots=True)
class SimulatedSteps:
    """All steps of one engine."""

    num_steps: int
    busy_s: float
    """Time in steps."""
    gap_s: float
    """Time between steps while requests were running."""
    prefill_tokens: int
    decode_tokens: int
    most_running: int
    most_waiting: int
    most_kv_used: float
    """Leased blocks / all blocks, 0..1."""
    preemptions: int


@dataclass(frozen=True, slots=True)
class Outcome:
    requests: tuple[SimulatedRequest, ...]
    """In the order of the trace."""
    steps: tuple[SimulatedSteps, ...]
    """By engine."""
    duration_s: float
    """From the first arrival to the last token."""
    itl_us: tuple[tuple[int, int], ...]
    """Gaps between consecutive output tokens of a request as (microseconds, how many), ascending."""
