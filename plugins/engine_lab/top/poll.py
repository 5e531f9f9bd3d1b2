"""One look at a running engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine.contracts.findings import EngineReader
from engine_lab.shared.live import Sample, metrics_of, plan_of

REQUESTS = 32
"""That ended last, of which the slowest are shown."""
COUNTERS = {
    "output_tokens": ("engine_ttft_seconds_count", "engine_itl_seconds_count"),
    "prefill_tokens": ("engine_step_tokens_total{kind=prefill}",),
    "requests": ("engine_requests_total",),
    "steps": ("engine_step_seconds_count",),
    "rows": ("engine_step_requests_sum",),
    "step_s": ("engine_step_seconds_sum",),
    "host_s": ("engine_step_host_seconds_sum",),
    "device_s": ("engine_step_device_seconds_sum",),
    "gap_s": ("engine_step_gap_seconds_sum",),
    "queries": ("engine_prefix_cache_queries_total",),
    "hits": ("engine_prefix_cache_hits_total",),
    "drafted": ("engine_drafted_tokens_total",),
    "accepted": ("engine_accepted_tokens_total",),
    "chains": ("engine_draft_chains_total",),
    "preemptions": ("engine_preemptions_total",),
}
"""What is counted, and the metrics it is the sum of. Output tokens are those that left, not those of ended requests."""


@dataclass(frozen=True, slots=True)
class Poll:
    """What the engine said."""

    at_s: float
    """Of the monotonic clock here."""
    stats: dict[str, Any]
    latency: dict[str, Any]
    requests: list[dict[str, Any]]
    counters: dict[str, float]


async def poll(engine: EngineReader) -> Poll:
    """Raises :class:`LiveError`."""
    stats, latency, requests, metrics = await asyncio.gather(
        engine.json("/engine/stats"),
        engine.json("/engine/latency"),
        engine.json(f"/engine/requests?count={REQUESTS}"),
        metrics_of(engine),
    )
    return Poll(time.monotonic(), stats or {}, latency, requests["requests"], counters_of(metrics))


def counters_of(metrics: Iterable[Sample]) -> dict[str, float]:
    """The sums of :data:`COUNTERS`, over all labels that they do not name."""
    totals: dict[str, float] = {}
    for sample in metrics:
        for name in (sample.name, f"{sample.name}{{kind={sample.labels.get('kind')}}}"):
            totals[name] = totals.get(name, 0.0) + sample.value
    return {key: sum(totals.get(name, 0.0) for name in names) for key, names in COUNTERS.items()}


async def about(engine: EngineReader) -> tuple[str, str]:
    """The model's name, and what it runs on. Raises :class:`LiveError`, also for an engine that is not ready yet."""
    plan = (await plan_of(engine))["plan"]
    chosen = (f"{slot}={plan['slots'][slot][0]['name']}" for slot in ("quantizer", "drafter") if slot in plan["slots"])
    return plan["model"]["name"], ", ".join((plan["device"]["name"], plan["dtype"], *chosen))
