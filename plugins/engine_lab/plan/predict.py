"""What requests would see: the engine's own scheduler and allocator simulated with the costs of a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine_lab.bench.slo import Slo
from engine_lab.plan.cost import Cost
from engine_lab.plan.workload import PlannedLoad
from engine_lab.shared.errors import EvalError
from engine_lab.shared.simulation.run import simulate
from engine_lab.shared.simulation.spec import Drafts, EngineSpec
from engine_lab.shared.simulation.trace import TraceRequest
from engine_lab.shared.sizing import Sizing
from engine_lab.simulate.figures import figures

GOOD_SHARE = 0.95
"""Of requests that must keep the limits."""
HEADROOM = 1.2
BISECTIONS = 6


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one plan under one load. Times in ms, by percentile; ``None``: too few samples to say."""

    ttft_ms: dict[str, float | None]
    itl_ms: dict[str, float | None]
    e2e_ms: dict[str, float | None]
    mean_e2e_ms: float
    output_tokens_per_s: float
    utilisation: float
    """Share of the time in which the device computed."""
    most_running: int
    most_waiting: int
    most_kv_used: float
    preemptions: int
    refused: int
    cached_share: float
    """Of prompt tokens, found in the prefix cache."""
    good_share: float | None
    """Of requests that keep the limits; ``None``: there are none."""


def predict(sizing: Sizing, cost: Cost, trace: Sequence[TraceRequest], slo: Slo | None, seed: int = 0) -> Prediction:
    """Serve ``trace`` on a virtual clock. Raises ``ValueError`` for a trace that cannot be served."""
    drafts = None
    if sizing.drafting is not None and cost.drafts is not None and cost.drafts.acceptance:
        drafts = Drafts(sizing.drafting, cost.drafts)
    spec = EngineSpec(sizing.plan, sizing.blocks, cost.step, cost.overheads, drafts)
    found = figures(simulate(trace, [spec], seed=seed), slo)
    if found["refused"] == len(trace):
        shortest = min(request.prompt_tokens + request.output_tokens for request in trace)
        raise EvalError(
            f"no request of this load is served: the shortest has {shortest} tokens, and a request may have at most "
            f"{sizing.plan.max_len} (model.max_len) and what the KV pool holds, {sizing.kv_tokens}; send shorter ones"
        )
    (engine,) = found["engines"]
    return Prediction(
        ttft_ms=_shown(found["ttft_ms"]),
        itl_ms=_shown(found["itl_ms"]),
        e2e_ms=_shown(found["e2e_ms"]),
        mean_e2e_ms=found["e2e_ms"]["mean"] or float("inf"),
        output_tokens_per_s=found["output_tokens_per_s"],
        utilisation=engine["busy"],
        most_running=engine["most_running"],
        most_waiting=engine["most_waiting"],
        most_kv_used=engine["most_kv_used"],
        preemptions=found["preemptions"],
        refused=found["refused"],
        cached_share=found["cached_share"],
        good_share=found["good"] / found["requests"] if slo is not None else None,
    )


def most_rate(sizing: Sizing, cost: Cost, load: PlannedLoad, slo: Slo | None, count: int, seed: int) -> float:
    """Requests per second that one engine serves: as fast as it can, or with a ``slo`` so that :data:`GOOD_SHARE` of
    them keep it; 0: not even one by itself does."""
    at_once = predict(sizing, cost, load.requests(count, seed, float("inf")), slo, seed)
    most = at_once.output_tokens_per_s / _mean_output(load, count, seed)
    if slo is None:
        return most
    low, high = 0.0, most
    for _ in range(BISECTIONS):
        rate = (low + high) / 2
        share = predict(sizing, cost, load.requests(count, seed, rate), slo, seed).good_share
        low, high = (rate, high) if share is not None and share >= GOOD_SHARE else (low, rate)
    return low


def _mean_output(load: PlannedLoad, count: int, seed: int) -> float:
    return sum(request.output_tokens for request in load.requests(count, seed)) / count


def _shown(described: dict[str, Any]) -> dict[str, float | None]:
    return {name: described[name] for name in ("p50", "p95", "p99")}
