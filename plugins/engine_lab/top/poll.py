"""One look at a running engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.contracts.findings import EngineReader
from engine.counters import declared
from engine_lab.shared.live import Sample, metrics_of, plan_of

REQUESTS = 32
"""That ended last, of which the slowest are shown."""
COUNTERS = {
    "output_tokens": (declared.TTFT.count, declared.ITL.count),
    "prefill_tokens": (declared.STEP_TOKENS.series("prefill"),),
    "requests": (declared.REQUESTS.name,),
    "steps": (declared.STEP.count,),
    "rows": (declared.STEP_REQUESTS.sum,),
    "step_s": (declared.STEP.sum,),
    "host_s": (declared.STEP_HOST.sum,),
    "device_s": (declared.STEP_DEVICE.sum,),
    "gap_s": (declared.STEP_GAP.sum,),
    "queries": (declared.PREFIX_CACHE_QUERIES.name,),
    "hits": (declared.PREFIX_CACHE_HITS.name,),
    "drafted": (declared.DRAFTED_TOKENS.name,),
    "accepted": (declared.ACCEPTED_TOKENS.name,),
    "chains": (declared.DRAFT_CHAINS.name,),
    "preemptions": (declared.PREEMPTIONS.name,),
}
"""What is counted, and the metrics it is the sum of. Output tokens are those that left, not those of ended requests."""


@dataclass(frozen=True, slots=True)
class Poll:
    """What the engine said."""

    at_s: float
    """Of the monotonic clock here."""
    stats: dict[str, Any]
    latency: dict[str, Any]
    """Empty: of several engines."""
    requests: list[dict[str, Any]]
    counters: dict[str, float]


def together(polls: Sequence[Poll]) -> Poll:
    """Of several engines: what can be added up. Percentiles cannot."""
    stats: dict[str, Any] = {name: sum(poll.stats.get(name, 0) for poll in polls) for name in ("running", "waiting")}
    stats["machine"] = polls[0].stats.get("machine")  # of the server, with all its engines
    blocks: dict[str, dict[str, Any]] = {}
    for group in (group for poll in polls for group in poll.stats.get("blocks", ())):
        found = blocks.setdefault(group["group"], {"group": group["group"], "total": 0, "leased": 0, "cached": 0})
        found |= {name: found[name] + group[name] for name in ("total", "leased", "cached")}
    ended = sorted((each for poll in polls for each in poll.requests), key=lambda request: request["ended_s_ago"])
    counters = {name: sum(poll.counters[name] for poll in polls) for name in COUNTERS}
    return Poll(polls[0].at_s, stats | {"blocks": list(blocks.values())}, {}, ended[:REQUESTS], counters)


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
        for name in (sample.name, *(f'{sample.name}{{{label}="{value}"}}' for label, value in sample.labels.items())):
            totals[name] = totals.get(name, 0.0) + sample.value
    return {key: sum(totals.get(name, 0.0) for name in names) for key, names in COUNTERS.items()}


async def about(engine: EngineReader) -> tuple[str, str]:
    """The model's name, and what it runs on. Raises :class:`LiveError`, also for an engine that is not ready yet."""
    plan = (await plan_of(engine))["plan"]
    chosen = (f"{slot}={plan['slots'][slot][0]['name']}" for slot in ("quantizer", "drafter") if slot in plan["slots"])
    return plan["model"]["name"], ", ".join((plan["device"]["name"], plan["dtype"], *chosen))
